"""The record of a daemon: its files, and what it has in memory while it lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from mlxsup.protocol.flight import (
    MODELS_FILE_NAME,
    OF_MODELS,
    OF_REQUESTS,
    REQUESTS_FILE_NAME,
    DaemonEnded,
    DaemonStarted,
    Recorded,
    WorkerDied,
    read_line,
    read_recorded,
)
from mlxsup.protocol.ids import LAST_REQUEST
from mlxsup.protocol.log_files import all_lines, written_at

from ..terminal.text import counted

LOST = "--- "
"""Begins a line that says how much could not be written."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The record of one daemon.

    Attributes:
        started: its start; None if that has gone with older files.
        entries: everything between its start and its end, oldest first.
        ended: its end; None if it lives, or ended without a word.
        is_alive: true while it lives.
        alive_at: its last sign of life, seconds since the epoch.
    """

    started: Recorded | None = None
    entries: list[Recorded] = field(default_factory=list)
    ended: Recorded | None = None
    is_alive: bool = False
    alive_at: float = 0.0

    @property
    def start(self) -> DaemonStarted | None:
        """Return the entry of its start, if that is known."""
        entry = self.started.entry if self.started is not None else None
        return entry if isinstance(entry, DaemonStarted) else None

    @property
    def begun_at(self) -> float:
        """Return when it started; 0 if that is not known."""
        return self.started.at if self.started is not None else 0.0

    @property
    def pid(self) -> int | None:
        """Return the daemon's process id, if its start is known."""
        return self.start.pid if self.start is not None else None

    @property
    def has_died(self) -> bool:
        """True if the daemon ended without a word: it was killed, or the machine failed."""
        return not self.is_alive and self.ended is None

    def add(self, one: Recorded) -> None:
        """Add an entry, or the end."""
        if isinstance(one.entry, DaemonEnded):
            self.ended = one
        else:
            self.entries.append(one)


class Death(NamedTuple):
    """A death of a worker, and the daemon that recorded it."""

    run: Run
    recorded: Recorded
    died: WorkerDied


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The runs of the daemons of one place, oldest first.

    Attributes:
        runs: at least one entry is in each, unless it is that of a daemon that lives.
        damage: what could not be read, in one sentence; empty if nothing is wrong.
    """

    runs: list[Run]
    damage: str = ""

    @property
    def latest(self) -> Run | None:
        """Return the run of the latest daemon."""
        return self.runs[-1] if self.runs else None

    @property
    def models(self) -> list[str]:
        """Every model of which anything is recorded."""
        entries = (one.entry for run in self.runs for one in run.entries)
        return list(dict.fromkeys(one.model for one in entries if isinstance(one, OF_MODELS)))

    def of_model(self, model: str) -> list[Recorded]:
        """Return what happened to a model, oldest first."""
        entries = (one for run in self.runs for one in run.entries)
        return [
            one for one in entries if isinstance(one.entry, OF_MODELS) and one.entry.model == model
        ]

    def deaths_of(self, model: str) -> list[Death]:
        """Return the deaths of a model's workers, oldest first."""
        return [
            Death(run, one, one.entry)
            for run in self.runs
            for one in run.entries
            if isinstance(one.entry, WorkerDied) and one.entry.model == model
        ]

    def runs_of_request(self, name: str) -> list[tuple[Run, int]]:
        """Return the requests with this id, number (`#12` or `12`) or `last`, oldest first: the run
        and the number of each."""
        seen = {
            (place, one.entry.number): one.entry.id
            for place, run in enumerate(self.runs)
            for one in run.entries
            if isinstance(one.entry, OF_REQUESTS)
        }
        found = [key for key, id in seen.items() if id == name]
        found = found or [key for key in seen if name.removeprefix("#") == str(key[1])]
        if not found and seen and name == LAST_REQUEST:
            found = [max(seen)]
        return [(self.runs[place], number) for place, number in found]


def read_recording(folder: Path, status: Mapping[str, Any] | None, now: float) -> Recording:
    """Read the files, and add what the daemon that lives has in memory.

    Args:
        folder: for the logs.
        status: of that daemon, with `flight`; None if none answers.
        now: seconds since the epoch.
    """
    runs = [Run()]  # the first one is of what is older than every start that is left
    damage: list[str] = []
    models = folder / MODELS_FILE_NAME
    for path in (models, folder / REQUESTS_FILE_NAME):
        run: Run | None = None
        for one in _lines_of(path, damage):
            if isinstance(one.entry, DaemonStarted):
                run = next((known for known in runs if known.started == one), None)
                if run is None:
                    run = Run(started=one)
                    runs.append(run)
            elif run is not None:
                run.add(one)
            else:  # its start has gone with an older file
                before = (known for known in runs if known.begun_at <= one.at)
                max(before, key=lambda known: known.begun_at).add(one)
    runs.sort(key=lambda run: run.begun_at)
    if not runs[0].entries and runs[0].ended is None:
        del runs[0]
    if status is not None:
        _add_memory(runs, status, now)
    for run in runs:
        run.entries.sort(key=lambda one: one.number)
    _date_ends(runs, written_at(models))
    return Recording(runs=runs, damage="; ".join(damage))


def _lines_of(path: Path, damage: list[str]) -> Iterator[Recorded]:
    """Yield what a file says; adds to `damage` what cannot be read, in a phrase each."""
    try:
        lines = all_lines(path)
    except OSError as error:
        damage.append(f"{path} cannot be read: {error.strerror}")
        return
    damaged, has_lost = 0, False
    for line in lines:
        try:
            yield read_line(line)
        except ValueError:
            if line.startswith(LOST):
                has_lost = True
            else:
                damaged += 1
    if damaged:
        skipped = f"{counted(damaged, 'line')} of the flight recorder"
        damage.append(f"{skipped} cannot be read and were skipped, in {path.name}")
    if has_lost:
        damage.append(f"a part of {path.name} is missing, perhaps because the disk was full")


def _add_memory(runs: list[Run], status: Mapping[str, Any], now: float) -> None:
    """Add what the daemon that lives has not written, as on a full disk."""
    if not runs or runs[-1].ended is not None or runs[-1].pid != status.get("pid"):
        runs.append(Run())
    runs[-1].is_alive = True
    known = {one.number for one in runs[-1].entries}
    for kept in status.get("flight") or ():
        rest = {name: value for name, value in kept.items() if name != "ago_s"}
        try:
            one = read_recorded({**rest, "at": now - kept["ago_s"]})
        except ValueError:  # a daemon of another version knows other entries
            continue
        if one.number not in known:
            runs[-1].entries.append(one)


def _date_ends(runs: Sequence[Run], touched_at: float) -> None:
    """Note when each run gave its last sign of life."""
    for run, after in zip_longest(runs, runs[1:]):
        stated = touched_at
        if after is not None:
            stated = (after.start.before_alive_at if after.start is not None else None) or 0.0
        known = (one.at for one in (run.started, *run.entries[-1:], run.ended) if one is not None)
        run.alive_at = max([stated, *known])
