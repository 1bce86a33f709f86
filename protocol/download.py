"""The start of a download, and its reports.

A download is a process, `python -P -m mlxsup.downloader`, started by the supervisor for a model or
by `mlxsup pull`. It gets one `DownloadSpec` as a line of JSON on its standard input, which stays
open for as long as its parent lives: EOF means that no process is left to download for. It
reports on its standard output, one line of JSON each; any other line there is for a log.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .ids import DEFAULT_REVISION

_REPORT_KEY = "mlxsup_download"


@dataclass(frozen=True, slots=True, order=True)
class Repository:
    """A model repository of a hub, at a revision.

    Attributes:
        repo: OWNER/NAME.
        revision: a branch, a tag or a commit.
    """

    repo: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        at = "" if self.revision == DEFAULT_REVISION else f" at {self.revision}"
        return f"{self.repo}{at}"


@dataclass(frozen=True, slots=True)
class Search:
    """A search for repositories with models in MLX's format.

    Attributes:
        words: in their names.
    """

    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSpec:
    """Everything that the process gets at its start; it ends with its standard input.

    Attributes:
        repository: what to download; None: it searches.
        words: what it searches for.
    """

    repository: Repository | None = None
    words: str = ""


class DownloadProblem(StrEnum):
    """The reason why a download has ended without a model."""

    BAD_REPOSITORY = "bad_repository"
    """No repository can be called that."""
    NOT_FOUND = "not_found"
    """There is no such repository or revision, or it is private."""
    GATED = "gated"
    """Its terms have to be accepted first."""
    REFUSED = "refused"
    """The hub refuses the token."""
    NO_MODEL = "no_model"
    """The repository holds no model in mlx-lm's format."""
    OFFLINE = "offline"
    """`HF_HUB_OFFLINE` is set."""
    DISK_FULL = "disk_full"
    """The model does not fit on the disk."""
    UNWRITABLE = "unwritable"
    """The folder of the cache cannot be written to."""
    DAMAGED = "damaged"
    """What arrived is not what the hub had announced, and was not at a second attempt either."""
    RATE_LIMITED = "rate_limited"
    """The hub asks for patience."""
    NETWORK = "network"
    """The hub does not answer, or stops answering."""
    INTERNAL = "internal"
    """The download itself failed."""


OUTAGES = {
    DownloadProblem.NETWORK: "the network",
    DownloadProblem.RATE_LIMITED: "the hub",
}
"""Problems that end by themselves, with what another attempt waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadProgress:
    """The progress of a download.

    Attributes:
        done_bytes: of the model, on this disk; with what was there before.
        total_bytes: of the model; 0 while that is not known yet.
        is_waiting: another process is downloading the same repository, and this one waits for it.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    is_waiting: bool = False

    @property
    def fraction(self) -> float:
        """Return how much has come, from 0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadDone:
    """The model is complete.

    Attributes:
        folder: the snapshot, absolute.
        total_bytes: of the model.
        fetched_bytes: how much of it came over the network this time.
    """

    folder: str
    total_bytes: int
    fetched_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadFailed:
    """The download has ended without a model; what had arrived is kept for the next attempt.

    Attributes:
        problem: what kind of failure.
        message: one sentence for people, without a full stop.
        hint: what to do; may be empty.
        retry_after_s: when the hub allows another attempt; 0 if it does not say.
    """

    problem: DownloadProblem
    message: str
    hint: str = ""
    retry_after_s: float = 0.0

    @property
    def is_passing(self) -> bool:
        """Return whether another attempt may succeed, although nothing has been changed."""
        return self.problem in OUTAGES or self.problem is DownloadProblem.INTERNAL

    @property
    def waits_for(self) -> str:
        """Return what must come back before another attempt: `the network`; may be empty."""
        return OUTAGES.get(self.problem, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRepository:
    """A repository that a search has found.

    Attributes:
        repo: OWNER/NAME.
        downloads: of the last month.
        size_bytes: of its weights; 0 if the hub does not say it.
        is_gated: its terms have to be accepted first.
        licence: as the hub names it; empty if it does not say it.
    """

    repo: str
    downloads: int
    size_bytes: int
    is_gated: bool
    licence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoriesFound:
    """The answer to a search, those with most downloads first."""

    found: list[FoundRepository]


SnapshotReport = DownloadProgress | DownloadDone | DownloadFailed
"""A report of the download of a repository."""

DownloadReport = SnapshotReport | RepositoriesFound
_REPORTS: dict[str, type[DownloadReport]] = {
    "progress": DownloadProgress,
    "done": DownloadDone,
    "failed": DownloadFailed,
    "found": RepositoriesFound,
}


def report_line(report: DownloadReport) -> str:
    """Return the line for a report, without its newline."""
    from .codec import to_map  # a command's help would wait for it

    kind = next(name for name, type_ in _REPORTS.items() if isinstance(report, type_))
    return json.dumps({_REPORT_KEY: kind, **to_map(report)})


def read_report(line: bytes) -> DownloadReport | None:
    """Return the report in a line; None if the line is something else."""
    from .codec import DecodeError, read_part

    try:
        values: Any = json.loads(line)
        return read_part(_REPORTS[values.pop(_REPORT_KEY)], values, "")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, DecodeError):
        return None


def download_argv(python: str = sys.executable) -> list[str]:
    """Return the command of a download; -P keeps the working folder out of the import path."""
    return [python, "-P", "-m", "mlxsup.downloader"]
