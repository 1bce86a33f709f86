"""Open files that run out, and records that cannot be written, end no daemon."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from contextlib import ExitStack

import psutil
import pytest

from support.bad.input import header
from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

LIMIT_S = 60.0


@pytest.mark.skipif(sys.platform != "linux", reason="sets the limit of another process")
def test_open_files_that_run_out_end_no_daemon_and_no_stream_P18() -> None:
    daemon = Daemon({"m": fake(fake={"step_s": 0.01})})
    with daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        measured = eventually(lambda: row(client, "m")["footprint_bytes"])
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)
        limits = supervisor.rlimit(resource.RLIMIT_NOFILE)
        stream = client.generate("m", prompt="x", max_tokens=300)
        next(iter(stream))
        supervisor.rlimit(resource.RLIMIT_NOFILE, (8, limits[1]))
        try:
            log = daemon.logs / "mlxsup.log"
            eventually(lambda: "memory not measured" in log.read_text(), timeout_s=LIMIT_S)
            assert 1 + sum(len(delta.token_ids) for delta in stream) == 300
            assert row(client, "m")["footprint_bytes"] >= measured / 2, "the last value is kept"
        finally:
            supervisor.rlimit(resource.RLIMIT_NOFILE, limits)
        assert client.complete("m", prompt="x", max_tokens=3).finish_reason == "length"
        assert "too many open files" in log.read_text().lower()
        assert log.read_text().count("memory not measured") == 1, "once a minute"


@pytest.mark.skipif(sys.platform != "linux", reason="sets the limit of another process")
def test_clients_that_come_when_no_file_is_left_wait_and_end_nothing_P18() -> None:
    """libzmq's listener would end the daemon (ipc_listener.cpp, "Too many open files")."""
    daemon = Daemon({"m": fake(fake={"step_s": 0.01})})
    with daemon, daemon.client() as client, ExitStack() as crowd:
        wait_for_state(client, "m", "READY")
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)
        limits = supervisor.rlimit(resource.RLIMIT_NOFILE)
        running = Reader(client, "m", "runs", max_tokens=1000).started()
        supervisor.rlimit(resource.RLIMIT_NOFILE, (supervisor.num_fds(), limits[1]))
        path = daemon.endpoint.removeprefix("ipc://")
        for _ in range(50):
            one = crowd.enter_context(socket.socket(socket.AF_UNIX))
            one.connect(path)
        with RawClient(daemon.endpoint) as early:
            early.say([header("ping", id="p")])
            refused = daemon.run("status")
            assert refused.returncode == 69
            log = daemon.logs / "mlxsup.log"
            eventually(lambda: "clients wait to be let in" in log.read_text())
            assert running.finished().token_ids == undisturbed("runs", 1000)
            supervisor.rlimit(resource.RLIMIT_NOFILE, limits)
            assert early.hear(LIMIT_S)["id"] == "p", "it has waited"
        assert daemon.run("status").returncode == 0
        assert log.read_text().count("clients wait to be let in") == 1, "once a minute"
        assert row(client, "m")["generation"] == 1


def test_a_record_that_could_not_be_written_is_written_when_it_can_be_E6() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        first = wait_for_state(client, "m", "READY")["pid"]
        obstacle = daemon.folder / "run" / "workers.new"
        obstacle.mkdir()
        os.kill(first, 9)
        eventually(lambda: row(client, "m")["generation"] == 2)
        pid = wait_for_state(client, "m", "READY")["pid"]
        log = daemon.logs / "mlxsup.log"
        eventually(lambda: "workers not recorded" in log.read_text())

        def recorded() -> list[int]:
            text = (daemon.folder / "run" / "workers.json").read_text()
            return [entry["pid"] for entry in json.loads(text)]

        assert recorded() == [first]
        obstacle.rmdir()
        eventually(lambda: recorded() == [pid], timeout_s=LIMIT_S)
        assert row(client, "m")["generation"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_reload_closes_the_logs_of_models_that_it_removes_P20() -> None:
    many = {f"m{number}": fake() for number in range(6)}
    with Daemon({"kept": fake(), **many}) as daemon, daemon.client() as client:
        for name in ("kept", *many):
            wait_for_state(client, name, "READY")
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)

        def open_logs() -> set[str]:
            return {os.path.basename(file.path) for file in supervisor.open_files()}

        assert {"kept.log", *(f"{name}.log" for name in many)} <= open_logs()
        daemon.write_config({"kept": fake()})
        assert daemon.run("reload").returncode == 0
        eventually(lambda: len(client.status()["models"]) == 1)
        eventually(lambda: open_logs() & {f"{name}.log" for name in many} == set())
        assert "kept.log" in open_logs()
