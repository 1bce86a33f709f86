"""Files, logs and disks that run out or do not answer end no daemon and no stream (P1, P8, P18).

Real: daemons with fake engines, limits of open files, and a small disk where root may mount one.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from support.bad.input import header
from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

LIMIT_S = 60.0
SLOW = {"step_s": 0.01}


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
        obstacle = daemon.folder / "run" / "workers.json.new"
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


# ---------------------------------------------------------------- logs


def test_a_log_folder_that_hangs_disconnects_nobody_P1_P8() -> None:
    daemon = Daemon({"m": fake(fake={"step_s": 0.02})})
    daemon.logs.mkdir(mode=0o700)
    pipes = [daemon.logs / name for name in ("m.log", "mlxsup.log")]
    for pipe in pipes:
        os.mkfifo(pipe)  # opened for writing, it waits for a reader that never comes
    with daemon:
        try:
            with daemon.client() as client:
                pid = wait_for_state(client, "m", "READY")["pid"]
                stream = client.generate("m", prompt="x", max_tokens=100)
                got = len(next(stream).token_ids)  # what it was accepted with has come, too
                os.kill(pid, 9)
                assert got + sum(len(delta.token_ids) for delta in stream) == 100
                assert stream.result is not None
                assert stream.result.resumed == 1
            assert daemon.process is not None
            daemon.process.terminate()
            assert daemon.process.wait(60) == 0
            assert ", so log lines are lost" in daemon.output
        finally:
            for pipe in pipes:
                pipe.unlink()  # who reads it comes to no end


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def disk() -> Iterator[Daemon]:
    """A daemon whose runtime and log folders lie on a disk of 64 KiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a disk; /dev/full: tests/integration")
    daemon = Daemon({"m": fake()})
    place = daemon.folder / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        shutil.rmtree(daemon.folder)
        pytest.skip("mounting is not allowed here")
    try:
        yield daemon
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(daemon.folder, ignore_errors=True)


def fill(place: Path) -> Path:
    """Leave not one byte; return what to remove."""
    ballast = place / "ballast"
    with ballast.open("ab", buffering=0) as file, suppress(OSError):  # no space is left
        while True:
            file.write(b"x" * 512)
    assert shutil.disk_usage(place).free == 0
    return ballast


def test_a_full_disk_refuses_a_start_and_stops_no_daemon_P1_P8(disk: Daemon) -> None:
    place = disk.folder / "disk"
    models = {"m": fake(fake=SLOW)}
    disk.logs = place / "logs"
    disk.write_config(models, {"runtime_dir": f"{place}/run"})
    ballast = fill(place)
    refused = subprocess.run(
        disk.command("start", "--config", str(disk.config)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 73
    assert refused.stderr.splitlines()[0].endswith("No space left on device")
    ballast.unlink()
    # Sockets take no room: the daemon's own stay where the client looks for them.
    disk.write_config(models)
    with disk, disk.client() as client:
        wait_for_state(client, "m", "READY")
        running = Reader(client, "m", "runs", max_tokens=300).started()
        ballast = fill(place)
        os.kill(row(client, "m")["pid"], 9)
        assert running.finished().token_ids == undisturbed("runs", 300)
        client.restart("m", now=True)
        assert row(client, "m")["generation"] == 3
        ballast.unlink()
        client.restart("m", now=True)
        eventually(lambda: "generation 4 pid" in (place / "logs" / "m.log").read_text())
