"""The whole shell in a separate process: starts, ends, bugs, and workers that are none."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client, RequestError

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


def test_it_serves_and_ends_with_nothing_left(client_of: Any) -> None:
    with Daemon({"a": fake(), "b": fake()}) as daemon:
        client = client_of(daemon)
        for model in ("a", "b"):
            wait_for_state(client, model, "READY")
            assert len(client.complete(model, prompt="hello", max_tokens=7).token_ids) == 7
        status = client.status()
        assert daemon.process is not None
        assert status["pid"] == daemon.process.pid
        assert status["endpoint"] == daemon.endpoint
        assert status["config_path"] == str(daemon.config)
        assert status["memory"]["machine_bytes"] == psutil.virtual_memory().total
        eventually(lambda: row(client, "a")["footprint_bytes"] > 0)
        processes = daemon.processes()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        assert not any(map(is_alive, processes))
        left = sorted(p.name for p in (daemon.folder / "run").iterdir())
        assert left == ["key_file", "lock", "log_dir", "workers.json"]


def test_the_supervisor_never_imports_mlx_A3() -> None:
    setup = """
import atexit
atexit.register(lambda: print("imports", sorted(
    {name.split(".")[0] for name in sys.modules} & {"mlx", "mlx_lm", "transformers", "rich"}
)))
"""
    with ScriptedDaemon({"a": fake()}).scripted(setup) as daemon:
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait(60)
        assert "imports []" in daemon.output


def test_a_second_start_names_the_first_and_harms_nothing_P19(client_of: Any) -> None:
    with Daemon({"a": fake()}) as daemon:
        client = client_of(daemon)
        wait_for_state(client, "a", "READY")
        second = subprocess.run(
            daemon.command("start", "--config", str(daemon.config)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert daemon.process is not None
        assert second.returncode == 75
        assert str(daemon.process.pid) in second.stderr
        assert client.complete("a", prompt="x", max_tokens=2).finish_reason == "length"


def test_a_worker_that_cannot_be_started_is_a_spawn_error(client_of: Any) -> None:
    daemon = ScriptedDaemon({"a": fake(**QUICK)}).scripted(argv=["/nonexistent/python"])
    with daemon:
        client = client_of(daemon)
        failed = wait_for_state(client, "a", "FAILED")
        assert failed["last_exit"]["reason"] == "spawn_error"
        assert "No such file" in failed["cause"]
        with pytest.raises(RequestError, match="No such file"):
            client.complete("a", prompt="x", max_tokens=1)


def test_a_worker_that_says_nothing_and_dies_leaves_its_last_line(client_of: Any) -> None:
    argv = [sys.executable, "-c", "print('half of it'); import sys; sys.exit('cannot go on')"]
    with ScriptedDaemon({"a": fake(**QUICK)}).scripted(argv=argv) as daemon:
        failed = wait_for_state(client_of(daemon), "a", "FAILED")
        assert "exit code 1: cannot go on" in failed["cause"]
        log = (daemon.logs / "a.log").read_text()
        assert log.count("--- generation") == failed["generation"] == 2
        assert log.count("half of it") == 2


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


def test_a_bug_in_the_core_ends_the_daemon_in_order_and_leaves_no_process() -> None:
    setup = """
from mlxsup.supervisor.core.core import Core
from mlxsup.protocol.client_messages import Ping
handle = Core.handle
def broken(self, event):
    if isinstance(getattr(event, "message", None), Ping):
        raise KeyError("a bug")
    return handle(self, event)
Core.handle = broken
"""
    with ScriptedDaemon({"a": fake(), "b": fake()}).scripted(setup) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "b", "READY")
        processes = daemon.processes()
        assert len(processes) == 3
        _say_ping(daemon.endpoint)
        assert daemon.process is not None
        assert daemon.process.wait(60) == 70
        assert not any(map(is_alive, processes))
        own = daemon.logs / "mlxsup.log"
        log = own.read_text()
        assert log.count("Traceback") == 1
        assert "KeyError: 'a bug'" in log
        assert "story of a:" in log
        # The log gate excuses no traceback of the supervisor; this one has just been judged.
        own.unlink()


def _say_ping(endpoint: str) -> None:
    code = f"""
import msgpack, zmq
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.connect({endpoint!r})
socket.send(msgpack.packb({{"type": "ping", "id": "p"}}))
socket.close(linger=5000)
context.term()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_reader_of_the_changes_that_is_gone_ends_nothing(client_of: Any) -> None:
    setup = """
def changed(change):
    raise BrokenPipeError(32, "Broken pipe")
"""
    with ScriptedDaemon({"a": fake()}).scripted(setup, on_change="changed") as daemon:
        client = client_of(daemon)
        wait_for_state(client, "a", "READY")
        assert "status output disabled" in (daemon.logs / "mlxsup.log").read_text()


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


def test_a_log_folder_that_cannot_be_made_exits_73() -> None:
    daemon = Daemon({"a": fake()}, {"log_dir": "/dev/null/logs"})
    done = subprocess.run(
        daemon.command("start", "--config", str(daemon.config)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 73
    assert "the log folder /dev/null/logs cannot be created" in done.stderr
    daemon.write_config({"a": fake()})
    with daemon:  # it gave the runtime folder back
        assert (daemon.logs / "mlxsup.log").exists()


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
