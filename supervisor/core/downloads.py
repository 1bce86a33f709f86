"""The downloads of what wanted models lack, each repository once for all that wait for it.

Downloads follow from who waits after each change of a state, and no command starts or ends one, so
that no path can forget to. A network that is away is no crash: the model waits in BACKOFF for as
long as it takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlxsup.protocol.download import DownloadProgress, Repository, SnapshotReport
from mlxsup.protocol.ids import ModelName

from .actions import EndDownload, Outbox, StartDownload
from .life import Life, Pending


@dataclass(slots=True, kw_only=True)
class _Running:
    """A download that was started and has not ended.

    Attributes:
        number: counts downloads; what is reported of an earlier one is dropped.
        progress: how far it has come, as the models that wait were told.
    """

    number: int
    progress: DownloadProgress = field(default_factory=DownloadProgress)


class Downloads:
    """The downloads that run, each for the models that are PENDING because of it.

    Nothing else starts or ends one: it follows from the models that wait. A model that is unloaded,
    removed or given another entry no longer waits, and the download of which no model waits is
    ended. What has arrived is kept on the disk.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        # Bounded by the configuration: one entry at most for each model.
        self._running: dict[Repository, _Running] = {}
        self._started = 0

    def settle(self, lives: Iterable[Life]) -> list[tuple[ModelName, DownloadProgress]]:
        """Start what models wait for, and end what none does; whenever any state changed. Return
        the progress that models have not been told yet."""
        waiting = _waiting(lives)
        wanted = {repository: None for _, _, repository in waiting}
        for repository in [one for one in self._running if one not in wanted]:
            self._outbox.add(EndDownload(number=self._running.pop(repository).number))
        for repository in wanted:
            if repository not in self._running:
                self._start(repository)
        progress = {repository: one.progress for repository, one in self._running.items()}
        return [
            (name, progress[repository])
            for name, phase, repository in waiting
            if phase.fetching != progress[repository]
        ]

    def said(self, number: int, report: SnapshotReport, lives: Iterable[Life]) -> list[ModelName]:
        """Take the report of a download, and return the models that it is news for; one that was
        ended meanwhile is not listened to."""
        found = [one for one, run in self._running.items() if run.number == number]
        if not found:
            return []
        (repository,) = found
        if not isinstance(report, DownloadProgress):
            del self._running[repository]
        elif _news(report) == _news(self._running[repository].progress):
            return []
        else:
            self._running[repository].progress = report
        return [name for name, _, awaited in _waiting(lives) if awaited == repository]

    def check_invariants(self, lives: Iterable[Life]) -> None:
        """Raise AssertionError unless exactly what a model waits for is being downloaded."""
        there = list(lives)
        wanted = {repository for _, _, repository in _waiting(there)}
        assert set(self._running) == wanted, f"{set(self._running)} run, {wanted} are wanted"
        for life in there:
            if isinstance(life.phase, Pending) and life.settings.download is None:
                assert life.phase.fetching is None, f"{life.name} waits for files that do not come"

    def _start(self, repository: Repository) -> None:
        self._started += 1
        self._running[repository] = _Running(number=self._started)
        self._outbox.add(StartDownload(number=self._started, repository=repository))


def _waiting(lives: Iterable[Life]) -> list[tuple[ModelName, Pending, Repository]]:
    """Return the models that wait for a load and lack files, and where those come from."""
    return [
        (life.name, life.phase, life.settings.download)
        for life in lives
        if isinstance(life.phase, Pending) and life.settings.download is not None
    ]


def _news(progress: DownloadProgress) -> tuple[int, int, bool]:
    """Return what is worth a report: a whole percent, or another state."""
    return int(progress.fraction * 100), progress.total_bytes, progress.is_waiting
