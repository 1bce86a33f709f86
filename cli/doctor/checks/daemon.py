"""The daemon: whether it runs and answers, and whether it is the one that is meant."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ...broken_parts import BROKEN_MODELS
from ..facts import DaemonFacts
from ..finding import Finding, note, ok, problem

SUBJECT = "daemon"
START = "mlxsup start --detach"


def check_daemon(facts: DaemonFacts) -> Iterator[Finding]:
    """Judges who holds the runtime folder, and what the daemon there says of itself."""
    if facts.status is not None:
        yield from _running(facts, facts.status)
    elif facts.holder is not None:
        yield _silent(facts, facts.holder)
    else:
        yield from _absent(facts)
    for other in facts.others:
        end = f"mlxsup stop --endpoint {shlex.quote(other.endpoint)}"
        yield note(
            SUBJECT,
            f"another daemon runs at {other.endpoint} (pid {other.pid})",
            why="each plans with the memory of the whole machine",
            # Not a command: it may be somebody's who needs it.
            fix=f"end it with `{end}` if you do not need it",
        )


def _running(facts: DaemonFacts, status: Mapping[str, Any]) -> Iterator[Finding]:
    broken = [row for row in status["models"] if row["state"] in BROKEN_MODELS]
    for row in broken:
        name = shlex.quote(str(row["name"]))
        cause = row.get("cause") or (row.get("last_exit") or {}).get("reason") or ""
        yield problem(
            SUBJECT,
            f"{row['name']} {BROKEN_MODELS[row['state']]}" + (f": {cause}" if cause else ""),
            why="requests for it fail or wait",
            fix=f"read `mlxsup logs {name}`, fix the cause, then `mlxsup restart {name}`",
        )
    if status["version"] != facts.version:
        yield problem(
            SUBJECT,
            f"it is of version {status['version']}, and this command of {facts.version}",
            why="they may not understand each other",
            fix="stop it with `mlxsup stop`, and start it again",
        )
    path = status.get("config_path")
    if path and facts.config is not None and os.path.realpath(path) != str(facts.config):
        yield note(
            SUBJECT,
            f"it runs with {path}, and commands here read {facts.config}",
            why="a change of the latter does not reach it",
            fix="name the file with --config, or stop it with `mlxsup stop` and start it here",
        )
    if not broken:
        count = len(status["models"])
        models = f"{count} model{'' if count == 1 else 's'}"
        yield ok(SUBJECT, f"answers at {facts.endpoint} (pid {status['pid']}, {models})")


def _silent(facts: DaemonFacts, holder: int) -> Finding:
    if facts.is_stopped:
        return problem(
            SUBJECT,
            f"its process {holder} is stopped, as by Ctrl-Z or SIGSTOP",
            why="it answers nobody, and no other daemon can start in its folder",
            command=f"kill -CONT {holder}",
        )
    said = f": {facts.failure}" if facts.failure else ""
    if facts.is_beating:
        return problem(
            SUBJECT,
            f"its process {holder} works and does not answer at {facts.endpoint}{said}",
            why="it is busy, or may open no more files",
            fix="run this again in a moment; the end of its log says what it lacks",
        )
    return problem(
        SUBJECT,
        f"its process {holder} lives and does not answer at {facts.endpoint}{said}",
        why="no other daemon can start in its folder",
        fix=f"look at the end of its log; if it stays like this, end it with `kill {holder}`, and"
        f" with `kill -KILL {holder}` if it is still there a minute later",
    )


def _absent(facts: DaemonFacts) -> Iterator[Finding]:
    if facts.recorded is not None and facts.recorded_name:
        yield note(
            SUBJECT,
            f"none runs; the lock names process {facts.recorded}, which is now another program"
            f" ({facts.recorded_name})",
            why="ending that process would hit a stranger",
            command=START,
        )
    elif facts.leftovers:
        was = f" (pid {facts.recorded})" if facts.recorded is not None else ""
        plural = "" if facts.leftovers == 1 else "s"
        yield note(
            SUBJECT,
            f"none runs; the last one{was} was killed and left its socket{plural}",
            why="clients find nobody behind it; the next start removes it",
            command=START,
        )
    else:
        yield ok(SUBJECT, f"none runs at {facts.endpoint}")
