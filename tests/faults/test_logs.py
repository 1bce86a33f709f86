"""Log files that hang, fail, or are flooded stop nobody."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from mlxsup.client import Client, RequestError

from support.cli.scripted_daemon import ScriptedDaemon
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

FLOOD_BYTES_PER_S = 100_000_000


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
            assert "accepts no data; lines are lost" in daemon.output
        finally:
            for pipe in pipes:
                pipe.unlink()  # who reads it comes to no end


def test_a_runtime_folder_that_turns_read_only_ends_no_daemon_P8() -> None:
    setup = """
import errno
unlink = Path.unlink
def read_only(self, missing_ok=False):
    if self.name.startswith("w"):
        raise OSError(errno.EROFS, "Read-only file system")
    unlink(self, missing_ok)
Path.unlink = read_only
"""
    with ScriptedDaemon({"m": fake()}).scripted(setup) as daemon, daemon.client() as client:
        first = wait_for_state(client, "m", "READY")
        os.kill(first["pid"], 9)
        eventually(lambda: row(client, "m")["generation"] == 2)
        wait_for_state(client, "m", "READY")
        assert client.complete("m", prompt="x", max_tokens=3).finish_reason == "length"
        assert "socket not removed" in (daemon.logs / "mlxsup.log").read_text()


def test_the_log_of_a_death_is_on_disk_when_it_is_known() -> None:
    quick = {"restart": {"max_restarts": 0}}
    with Daemon({"m": fake(**quick)}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        raised = "FakeStepError: the step raised this on demand"
        daemon.provoke("Traceback", model="m", pattern=raised, at_most=1)
        with pytest.raises(RequestError):
            client.complete("m", prompt="[[fault raise at=3]]", max_tokens=5)
        wait_for_state(client, "m", "FAILED")
        assert "the step raised this on demand" in (daemon.logs / "m.log").read_text()


def test_a_worker_that_prints_without_end_costs_bounded_time_and_space_P4() -> None:
    models = {"loud": fake(fake={"prints_bytes_per_s": FLOOD_BYTES_PER_S}),
              "calm": fake(fake={"step_s": 0.01})}  # fmt: skip
    with Daemon(models) as daemon, daemon.client() as client:
        for name in models:
            wait_for_state(client, name, "READY")
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)
        before = supervisor.cpu_times()
        began_at = time.monotonic()
        assert len(client.complete("calm", prompt="x", max_tokens=300).token_ids) == 300
        took_s = time.monotonic() - began_at
        after = supervisor.cpu_times()
        used_s = after.user + after.system - before.user - before.system
        assert used_s < 0.5 * took_s
        folder = sum(map(size_of, daemon.logs.glob("loud.log*")))
        assert folder < 4 * 11 * 2**20
        eventually(lambda: any(map(tells_of_losses, daemon.logs.glob("loud.log*"))))
        kill(client, "loud")
        wait_for_state(client, "loud", "READY")


def size_of(log: Path) -> int:
    try:
        return log.stat().st_size
    except FileNotFoundError:  # it has just been given another name, and counts under that
        return 0


def tells_of_losses(log: Path) -> bool:
    try:
        return b" bytes lost here\n" in log.read_bytes()
    except FileNotFoundError:  # it has just been given another name
        return False


def kill(client: Client, model: str) -> None:
    """SIGKILL to its worker; returns when that is known."""
    generation = row(client, model)["generation"]
    os.kill(row(client, model)["pid"], 9)
    eventually(lambda: row(client, model)["generation"] > generation)
