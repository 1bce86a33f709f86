"""The runtime folder, its lock, and leftovers of a supervisor that was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxsup.supervisor.process_identity import process_identity
from mlxsup.supervisor.runtime_folder import AlreadyRunningError, RuntimeFolder, RuntimeFolderError
from mlxsup.supervisor.workers.leftovers import WorkerRecord

from support.daemon import is_alive
from support.eventually import eventually

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]

CLAIMER = """
import sys
from pathlib import Path
from mlxsup.supervisor.runtime_folder import AlreadyRunningError, RuntimeFolder
try:
    folder = RuntimeFolder.claim(Path(sys.argv[1]))
except AlreadyRunningError as error:
    print(error.pid, flush=True)
    sys.exit(error.exit_code)
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path that is not there yet: pytest's own are too long for sockets."""
    parent = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    yield parent / "run"
    shutil.rmtree(parent)


def sleep_until_killed() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER, process_group=0)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    yield from sleep_until_killed()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    yield from sleep_until_killed()


def test_the_folder_is_made_private_and_its_stale_sockets_go(folder: Path) -> None:
    first = RuntimeFolder.claim(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    first.release()
    for name in ("client.sock", "w3.sock", "w3.sock.beat"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(folder / name))
    (folder / "notes.txt").touch()
    second = RuntimeFolder.claim(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["lock", "notes.txt"]
    second.release()


def test_a_folder_that_others_may_enter_is_refused_with_what_to_do(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(RuntimeFolderError, match="mode 0755") as caught:
        RuntimeFolder.claim(folder)
    assert caught.value.exit_code == 73
    assert caught.value.hint == f"run: chmod 0700 {folder}"


def test_what_is_no_folder_is_refused(folder: Path) -> None:
    folder.touch()
    with pytest.raises(RuntimeFolderError, match="is not a folder"):
        RuntimeFolder.claim(folder)


def test_a_folder_below_a_file_is_refused(folder: Path) -> None:
    folder.touch()
    with pytest.raises(RuntimeFolderError, match="cannot be created"):
        RuntimeFolder.claim(folder / "run")


def test_a_folder_of_somebody_else_is_refused() -> None:
    if os.geteuid() == 0:
        other = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
        os.chown(other, 12345, -1)
    else:
        other = Path("/")
    try:
        with pytest.raises(RuntimeFolderError, match="belongs to another user"):
            RuntimeFolder.claim(other)
    finally:
        if os.geteuid() == 0:
            other.rmdir()


def test_a_path_too_long_for_sockets_is_refused_before_anything_is_made(folder: Path) -> None:
    long = folder / ("x" * 100)
    with pytest.raises(RuntimeFolderError, match="too long"):
        RuntimeFolder.claim(long)
    assert not folder.exists()


def test_of_twenty_starts_at_once_one_lives_and_the_others_name_it_P19(folder: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(20)
    ]
    said = {}
    for process in processes:
        assert process.stdout is not None
        said[process.pid] = process.stdout.readline().strip()
    (winner,) = [pid for pid, text in said.items() if text == "claimed"]
    assert {text for pid, text in said.items() if pid != winner} == {str(winner)}
    for process in processes:
        process.communicate()
    assert sorted(p.returncode for p in processes) == [0] + [75] * 19


def test_the_lock_goes_with_its_holder_however_it_dies(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        with pytest.raises(AlreadyRunningError) as caught:
            RuntimeFolder.claim(folder)
        assert caught.value.pid == holder.pid
        holder.kill()
    RuntimeFolder.claim(folder).release()


def test_an_identity_is_of_one_process_and_ends_with_it(sleeper: subprocess.Popen[bytes]) -> None:
    identity = process_identity(sleeper.pid)
    assert identity is not None
    assert identity == process_identity(sleeper.pid)
    assert identity != process_identity(os.getpid())
    sleeper.kill()
    eventually(lambda: process_identity(sleeper.pid) is None)  # a zombie is none already
    sleeper.wait()
    assert process_identity(sleeper.pid) is None


def test_leftovers_are_killed_by_pid_and_start_and_nothing_else_is_E6(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], bystander: subprocess.Popen[bytes]
) -> None:
    record = WorkerRecord(tmp_path)
    record.add("left", sleeper.pid)
    path = tmp_path / "workers.json"
    (entry,) = json.loads(path.read_text())
    reused = {"model": "reused", "pid": bystander.pid, "identity": entry["identity"]}
    gone = {"model": "gone", "pid": 2**22 - 1, "identity": "no"}
    path.write_text(json.dumps([entry, reused, gone, {"pid": 1}, 3]))
    (leftover,) = WorkerRecord(tmp_path).sweep()
    assert (leftover.model, leftover.pid, leftover.is_gone) == ("left", sleeper.pid, True)
    assert process_identity(sleeper.pid) is None
    assert process_identity(bystander.pid) is not None
    assert json.loads(path.read_text()) == []


def test_a_stopped_leftover_goes_too_E6(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    record = WorkerRecord(tmp_path)
    record.add("left", sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED)
    assert [left.is_gone for left in WorkerRecord(tmp_path).sweep()] == [True]


def test_what_a_leftover_has_started_goes_with_it_E6(tmp_path: Path) -> None:
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0)
print(child.pid, flush=True)
child.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    ) as leader:
        assert leader.stdout is not None
        child = psutil.Process(int(leader.stdout.readline()))
        WorkerRecord(tmp_path).add("left", leader.pid)
        assert [left.is_gone for left in WorkerRecord(tmp_path).sweep()] == [True]
        eventually(lambda: not is_alive(child))


def test_a_worker_whose_exit_was_seen_is_not_in_the_record(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    record = WorkerRecord(tmp_path)
    record.add("m", sleeper.pid)
    record.remove(sleeper.pid)
    record.remove(sleeper.pid)
    assert WorkerRecord(tmp_path).sweep() == []
    assert sleeper.poll() is None


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "workers.json").write_text("{ half")
    assert WorkerRecord(tmp_path).sweep() == []


def test_a_folder_in_the_place_of_a_socket_is_named(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "client.sock").mkdir()
    with pytest.raises(RuntimeFolderError, match=r"client\.sock is in the way") as caught:
        RuntimeFolder.claim(folder)
    assert "remove it" in caught.value.hint
    (folder / "client.sock").rmdir()
    RuntimeFolder.claim(folder).release()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere psutil tells")
def test_a_process_whose_first_thread_has_ended_is_still_one() -> None:
    code = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        known = process_identity(process.pid)
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert process_identity(process.pid) == known is not None
        process.kill()
        assert process.stdout is not None
        process.stdout.read()  # until all of it is gone, but for the zombie
        eventually(lambda: process_identity(process.pid) is None)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
