"""The archive that `mlxsup why --report` writes, without prompts, answers and keys.

A prompt looks like any other text. So texts are left out unless the name of their field is known to
hold none; numbers, states and names of models stay.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlxsup.protocol.log_files import tail
from mlxsup.protocol.regular_file import new_file, room_hint
from mlxsup.protocol.version import VERSION

from ..connection import read_toml
from ..exit_status import CliError, ExitStatus
from .recording import Recording

FOLDER = "mlxsup-report"
LOG_LINES = 400
"""The last lines of each log that are in it."""
MOST_LOGS = 64
MOST_ENTRIES = 5000

PACKAGES = ("mlx", "mlx-lm", "mlx-metal", "transformers", "huggingface_hub", "pyzmq", "msgpack")

README = """\
Written by `mlxsup why --report`. It has no prompt, no answer and no key: texts are left out unless
their field is known to hold none. Look through it before you send it.

versions.json       of mlxsup, of what it uses, and of the system
configuration.json  the configuration file
status.json         what the daemon said, if it answered
flight.json         what the flight recorder holds
logs/               the ends of the logs
"""

LEFT_OUT = "(left out)"

KEPT = frozenset(
    {
        "address", "after", "at", "backend", "batching", "before", "code", "config_path", "doing",
        "ended_by", "endpoint", "engine", "evidence", "fate", "from", "id", "kind", "level",
        "listen", "log_dir", "log_format", "log_level", "machine", "max_priority", "memory",
        "memory_budget", "memory_limit", "mlx", "mlx-lm", "mlxsup", "mode", "model", "name",
        "outcome", "path", "phase", "platform", "prefix_cache", "priority", "python", "reason",
        "release", "repo", "revision", "runtime_dir", "signal", "state", "to", "version",
        "wanted", "why", "wired",
    }
)  # fmt: skip
"""Fields with texts that are names, states, sizes or places."""

_WORD = re.compile(r"[a-z_]+")
SHAPES = {"reason": _WORD, "code": _WORD, "id": re.compile(r"\S+")}
"""Fields of this name hold sentences or whatever a client has chosen, too."""

OF_LOADS = KEPT | {"detail", "verdict", "failure", "note"}
"""Fields that are kept of a process that never was READY, and so has seen no prompt."""

_KEY = re.compile(
    r"(?i)\b(?:sk|hf|ghp|gho|xox[abp]|pk|rk)[-_][\w-]{6,}"
    r"|\bBearer\s+\S+"
    r"|\b(?=\w*\d)(?=\w*[A-Za-z])\w{24,}={0,2}"
)
"""Looks like a key: a known beginning, or a long run of letters and digits."""

_SAFE = re.compile(
    r"\S+Z (?:DEBUG|INFO|WARNING|ERROR)(?= )"
    r"|--- generation \d+ pid \d+ \S+Z$|--- \d+ bytes lost here$"
    r"|\s+File \"[^\"]*\", line \d+(?:, in [\w<>.]+| in [\w<>.]+)?$"
    r"|Fatal Python error: (?:Segmentation fault|Aborted|Bus error|Illegal \w+)$"
    r"|(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Warning)(?=:|$)"
)
"""The beginnings of lines that hold no text: times, rule lines, the places and the kind of a trace.
What the daemon says about models and requests is in the flight recorder."""


def write_report(
    path: Path,
    recording: Recording,
    *,
    folder: Path,
    config: Path | None,
    status: Mapping[str, Any] | None,
) -> list[str]:
    """Write the archive, which only its owner may read; return the names of the files in it.

    Args:
        path: of the archive, which must not exist.
        recording: of the daemon.
        folder: for its logs.
        config: its configuration file; None if it has none.
        status: of the daemon; None if it does not answer.
    """
    parts = dict(_parts(recording, folder, config, status))
    try:
        with new_file(path.expanduser()) as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, text in parts.items():
                data = text.encode(errors="replace")
                member = tarfile.TarInfo(f"{FOLDER}/{name}")
                member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
                tar.addfile(member, io.BytesIO(data))
    except FileExistsError:
        message, hint = f"{path} already exists", "choose another file"
        raise CliError(message, code="file_exists", hint=hint, status=ExitStatus.USAGE) from None
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        hint = room_hint(error, "choose a file in a writable folder")
        raise CliError(message, code="file", hint=hint) from None
    return list(parts)


def _parts(
    recording: Recording, folder: Path, config: Path | None, status: Mapping[str, Any] | None
) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    yield "README.txt", README
    yield "versions.json", _json(_versions())
    configuration: Any = {"file": "none"}
    if config is not None:
        try:
            configuration = redacted(read_toml(config))  # without comments, which may say anything
        except CliError:
            configuration = {"file": "it cannot be read or is not TOML"}
    yield "configuration.json", _json(configuration)
    if status is not None:
        said = {name: value for name, value in status.items() if name != "flight"}
        yield "status.json", _json(redacted(said))
    runs = [
        {
            "is_alive": run.is_alive,
            "alive_at": run.alive_at,
            "started": run.started.to_map() if run.started else None,
            "ended": run.ended.to_map() if run.ended else None,
            "entries": [_entry(one.to_map()) for one in run.entries[-MOST_ENTRIES:]],
        }
        for run in recording.runs
    ]
    yield "flight.json", _json({"damage": bool(recording.damage), "runs": runs})
    for log in sorted(folder.glob("*.log"))[:MOST_LOGS]:
        lines = map(redacted_line, tail(log, LOG_LINES))
        yield f"logs/{log.name}", "".join(f"{line}\n" for line in lines)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"mlxsup": VERSION}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {
        "python": platform.python_version(),
        "platform": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "variables": sorted(name for name in os.environ if name.startswith(("MLXSUP_", "HF_"))),
    }


def _entry(entry: Mapping[str, Any]) -> Any:
    """Return an entry, with its sentences if its process has seen no prompt."""
    is_load = entry.get("kind") == "worker_died" and entry.get("ready_s") is None
    return redacted(entry, kept=OF_LOADS if is_load else KEPT)


def redacted(value: Any, name: str = "", *, kept: frozenset[str] = KEPT) -> Any:
    """Return the value without what could be a prompt, an answer or a key.

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
            is_kept = name in kept and (name not in SHAPES or SHAPES[name].fullmatch(value))
            return without_keys(value) if is_kept else LEFT_OUT
        case _:
            return value


def redacted_line(line: str) -> str:
    """Return the beginning of a log's line that holds no text, and that the rest is left out."""
    found = _SAFE.match(line)
    kept = found[0] if found is not None else ""
    return without_keys(kept) + (f" {LEFT_OUT}" if kept != line else "")


def without_keys(text: str) -> str:
    """Return the text without what looks like a key."""
    return _KEY.sub(LEFT_OUT, text)
