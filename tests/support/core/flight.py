"""The flight recorder in tests: what a driven core records, as files and as `why` reads them."""

from __future__ import annotations

from pathlib import Path

from mlxsup.cli.why.recording import Recording, read_recording
from mlxsup.protocol.flight import (
    MODELS_FILE_NAME,
    OF_REQUESTS,
    REQUESTS_FILE_NAME,
    DaemonEnded,
    DaemonStarted,
    Entry,
    Recorded,
    WorkerDied,
)
from mlxsup.supervisor.core.actions import Action

from support.core.driver import Driver

BEGAN = 1_700_000_000.0
"""When played daemons start, in seconds since the epoch."""


class Recorder:
    """Takes what a driven core records.

    Attributes:
        recorded: all of it; the core's monotonic clock begins at `BEGAN`.
    """

    def __init__(self, driver: Driver) -> None:
        self.recorded: list[Recorded] = []
        self._driver = driver
        self._began = driver.now
        driver.obey = self._take

    def _take(self, actions: list[Action]) -> None:
        at = BEGAN + self._driver.now - self._began
        for action in actions:
            if isinstance(action, Entry):
                number = len(self.recorded) + 1
                self.recorded.append(Recorded(number=number, at=at, entry=action))

    @property
    def entries(self) -> list[Entry]:
        """Without their numbers and times."""
        return [one.entry for one in self.recorded]

    @property
    def deaths(self) -> list[WorkerDied]:
        """Those among them."""
        return [entry for entry in self.entries if isinstance(entry, WorkerDied)]

    def write(self, folder: Path, *, pid: int = 7, code: int | None = None) -> None:
        """Writes the files as a daemon does; without a code, it was killed."""
        start = Recorded(number=0, at=BEGAN, entry=DaemonStarted(pid=pid, version="1")).to_line()
        models = requests = start
        for one in self.recorded:
            if isinstance(one.entry, OF_REQUESTS):
                requests += one.to_line()
            else:
                models += one.to_line()
        if code is not None:
            at = BEGAN + self._driver.now - self._began
            models += Recorded(number=10**6, at=at, entry=DaemonEnded(code=code)).to_line()
        (folder / MODELS_FILE_NAME).write_bytes(models)
        (folder / REQUESTS_FILE_NAME).write_bytes(requests)

    def read(self, folder: Path, *, code: int | None = None) -> Recording:
        """What `mlxsup why` has of it when the daemon is gone."""
        self.write(folder, code=code)
        return read_recording(folder, None, BEGAN + 10_000.0)
