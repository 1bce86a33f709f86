"""The downloads of what wanted models lack, each repository once for all that wait for it.

Downloads follow from who waits after each change of a state, and no command starts or ends one, so
that no path can forget to. A network that is away is no crash: the model waits in BACKOFF for as
long as it takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlxsup.protocol.download import DownloadProgress, Repository

from .actions import EndDownload, Outbox, StartDownload
from .events import DownloadSaid, Report
from .life import Pending
from .model import Model


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

    def settle(self, models: Iterable[Model]) -> list[tuple[Model, Report]]:
        """Start what models wait for, and end what none does; whenever any state changed. Return
        what that means for the lives of models."""
        triggers: list[tuple[Model, Report]] = []
        waiting: list[tuple[Model, Pending, Repository]] = []
        for model in models:
            phase, repository = model.life.phase, model.life.settings.download
            if isinstance(phase, Pending) and repository is not None:
                waiting.append((model, phase, repository))
        wanted = {repository: None for _, _, repository in waiting}
        for repository in [one for one in self._running if one not in wanted]:
            self._outbox.add(EndDownload(number=self._running.pop(repository).number))
        for repository in wanted:
            if repository not in self._running:
                self._start(repository)
        for model, phase, repository in waiting:
            progress = self._running[repository].progress
            if phase.fetching != progress:
                triggers.append((model, progress))
        return triggers

    def said(self, event: DownloadSaid, models: Iterable[Model]) -> list[tuple[Model, Report]]:
        """Return what the report of a download means for the lives of models; one that was ended
        meanwhile is not listened to."""
        found = [one for one, run in self._running.items() if run.number == event.number]
        if not found:
            return []
        (repository,) = found
        if not isinstance(event.report, DownloadProgress):
            del self._running[repository]
        elif _news(event.report) == _news(self._running[repository].progress):
            return []
        else:
            self._running[repository].progress = event.report
        return [
            (model, event.report)
            for model in models
            if isinstance(model.life.phase, Pending) and model.life.settings.download == repository
        ]

    def check_invariants(self, models: Iterable[Model]) -> None:
        """Raise AssertionError unless exactly what a model waits for is being downloaded."""
        wanted = set()
        for model in models:
            phase, repository = model.life.phase, model.life.settings.download
            if isinstance(phase, Pending) and repository is not None:
                wanted.add(repository)
            elif isinstance(phase, Pending):
                assert phase.fetching is None, f"{model.name} waits for files that are not fetched"
        assert set(self._running) == wanted, f"{set(self._running)} run, {wanted} are wanted"

    def _start(self, repository: Repository) -> None:
        self._started += 1
        self._running[repository] = _Running(number=self._started)
        self._outbox.add(StartDownload(number=self._started, repository=repository))


def _news(progress: DownloadProgress) -> tuple[int, int, bool]:
    """Return what is worth a report: a whole percent, or another state."""
    return int(progress.fraction * 100), progress.total_bytes, progress.is_waiting
