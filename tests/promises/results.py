"""What has been measured so far, one file for each measure and campaign, for one commit each."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from mlxsup.protocol.version import VERSION

from .campaigns import ROOT, Campaign, Run
from .measure import Measure, Outcome
from support.verdict import Verdict

NOT_DOCS = ":(exclude)docs"
FOLDER = ROOT / "docs" / "promises"
"""Results of each commit; they are published with its figures."""


class UncleanTreeError(Exception):
    """The tree is not that of one commit, so that no commit can be named for a figure."""


def git(*arguments: str) -> str:
    """What git says of this checkout.

    Raises:
        subprocess.CalledProcessError: git refuses.
        FileNotFoundError: there is no git.
    """
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def clean_commit() -> str:
    """The commit that the tree is to the last byte, docs/ aside, which campaigns write.

    Raises:
        UncleanTreeError: something is changed or untracked, or there is no history.
    """
    try:
        changed = git("status", "--porcelain", "--", ".", NOT_DOCS)
        commit = git("rev-parse", "HEAD")
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        raise UncleanTreeError(f"git names no commit: {error}") from error
    if changed:
        raise UncleanTreeError(f"the tree is not that of {commit[:12]}:\n{changed}")
    return commit


def machine() -> str:
    """Where this process runs, with the versions that decide about figures."""
    memory_gib = psutil.virtual_memory().total / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "pyzmq"))
    return (
        f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores,"
        f" {memory_gib:.0f} GiB · Python {platform.python_version()}, mlxsup {VERSION}, {packages}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """When and where a result came about.

    Attributes:
        ended: the date, in UTC.
        machine: as `machine` says it.
    """

    ended: str
    machine: str


class Results:
    """The results of one commit.

    Args:
        commit: 40 hexadecimal digits.
        folder: holds one folder for each commit.
    """

    def __init__(self, commit: str, folder: Path = FOLDER) -> None:
        self.commit = commit
        self._folder = folder / commit

    def path(self, key: str) -> Path:
        """The file of a measure or campaign."""
        return self._folder / f"{key}.json"

    def save_outcome(self, outcome: Outcome) -> None:
        """Replaces what is known of this measure."""
        self._save(
            outcome.measure.key,
            {
                "samples": outcome.samples,
                "rounds": outcome.rounds,
                "problem": outcome.problem.replace(f"{ROOT}/", ""),
                "problem_verdict": outcome.problem_verdict,
            },
        )

    def load_outcome(self, measure: Measure) -> tuple[Outcome, Note | None]:
        """What is known of a measure; without a note nothing is."""
        found = self._load(measure.key)
        if found is None:
            return Outcome(measure=measure), None
        outcome = Outcome(
            measure=measure,
            samples=found["samples"],
            rounds=found["rounds"],
            problem=found["problem"],
            problem_verdict=Verdict(found["problem_verdict"]),
        )
        return outcome, _note(found)

    def save_run(self, run: Run) -> None:
        """Replaces what is known of this campaign."""
        about = {"verdict": run.verdict, "lines": run.lines, "took_s": run.took_s}
        self._save(run.campaign.name, about)

    def load_run(self, campaign: Campaign) -> tuple[Run, Note] | None:
        """What is known of a campaign."""
        found = self._load(campaign.name)
        if found is None:
            return None
        run = Run(
            campaign=campaign,
            verdict=Verdict(found["verdict"]),
            lines=tuple(found["lines"]),
            took_s=found["took_s"],
        )
        return run, _note(found)

    def _save(self, key: str, values: Mapping[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        today = datetime.now(UTC).date().isoformat()
        about = {"commit": self.commit, "ended": today, "machine": machine(), **values}
        draft = self.path(key).with_suffix(".new")
        draft.write_text(json.dumps(about, indent=1))
        draft.replace(self.path(key))

    def _load(self, key: str) -> dict[str, Any] | None:
        path = self.path(key)
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        assert found["commit"] == self.commit, f"{path} is of another commit"
        return found


def _note(found: Mapping[str, Any]) -> Note:
    return Note(ended=found["ended"], machine=found["machine"])
