"""What was measured of each row: every run of it, in one file as soon as the row is complete."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from promises.results import clean_commit, machine

TRIAL = "trial"
"""In the place of a commit: small shapes, to try the script; no document shows them."""

FAILURES = "failures.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The figures of one claim.

    Attributes:
        values: one for each run, in order.
        sides: what they were made of, by name, such as "in process"; a value for each run.
        unit: of the sides.
        note: what a reader must know, one sentence; may be empty.
    """

    values: Sequence[float]
    sides: Mapping[str, Sequence[float]] = field(default_factory=dict)
    unit: str = ""
    note: str = ""


Founds = Mapping[str, Found]
"""By the ids of claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A row that was measured.

    Attributes:
        row: its name.
        commit: of the tree that was measured, or TRIAL.
        machine: where, with the versions that decide about figures.
        ended: the date, in UTC.
        took_s: how long it took.
        found: the figures, by claim.
    """

    row: str
    commit: str
    machine: str
    ended: str
    took_s: float
    found: Founds


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An attempt that gave no figures.

    Attributes:
        rows: that it was to measure and has not.
        commit: of the tree, or TRIAL.
        ended: the date and time, in UTC.
        reason: the last line that it printed, or that it ran past its limit.
    """

    rows: Sequence[str]
    commit: str
    ended: str
    reason: str


def result_of(entry: dict[str, Any]) -> Result:
    """Reads what `asdict` has made of a result."""
    found = {claim: Found(**about) for claim, about in entry["found"].items()}
    return Result(**{**entry, "found": found})


def device() -> str:
    """The name of the GPU; empty if there is no tool that tells."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return ", ".join(names.split("\n")).strip(", ")


def commit_of(given: str | None, *, is_small: bool) -> str:
    """The commit to measure for: as given, or that of the tree.

    Raises:
        UncleanTreeError: none is given, and the tree is that of no commit.
    """
    return TRIAL if is_small else given or clean_commit()


class Store:
    """The results of one commit in a folder, one file for each row.

    Args:
        folder: made if it does not exist.
        commit: what counts as measured; results of other commits are replaced.
    """

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder
        self.commit = commit

    def load(self, row: str) -> Result | None:
        """What was measured of a row at this commit."""
        path = self.folder / f"{row}.json"
        if not path.exists():
            return None
        result = result_of(json.loads(path.read_text()))
        return result if result.commit == self.commit else None

    def save(self, row: str, found: Founds, took_s: float) -> Result:
        """Keeps a row that has just been measured."""
        self.folder.mkdir(parents=True, exist_ok=True)
        result = Result(
            row=row,
            commit=self.commit,
            machine=" · ".join(filter(None, (device(), machine()))),
            ended=datetime.now(UTC).date().isoformat(),
            took_s=round(took_s, 1),
            found=found,
        )
        draft = self.folder / f"{row}.new"
        draft.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")
        draft.replace(self.folder / f"{row}.json")
        return result

    def note_failure(self, rows: Sequence[str], reason: str) -> None:
        """Remembers an attempt that gave no figures: the document lists every run made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        failure = Failure(rows=rows, commit=self.commit, ended=ended, reason=reason)
        with (self.folder / FAILURES).open("a") as file:
            file.write(json.dumps(asdict(failure), ensure_ascii=False) + "\n")

    def failures(self) -> list[Failure]:
        """All attempts at this commit that gave no figures, in order."""
        path = self.folder / FAILURES
        if not path.exists():
            return []
        every = [Failure(**json.loads(line)) for line in path.read_text().splitlines()]
        return [one for one in every if one.commit == self.commit]
