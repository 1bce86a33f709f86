"""The whole shell in a separate process: hangups, kills, full disks, and workers that are none."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client

from support.daemon import Daemon, fake, is_alive, row, wait_for_state
from support.eventually import eventually
from support.scripted_daemon import ScriptedDaemon

QUICK = {"restart": {"max_restarts": 1, "backoff_initial_s": 0.01, "backoff_max_s": 0.01}}


@pytest.fixture
def client_of() -> Iterator[Any]:
    clients: list[Client] = []

    def make(daemon: Daemon) -> Client:
        clients.append(daemon.client())
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_a_worker_that_speaks_nonsense_is_killed(client_of: Any) -> None:
    code = """
import json, os, sys, time, zmq
from mlxsup.protocol.codec import encode
from mlxsup.protocol.worker_messages import Hello
from mlxsup.protocol.version import VERSION
spec = json.loads(sys.stdin.readline())
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(spec["endpoint"])
known = {name: spec[name] for name in ("model", "generation", "token")}
socket.send_multipart(encode(Hello(**known, pid=os.getpid(), version=VERSION)))
socket.send(b"nonsense")
time.sleep(600)
"""
    argv = [sys.executable, "-c", code]
    with ScriptedDaemon({"a": fake(**QUICK)}).scripted(argv=argv) as daemon:
        failed = wait_for_state(client_of(daemon), "a", "FAILED")
        assert "sent no message" in failed["cause"]
        assert failed["last_exit"]["signal"] == "SIGKILL"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_order(number: signal.Signals) -> None:
    with Daemon({"a": fake()}) as daemon:
        processes = daemon.processes()
        assert daemon.process is not None
        daemon.process.send_signal(number)
        assert daemon.process.wait(60) == 0
        assert not any(map(is_alive, processes))


def test_a_hangup_that_was_ignored_at_the_start_stays_ignored(client_of: Any) -> None:
    setup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with ScriptedDaemon({"a": fake()}).scripted(setup) as daemon:
        client = client_of(daemon)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGHUP)
        wait_for_state(client, "a", "READY")
        assert client.status()["pid"] == daemon.process.pid


def test_after_a_kill_the_next_start_finds_no_worker_and_serves_E6(client_of: Any) -> None:
    with Daemon({"a": fake()}) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "a", "READY")
        supervisor, *workers = daemon.processes()
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        daemon.kill()
        assert not supervisor.is_running()
        daemon.start()
        eventually(lambda: not any(map(is_alive, workers)))
        client = client_of(daemon)
        wait_for_state(client, "a", "READY")
        assert client.complete("a", prompt="x", max_tokens=3).finish_reason == "length"


def test_a_full_log_disk_stops_nobody(client_of: Any) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs a device that is full")
    daemon = Daemon({"a": fake()})
    daemon.logs.mkdir(mode=0o700)
    for name in ("a.log", "mlxsup.log"):
        (daemon.logs / name).symlink_to("/dev/full")
    with daemon:
        try:
            client = client_of(daemon)
            wait_for_state(client, "a", "READY")
            assert client.complete("a", prompt="x", max_tokens=3).finish_reason == "length"
            assert "cannot be written, lines are lost" in daemon.output
        finally:
            for name in ("a.log", "mlxsup.log"):
                (daemon.logs / name).unlink()  # who reads it comes to no end


def test_processes_come_and_go_without_leaving_anything_P14(client_of: Any) -> None:
    with Daemon({"a": fake()}) as daemon:
        client = client_of(daemon)
        wait_for_state(client, "a", "READY")
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)

        def counts() -> tuple[int, int, int]:
            children = supervisor.children(recursive=True)
            return supervisor.num_fds(), supervisor.num_threads(), len(children)

        client.restart("a", now=True)  # the first one may open what stays
        eventually(lambda: row(client, "a")["phase"] == "idle")
        seen: list[tuple[int, int, int]] = []

        def is_settled() -> bool:
            seen.append(counts())
            return seen[-2:-1] == seen[-1:]

        eventually(is_settled)
        before = seen[-1]
        for _ in range(20):
            client.restart("a", now=True)
        eventually(lambda: counts() == before)
        sockets = [p.name for p in (daemon.folder / "run").glob("*.sock*")]
        assert len(sockets) == 2
