"""What may leave this machine in a report: nothing that could be a prompt, an answer or a key.

Nobody can tell a prompt from other text. So texts are left out unless the name of their field is
known to hold none; numbers, states and names of models stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

LEFT_OUT = "(left out)"

KEPT = frozenset(
    {
        "address", "after", "at", "backend", "batching", "before", "config_path", "doing",
        "ended_by", "endpoint", "engine", "evidence", "fate", "from", "id", "kind", "level",
        "listen", "log_dir", "log_format", "log_level", "machine", "max_priority", "memory",
        "memory_budget", "memory_limit", "mlx", "mlx-lm", "mlxsup", "mode", "model", "name",
        "outcome", "path", "phase", "platform", "prefix_cache", "priority", "python", "reason",
        "release", "repo", "revision", "runtime_dir", "signal", "state", "to",
        "version", "wanted", "why", "wired",
    }
)  # fmt: skip
"""Fields with texts that are names, states, sizes or places."""

CAUSES = frozenset(
    {
        "out of memory", "GPU time-out", "GPU fault of another process", "no usable device",
        "model missing", "bad model", "stream error", "unknown",
    }
)  # fmt: skip
"""The classes of deaths, which a field `cause` may have."""

WORKER_MESSAGES = frozenset(
    {
        "a prompt could not be prepared", "answer not rendered", "compiled kernels not kept",
        "damaged kernels deleted",
        "model ready", "model warmed up", "request rejected", "rows may not share all passes",
        "rows run as configured", "slow preprocessing", "token for a row that is gone",
        "unusable kernels deleted", "worker dies", "worker exits", "worker started",
    }
)  # fmt: skip
"""What our own lines in a worker's log begin with; libraries write lines that look like them."""

OURS = frozenset({"detail", "verdict", "failure", "note"})
"""Fields that are kept in an entry of a process that never was READY, and so has seen no prompt."""

_KEY = re.compile(
    r"(?i)\b(?:sk|hf|ghp|gho|xox[abp]|pk|rk)[-_][\w-]{6,}"
    r"|\bBearer\s+\S+"
    r"|\b(?=\w*\d)(?=\w*[A-Za-z])\w{24,}={0,2}"
)
"""What looks like a key: a known beginning, or a long run of letters and digits."""

SHAPES = {"reason": re.compile(r"[a-z_]+"), "id": re.compile(r"\S+")}
"""Fields of this name hold sentences or whatever a client has chosen, too."""

_LINE = re.compile(r"(?P<begin>\S+Z (?:DEBUG|INFO|WARNING|ERROR)) (?P<rest>.*)")
_HEADER = re.compile(r"--- generation \d+ pid \d+ \S+Z$|--- \d+ bytes lost here$")
_TRACE = re.compile(r'\s+File "[^"]*", line \d+(?:, in [\w<>.]+| in [\w<>.]+)?$')
_RAISED = re.compile(r"(?P<kind>(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Warning))(?::|$)")
_FATAL = re.compile(r"Fatal Python error: (?:Segmentation fault|Aborted|Bus error|Illegal \w+)$")
_FACT = re.compile(r'(?P<name>[\w-]+)=(?P<value>"(?:[^"\\]|\\.)*"|\S*)')
_PLAIN = re.compile(r"-?\d[\d.,:TZ+-]*|yes|no|None|True|False")


def redacted(value: Any, name: str = "", *, kept: frozenset[str] = KEPT) -> Any:
    """The value without what could be a prompt, an answer or a key.

    Args:
        value: plain values.
        name: of the field that has it.
        kept: the names of fields with texts that may stay.
    """
    match value:
        case Mapping():
            return {
                without_keys(str(key)): redacted(item, str(key), kept=kept)
                for key, item in value.items()
            }
        case list() | tuple():
            return [redacted(item, name, kept=kept) for item in value]
        case str() if value:
            is_kept = name in kept and (name not in SHAPES or bool(SHAPES[name].fullmatch(value)))
            return without_keys(value) if is_kept or value in CAUSES else LEFT_OUT
        case _:
            return value


def redacted_entry(entry: Mapping[str, Any]) -> Any:
    """An entry of the flight recorder, with its sentences if its process has seen no prompt."""
    is_load = entry.get("kind") == "worker_died" and entry.get("ready_s") is None
    is_load = is_load and not entry.get("rows")
    return redacted(entry, kept=KEPT | OURS if is_load else KEPT)


def redacted_line(line: str, *, is_daemon: bool) -> str:
    """A line of a log: ours without texts, the places of a trace, and of others nothing.

    Args:
        line: of the log.
        is_daemon: whether only the daemon writes there, and nothing that it calls.
    """
    if is_daemon and line.startswith("{"):
        return _object(line)
    if ours := _LINE.fullmatch(line):
        return f"{ours['begin']} {_facts(ours['rest'], is_daemon=is_daemon)}"
    if _HEADER.fullmatch(line) or _TRACE.fullmatch(line) or _FATAL.fullmatch(line):
        return without_keys(line)
    if raised := _RAISED.match(line):
        return f"{raised['kind']}: {LEFT_OUT}"
    return f"{LEFT_OUT}: {len(line)} characters" if line.strip() else ""


def without_keys(text: str) -> str:
    """The text without what looks like a key."""
    return _KEY.sub(LEFT_OUT, text)


def _object(line: str) -> str:
    """A line of the daemon's log as JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return LEFT_OUT
    return json.dumps(redacted(value, kept=KEPT | {"message"}), ensure_ascii=False)


def _facts(text: str, *, is_daemon: bool) -> str:
    """The message of a line, and those of its facts that are no texts."""
    first = _FACT.search(text)
    message = text[: first.start()].rstrip() if first else text
    if not is_daemon and message not in WORKER_MESSAGES:
        return LEFT_OUT
    facts = [
        f"{fact['name']}={_value(fact['name'], fact['value'])}" for fact in _FACT.finditer(text)
    ]
    return " ".join([without_keys(message), *facts])


def _value(name: str, value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    text = value.strip('"')
    if name == "cause":
        return value if text in CAUSES else LEFT_OUT
    return without_keys(value) if name in KEPT and text == value else LEFT_OUT
