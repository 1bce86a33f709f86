"""What is measured of processes, and what becomes of it when nothing can be measured."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator

import psutil
import pytest

from mlxsup.supervisor.memory.watch import NoWatch
from mlxsup.supervisor.workers import measure as measure_module
from mlxsup.supervisor.workers.measure import (
    Sampler,
    is_process_stopped,
    machine_bytes,
    measure_footprints,
)

from support.eventually import eventually


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def gone_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_each_process_that_lives_is_measured_and_no_other(
    sleeper: subprocess.Popen[bytes],
) -> None:
    own, gone = os.getpid(), gone_pid()
    measured = measure_footprints([sleeper.pid, gone, own])
    assert list(measured) == [sleeper.pid, own]
    assert 0 < measured[sleeper.pid] < measured[own]
    assert measured[own] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)


def test_a_process_is_known_to_be_stopped_while_it_is_F7(
    sleeper: subprocess.Popen[bytes],
) -> None:
    assert not is_process_stopped(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    eventually(lambda: is_process_stopped(sleeper.pid))
    sleeper.send_signal(signal.SIGCONT)
    eventually(lambda: not is_process_stopped(sleeper.pid))
    assert is_process_stopped(gone_pid()) is False


class Machine:
    """A machine that can be out of files, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_out_of_files = False
        self.now = 500.0
        self.reported: list[tuple[float, int | None]] = []
        self.asked = 0
        monkeypatch.setattr(measure_module, "measure_footprints", self._measure)
        monkeypatch.setattr(measure_module, "machine_bytes", self._machine)

    def _measure(self, pids: list[int]) -> dict[int, int]:
        if self.is_out_of_files:
            raise OSError(24, "Too many open files")
        return {pid: pid * 10 for pid in pids}

    def _machine(self) -> int:
        self.asked += 1
        if self.is_out_of_files:
            raise OSError(24, "Too many open files")
        return 99

    def run(self, body: Callable[[Sampler], Awaitable[None]]) -> None:
        def report(error: OSError) -> None:
            self.reported.append((self.now, error.errno))

        async def main() -> None:
            sampler = Sampler(report, NoWatch(), clock=lambda: self.now)
            try:
                await body(sampler)
            finally:
                sampler.close()

        asyncio.run(main())


def test_without_a_free_file_the_last_values_stay_and_are_measured_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)

    async def body(sampler: Sampler) -> None:
        assert (sampler.footprint_bytes, sampler.machine_bytes) == ({}, 0)
        await sampler.measure([1, 2])
        assert (sampler.footprint_bytes, sampler.machine_bytes) == ({1: 10, 2: 20}, 99)
        machine.is_out_of_files = True
        await sampler.measure([3])
        assert (sampler.footprint_bytes, sampler.machine_bytes) == ({1: 10, 2: 20}, 99)
        machine.is_out_of_files = False
        await sampler.measure([3])
        assert sampler.footprint_bytes == {3: 30}
        assert machine.asked == 1, "a machine's memory does not change"

    machine.run(body)


def test_a_machine_that_could_not_be_measured_at_first_is_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    machine.is_out_of_files = True

    async def body(sampler: Sampler) -> None:
        await sampler.measure([1])
        assert (sampler.footprint_bytes, sampler.machine_bytes) == ({}, 0)
        machine.is_out_of_files = False
        await sampler.measure([1])
        assert (sampler.footprint_bytes, sampler.machine_bytes) == ({1: 10}, 99)

    machine.run(body)


def test_what_cannot_be_measured_is_reported_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    machine.is_out_of_files = True

    async def body(sampler: Sampler) -> None:
        for moment in (500.0, 501.0, 559.9, 560.0, 619.9, 620.0):
            machine.now = moment
            await sampler.measure([1])

    machine.run(body)
    assert machine.reported == [(500.0, 24), (560.0, 24), (620.0, 24)]


def test_measuring_happens_on_one_thread_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def measure(pids: list[int]) -> dict[int, int]:
        threads.add(threading.current_thread().name)
        return {}

    monkeypatch.setattr(measure_module, "measure_footprints", measure)

    async def main() -> None:
        sampler = Sampler(lambda error: None, NoWatch())
        for _ in range(3):
            await sampler.measure([])
        sampler.close()

    asyncio.run(main())
    assert threads == {"mlxsup-monitor_0"}
    assert machine_bytes() == psutil.virtual_memory().total


def test_its_thread_ends_with_it_and_nobody_waits_for_one_that_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go = threading.Event(), threading.Event()

    def measure(pids: list[int]) -> dict[int, int]:
        began.set()
        assert go.wait(60.0)
        return {}

    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith("mlxsup-monitor")]

    monkeypatch.setattr(measure_module, "measure_footprints", measure)

    kept: list[Sampler] = []

    async def main() -> None:
        sampler = Sampler(lambda error: None, NoWatch())
        kept.append(sampler)  # else its thread ends with it
        task = asyncio.create_task(sampler.measure([]))
        await asyncio.to_thread(began.wait, 60.0)
        sampler.close()
        assert not go.is_set()
        go.set()
        await task

    asyncio.run(main())
    eventually(lambda: threads() == [])
