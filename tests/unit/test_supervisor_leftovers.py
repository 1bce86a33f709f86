"""The record of workers, which process a pid means, and what glibc is asked for."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.supervisor import allocator, process_identity
from mlxsup.supervisor.process_identity import process_identity as identity_of
from mlxsup.supervisor.workers import leftovers
from mlxsup.supervisor.workers.leftovers import Leftover, WorkerRecord


@pytest.fixture
def group() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], process_group=0) as process:
        yield process
        process.kill()


def test_the_record_holds_each_live_worker_and_is_replaced_whole(
    tmp_path: Path, group: subprocess.Popen[bytes]
) -> None:
    record = WorkerRecord(tmp_path)
    place = tmp_path / "workers.json"
    record.add("gone", 2**22 - 1)
    record.remove(group.pid)
    assert list(tmp_path.iterdir()) == []
    record.add("m", group.pid)
    mine = {"model": "m", "pid": group.pid, "identity": identity_of(group.pid)}
    assert json.loads(place.read_text()) == [mine]
    record.add("own", os.getpid())
    own = {"model": "own", "pid": os.getpid(), "identity": identity_of(os.getpid())}
    assert json.loads(place.read_text()) == [mine, own]
    record.remove(group.pid)
    assert json.loads(place.read_text()) == [own]
    assert list(tmp_path.iterdir()) == [place]


def test_what_could_not_be_recorded_is_recorded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = WorkerRecord(tmp_path / "run")
    assert record.write_again() is True
    assert not (tmp_path / "run").exists()
    with pytest.raises(FileNotFoundError):
        record.add("own", os.getpid())
    assert record.write_again() is False
    (tmp_path / "run").mkdir()
    assert record.write_again() is True
    (entry,) = json.loads((tmp_path / "run" / "workers.json").read_text())
    assert entry["model"] == "own"
    (tmp_path / "run" / "workers.json").unlink()
    assert record.write_again() is True
    assert (tmp_path / "run" / "workers.json").exists(), "the folder was removed and made again"


def test_a_leftover_that_does_not_go_is_named_and_looked_for_again_E6(
    tmp_path: Path, group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    WorkerRecord(tmp_path).add("m", group.pid)
    before = (tmp_path / "workers.json").read_text()
    limits: list[float] = []

    def wait_in_vain(processes: list[psutil.Process], timeout: float) -> Any:
        limits.append(timeout)
        return [], processes

    monkeypatch.setattr(psutil, "wait_procs", wait_in_vain)
    monkeypatch.setattr(leftovers, "kill_group", lambda pid: None)
    record = WorkerRecord(tmp_path)
    assert record.sweep() == [Leftover(model="m", pid=group.pid, is_gone=False)]
    assert limits == [10.0]
    assert (tmp_path / "workers.json").read_text() == before
    record.remove(group.pid)
    assert (tmp_path / "workers.json").read_text() == "[]"


def test_who_goes_before_it_is_killed_is_no_leftover_and_the_next_is_looked_at_E6(
    tmp_path: Path, group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"identity": "same", "pid": 2, "model": "a"}
    wrong: list[object] = [
        3,
        {**entry, "pid": 1},
        {**entry, "pid": 0},
        {**entry, "pid": "2"},
        {**entry, "identity": None},
        {**entry, "model": 4},
        {"pid": 2},
    ]
    gone = [{**entry, "pid": pid} for pid in (2, 3)]
    other = {**entry, "pid": 4}
    last = {**entry, "model": "z", "pid": group.pid}
    (tmp_path / "workers.json").write_text(json.dumps([*wrong, *gone, other, last]))
    asked: list[int] = []

    def identity(pid: int) -> str:
        asked.append(pid)
        return "another" if pid == 4 else "same"

    def process(pid: int) -> psutil.Process:
        if pid == 2:
            raise psutil.NoSuchProcess(pid)
        return psutil_process(pid if pid == group.pid else os.getpid())

    def kill(pid: int) -> None:
        if pid == 3:
            raise ProcessLookupError
        assert pid == group.pid
        kill_group(pid)

    psutil_process, kill_group = psutil.Process, leftovers.kill_group
    monkeypatch.setattr(leftovers, "process_identity", identity)
    monkeypatch.setattr(psutil, "Process", process)
    monkeypatch.setattr(leftovers, "kill_group", kill)
    swept = WorkerRecord(tmp_path).sweep()
    assert swept == [Leftover(model="z", pid=group.pid, is_gone=True)]
    assert asked == [2, 3, 4, group.pid]


@pytest.mark.parametrize(
    "text", ["", "{ half", "3", '{"model": "m"}', "[]", "[" * 100_000], ids=lambda text: text[:14]
)
def test_a_record_that_cannot_be_read_is_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "workers.json").write_text(text)
    assert WorkerRecord(tmp_path).sweep() == []
    assert (tmp_path / "workers.json").read_text() == "[]"


def test_a_group_is_killed_by_its_leader_and_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[str, int, int]] = []
    monkeypatch.setattr(os, "getpgid", lambda pid: 50)
    monkeypatch.setattr(os, "killpg", lambda pid, number: killed.append(("group", pid, number)))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(("one", pid, number)))
    leftovers.kill_group(50)
    leftovers.kill_group(51)
    assert killed == [("group", 50, signal.SIGKILL), ("one", 51, signal.SIGKILL)]


# ---------------------------------------------------------------- what the system says


STAT = (
    "{pid} (a) b) (c) {state} " + " ".join(str(n) for n in range(1, 17)) + " {threads} 18 {start}"
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_identity_is_the_pid_the_boot_and_the_start_in_ticks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: dict[str, str] = {}

    class Proc:
        def __init__(self, path: str) -> None:
            self._path = path

        def read_text(self) -> str:
            if self._path not in texts:
                raise FileNotFoundError(self._path)
            return texts[self._path]

        def read_bytes(self) -> bytes:
            return self.read_text().encode()

    monkeypatch.setattr(process_identity, "Path", Proc)
    texts["/proc/sys/kernel/random/boot_id"] = "boot-7\n"
    identities = {}
    for state, threads in (("S", 1), ("S", 2), ("Z", 1), ("Z", 0), ("X", 1), ("Z", 2)):
        texts["/proc/42/stat"] = STAT.format(pid=42, state=state, threads=threads, start=99)
        identities[state, threads] = identity_of(42)
    assert identities == {
        ("S", 1): "42@boot-7+99",
        ("S", 2): "42@boot-7+99",
        ("Z", 1): None,
        ("Z", 0): None,
        ("X", 1): None,
        ("Z", 2): "42@boot-7+99",
    }
    texts["/proc/42/stat"] = texts["/proc/42/stat"].rpartition(" ")[0]
    assert identity_of(42) is None
    assert identity_of(43) is None


def test_elsewhere_an_identity_is_the_pid_and_the_start(
    monkeypatch: pytest.MonkeyPatch, group: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    start = psutil.Process(group.pid).create_time()
    assert identity_of(group.pid) == f"{group.pid}@{start:.6f}"
    group.kill()
    os.waitid(os.P_PID, group.pid, os.WEXITED | os.WNOWAIT)
    assert identity_of(group.pid) is None, "a zombie is none"
    group.wait()
    assert identity_of(group.pid) is None


@pytest.mark.parametrize(("platform", "expected"), [("linux", [(-3, 256 * 1024)]), ("darwin", [])])
def test_large_blocks_are_given_back_by_glibc(
    platform: str, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, option: int, value: int) -> None:
            asked.append((option, value))

    def load(name: str | None) -> object:
        assert name is None
        return library

    library: object = Library()
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(sys, "platform", platform)
    allocator.return_large_blocks()
    assert asked == expected
    library = object()  # another C library
    allocator.return_large_blocks()
