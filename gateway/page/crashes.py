"""The last crashes of workers, as the daemon's status tells them, and what each had printed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.protocol.folders import GENERATION_HEADER, log_path
from mlxsup.protocol.log_files import tail
from mlxsup.protocol.states import HAS_PROCESS

MOST_CRASHES = 20
MOST_LINES = 60
MOST_READ_LINES = 5000
"""How far back in a log a generation is looked for."""

NO_CRASH = "asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """One end of a worker that nobody had asked for.

    Attributes:
        model: its name.
        generation: of the process that has ended.
        at: seconds since the epoch; None if nobody knows.
        reason: `crash`, `stall`, `load_error` and so on; see `last_exit` in the status.
        signal: that ended it; None for none.
        code: its exit code; None if a signal ended it.
        detail: the cause in words.
    """

    model: str
    generation: int
    at: float | None
    reason: str
    signal: str | None
    code: int | None
    detail: str


class Crashes:
    """Those that were seen, newest first."""

    def __init__(self) -> None:
        self._seen: deque[Crash] = deque(maxlen=MOST_CRASHES)

    def observe(self, status: Mapping[str, Any]) -> None:
        """Takes those that this status of the daemon has and no earlier one had."""
        new = [crash for row in status["models"] if (crash := crash_of(row)) is not None]
        new = [crash for crash in new if crash not in self._seen]
        self._seen.extend(sorted(new, key=lambda crash: crash.at or 0.0))

    def latest(self) -> list[Crash]:
        """The newest first."""
        return list(reversed(self._seen))


def crash_of(row: Mapping[str, Any]) -> Crash | None:
    """The last crash of a model; None if its last process was asked to end, or none has ended."""
    last = row.get("last_exit")
    if not last or last["reason"] == NO_CRASH:
        return None
    # If there is a process, the state counts it already; its pid may not be known yet.
    generation = row["generation"] - (1 if row["state"] in HAS_PROCESS else 0)
    return Crash(
        model=row["name"],
        generation=generation,
        at=last["at"],
        reason=last["reason"],
        signal=last["signal"],
        code=last["code"],
        detail=last["detail"],
    )


def lines_of(log_dir: Path, model: str, generation: int) -> list[str]:
    """The last lines that a process of a model has printed; empty if its log no longer has them."""
    lines = tail(log_path(log_dir, model), MOST_READ_LINES)
    found: list[str] = []
    is_inside = False
    for line in lines:
        rule = GENERATION_HEADER.match(line)
        if rule is not None:
            is_inside = int(rule.group(1)) == generation
            found = [] if is_inside else found
        elif is_inside:
            found.append(line)
    return found[-MOST_LINES:]
