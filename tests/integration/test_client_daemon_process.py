"""The daemon's process as a client sees it, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mlxsup.client.connection import daemon_pid, is_daemon_busy
from mlxsup.protocol.folders import LOCK_NAME

from support.eventually import eventually

WAITS = "import sys; print('ready', flush=True); sys.stdin.read()"
BURNS = "print('ready', flush=True)\nwhile True: pass"

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program that holds the lock of `tmp_path`."""
    started: list[subprocess.Popen[bytes]] = []

    def run(program: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (tmp_path / LOCK_NAME).write_text(f"{process.pid} 12345\n")
        return process

    yield run
    for process in started:
        process.kill()
        with process:
            pass


def test_a_process_that_computes_is_busy_until_it_is_stopped_or_gone(
    start: Start, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/client.sock"
    process = start(BURNS)
    assert daemon_pid(endpoint) == process.pid
    assert is_daemon_busy(endpoint)
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    assert not is_daemon_busy(endpoint)
    process.kill()
    process.wait()
    assert not is_daemon_busy(endpoint)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS calls a sleeping process running")
def test_a_process_that_waits_is_idle(start: Start, tmp_path: Path) -> None:
    start(WAITS)
    eventually(lambda: not is_daemon_busy(f"ipc://{tmp_path}/client.sock"))


@pytest.mark.parametrize(
    ("status", "is_busy"),
    [
        (psutil.STATUS_DISK_SLEEP, True),
        (psutil.STATUS_SLEEPING, False),
        (psutil.STATUS_ZOMBIE, False),
    ],
)
def test_a_process_that_waits_for_a_disk_is_busy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, is_busy: bool
) -> None:
    (tmp_path / LOCK_NAME).write_text(f"{os.getpid()}\n")
    monkeypatch.setattr(psutil.Process, "status", lambda process: status)
    assert is_daemon_busy(f"ipc://{tmp_path}/client.sock") is is_busy


@pytest.mark.parametrize("text", [None, "", "many words", "-1", "99999999999999999999"])
def test_a_lock_that_names_no_process_means_idle(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / LOCK_NAME).write_text(text)
    assert not is_daemon_busy(f"ipc://{tmp_path}/client.sock")
    assert not is_daemon_busy("tcp://127.0.0.1:5555")
