"""The last crashes and the requests that have ended, as the daemon's flight recorder has them.

Its files outlive the gateway and the daemon, so nothing is noted here in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxsup.protocol.death_causes import explain
from mlxsup.protocol.flight import (
    CONTINUES,
    MODELS_FILE_NAME,
    REQUESTS_FILE_NAME,
    Recorded,
    RequestEnded,
    WorkerDied,
    read_line,
)
from mlxsup.protocol.log_files import tail
from mlxsup.protocol.states import ExitReason

MOST_CRASHES = 20
MOST_ENDED = 20
MOST_ENTRIES = 2000
"""How far back in a file of the recorder they are looked for."""

Read = Callable[[Recorded], dict[str, Any] | None]


class Recorder:
    """The files of the recorder, each read again only once it has grown. Its methods block."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        # For each file its inode and length, and what was found.
        self._known: dict[str, tuple[tuple[int, int], list[dict[str, Any]]]] = {}

    def crashes(self) -> list[dict[str, Any]]:
        """Return the last crashes, newest first: `model`, `generation`, `at`, `what` and `advice`
        in words, and how many requests `continue` and were `lost`."""
        return self._latest(MODELS_FILE_NAME, WorkerDied.KIND, crash_of, MOST_CRASHES)

    def ended(self) -> list[dict[str, Any]]:
        """Return the requests that have ended last, newest first: `number`, `model`, `client`,
        `at`, `outcome`, `tokens`, `total_s` and `tokens_per_s`."""
        return self._latest(REQUESTS_FILE_NAME, RequestEnded.KIND, ended_of, MOST_ENDED)

    def _latest(self, name: str, kind: str, read: Read, most: int) -> list[dict[str, Any]]:
        path = self._log_dir / name
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return []
        mark = stat.st_ino, stat.st_size
        known = self._known.get(name)
        if known is None or known[0] != mark:
            known = mark, _found(path, kind, read, most)
            self._known[name] = known
        return known[1]


def _found(path: Path, kind: str, read: Read, most: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in reversed(tail(path, MOST_ENTRIES)):
        if f'"{kind}"' not in line:  # most lines: they need not be parsed
            continue
        try:
            one = read(read_line(line))
        except ValueError:  # it was cut off, or is of another version
            continue
        if one is not None:
            found.append(one)
        if len(found) == most:
            break
    return found


def crash_of(recorded: Recorded) -> dict[str, Any] | None:
    """Return a death as the page shows it; None if it was asked for."""
    died = recorded.entry
    if not isinstance(died, WorkerDied) or died.reason == ExitReason.ASKED:
        return None
    told = explain(died)
    continued = sum(row.fate == CONTINUES for row in died.rows)
    return {
        "model": died.model,
        "generation": died.generation,
        "at": recorded.at,
        "what": told.what,
        "advice": told.advice,
        "continue": continued,
        "lost": len(died.rows) + died.more_rows - continued,
    }


def ended_of(recorded: Recorded) -> dict[str, Any] | None:
    """Return a request that has ended as the page shows it."""
    ended = recorded.entry
    if not isinstance(ended, RequestEnded):
        return None
    return {
        "number": f"#{ended.number}",
        "model": ended.model,
        "client": ended.client,
        "at": recorded.at,
        "outcome": ended.outcome,
        "tokens": ended.usage.completion_tokens,
        "total_s": ended.timings.total_s,
        "tokens_per_s": ended.tokens_per_s,
        "resumed": ended.resumed,
    }
