"""Measures the workers' processes and the machine; a failure to measure ends nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import psutil

from ..core.budget import Reading
from ..memory.watch import Watch

REPORT_INTERVAL_S = 60.0


class Sampler:
    """Measures outside the loop's thread, because reading a process's memory can take long.

    Attributes:
        footprint_bytes: resident bytes of each process, by pid, as last measured.
        reading: what was available after the processes were measured; None: not known.

    Args:
        report: called, at most once a minute, with why it cannot measure.
        watch: reads what is available.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        report: Callable[[OSError], None],
        watch: Watch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.footprint_bytes: Mapping[int, int] = {}
        self.reading: Reading | None = None
        self._watch = watch
        self._report = report
        self._clock = clock
        self._reported_at: float | None = None
        # One permanent thread: starting another one each time could fail.
        self._executor = ThreadPoolExecutor(1, "mlxsup-monitor")

    async def measure(self, pids: Iterable[int]) -> None:
        """Measure once; keeps the last values if that fails, such as without a free file."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            measured = await run(self._executor, self._measure, list(pids))
            self.footprint_bytes, self.reading = measured
        except OSError as error:
            now = self._clock()
            if self._reported_at is None or now - self._reported_at >= REPORT_INTERVAL_S:
                self._reported_at = now
                self._report(error)

    def _measure(self, pids: list[int]) -> tuple[dict[int, int], Reading | None]:
        """The machine comes last: what a process gives back in between then counts twice, and not
        as missing."""
        return measure_footprints(pids), self._watch()

    def close(self) -> None:
        """Let the thread end."""
        self._executor.shutdown(wait=False)


def measure_footprints(pids: Iterable[int]) -> dict[int, int]:
    """Return resident bytes of each process, by pid; a process that is gone is left out.

    Raises:
        OSError: it cannot be read, such as when too many files are open.
    """
    result = {}
    for pid in pids:
        try:
            result[pid] = int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            continue
    return result


def is_process_stopped(pid: int) -> bool:
    """Return whether a process was stopped, such as by SIGSTOP; False for one that is gone.

    Raises:
        OSError: it cannot be read, such as when too many files are open.
    """
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
