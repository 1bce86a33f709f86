"""What is read of the machine's memory, and of processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.supervisor.core.budget import Reading, Strain
from mlxsup.supervisor.memory import watch as watch_module
from mlxsup.supervisor.memory.watch import (
    find_watch,
    mac_level,
    read_linux,
    read_mac,
)
from mlxsup.supervisor.workers import measure as measure_module
from mlxsup.supervisor.workers.measure import (
    Sampler,
    is_process_stopped,
    measure_footprints,
)

from support.eventually import eventually

GIB = 2**30
TOTAL, AVAILABLE = 32 * GIB, 20 * GIB
STALLS = """\
some avg10={some} avg60=0.10 avg300=0.00 total=9
full avg10={full} avg60=0.02 avg300=0.00 total=4
"""
V2 = {"memory.max": "8589934592\n", "memory.current": "6442450944\n"}
STAT = "anon 5000\nfile 1073741824\ninactive_file 805306368\nactive_file 268435456\n"


def machine(folder: Path, group: str = "0::/box\n", **files: str) -> Reading:
    """Read a machine's memory in a folder; `files`: of its group, by their names."""
    for name, text in {
        "own": group,
        "stalls": STALLS.format(some="0.00", full="0.00"),
        **{f"groups/box/{name}": text for name, text in files.items()},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read(folder)


def read(folder: Path) -> Reading:
    return read_linux(folder / "groups", folder / "own", folder / "stalls")


@pytest.fixture(autouse=True, scope="module")
def memory() -> Iterator[None]:
    """Has the machine a known amount of memory, a part of which is available."""
    with pytest.MonkeyPatch.context() as patch:
        found = SimpleNamespace(total=TOTAL, available=AVAILABLE)
        patch.setattr(psutil, "virtual_memory", lambda: found)
        yield


# ---------------------------------------------------------------- Linux


@pytest.mark.parametrize(
    ("limit", "used", "kept_free"),
    [(None, 0, TOTAL // 10 // 4), (30 * GIB, 0, 3 * GIB // 4), (TOTAL, TOTAL, TOTAL // 10 // 4)],
    ids=["no limit", "more left than the machine has", "all of the machine"],
)
def test_what_the_machine_has_counts_if_its_group_has_more(
    tmp_path: Path, limit: int | None, used: int, kept_free: int
) -> None:
    group = {"memory.max": f"{limit}", "memory.current": f"{used}", "memory.stat": ""}
    found = machine(tmp_path, **({} if limit is None else group))
    assert found == Reading(available_bytes=AVAILABLE, kept_free_bytes=kept_free)


def test_a_group_that_has_less_left_than_the_machine_counts(tmp_path: Path) -> None:
    stalls = STALLS.format(some="50.00", full="20.00")
    files = {**V2, "memory.stat": STAT, "memory.pressure": stalls}
    assert machine(tmp_path, **files) == Reading(
        available_bytes=3 * GIB,
        kept_free_bytes=2 * GIB // 4,
        strain=Strain.STALLED,
        place="in this control group",
    )


@pytest.mark.parametrize(
    ("full", "strain"),
    [("full avg10=5.00", Strain.UNSAID), ("full avg10=5.01", Strain.STALLED),
     ("full total=4", Strain.UNSAID)],
)  # fmt: skip
def test_only_stalls_of_all_processes_count(tmp_path: Path, full: str, strain: Strain) -> None:
    machine(tmp_path)
    (tmp_path / "stalls").write_text(f"some avg10=99.00 avg60=0.10\n{full} avg60=99.00\n")
    assert read(tmp_path).strain is strain


def test_a_group_of_version_1_counts(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/box\n0::/\n")
    group = tmp_path / "groups" / "memory" / "box"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("8589934592\n")
    (group / "memory.usage_in_bytes").write_text("8589934592\n")
    within = "total_inactive_file 1073741824\ntotal_active_file 0\n"
    (group / "memory.stat").write_text(f"inactive_file 1\nactive_file 1\n{within}")
    found = read(tmp_path)
    assert (found.available_bytes, found.place) == (GIB, "in this control group")


def test_unreadable_files_of_the_system_leave_the_figures_of_the_machine(tmp_path: Path) -> None:
    machine(tmp_path, **V2, **{"memory.stat": STAT})
    (tmp_path / "groups" / "box" / "memory.current").write_text("a lot")
    (tmp_path / "stalls").write_text("none")
    for _ in range(2):
        found = read(tmp_path)
        assert (found.available_bytes, found.strain) == (AVAILABLE, Strain.UNSAID)
        (tmp_path / "stalls").unlink(missing_ok=True)  # kernels without it


@given(st.binary(max_size=80), st.binary(max_size=80), st.data())
def test_no_text_whatever_raises_an_error(one: bytes, other: bytes, data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine(folder, **V2, **{"memory.stat": STAT, "memory.pressure": STALLS})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        data.draw(st.sampled_from(files)).write_bytes(one)
        data.draw(st.sampled_from(files)).write_bytes(other)
        assert read(folder).available_bytes >= 0


# ---------------------------------------------------------------- others


def test_macos_says_its_level_and_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=32 * GIB, available=3 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    found = read_mac(4)
    expected = Reading(
        available_bytes=3 * GIB, kept_free_bytes=32 * GIB // 10 // 4, strain=Strain.STALLED
    )
    assert found == expected
    assert read_mac(None) is None
    levels = [reading.strain for level in (1, 2, 4, 0) if (reading := read_mac(level))]
    assert levels == [Strain.EASY, Strain.UNSAID, Strain.STALLED, Strain.UNSAID]


def test_the_level_of_macos_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def ask(name: bytes, level: object, size: object, *_: object) -> int:
        asked.append(name)
        level.contents.value = 2  # type: ignore[attr-defined]
        return 0

    libraries = [
        SimpleNamespace(sysctlbyname=ask),
        SimpleNamespace(sysctlbyname=lambda *_: -1),
        SimpleNamespace(),
    ]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libraries.pop(0))
    assert [mac_level() for _ in range(3)] == [2, None, None]
    assert asked == [b"kern.memorystatus_vm_pressure_level"]


def test_each_system_is_asked_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "mac_level", lambda: 1)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    found = find_watch("metal")()
    assert found is not None
    assert found.strain is Strain.EASY
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert find_watch("cuda")() is None


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


def test_a_failed_measurement_keeps_the_last_values_and_is_reported_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as without a free file."""
    now, is_failing, reported = 500.0, True, []

    def measure(pids: list[int]) -> dict[int, int]:
        if is_failing:
            raise OSError(24, "Too many open files")
        return {pid: pid * 10 for pid in pids}

    monkeypatch.setattr(measure_module, "measure_footprints", measure)

    async def main() -> None:
        nonlocal now, is_failing
        sampler = Sampler(
            lambda error: reported.append((now, error.errno)), lambda: None, lambda: now
        )
        for moment in (500.0, 501.0, 559.9, 560.0):
            now = moment
            await sampler.measure([1])
        assert sampler.footprint_bytes == {}
        is_failing = False
        await sampler.measure([1, 2])
        is_failing = True
        await sampler.measure([3])
        assert sampler.footprint_bytes == {1: 10, 2: 20}
        sampler.close()

    asyncio.run(main())
    assert reported == [(500.0, 24), (560.0, 24)]


def test_close_ends_the_thread_without_waiting_for_a_measurement(
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
        sampler = Sampler(lambda error: None, lambda: None)
        kept.append(sampler)  # else its thread ends with it
        task = asyncio.create_task(sampler.measure([]))
        await asyncio.to_thread(began.wait, 60.0)
        sampler.close()
        assert not go.is_set()
        go.set()
        await task

    asyncio.run(main())
    eventually(lambda: threads() == [])
