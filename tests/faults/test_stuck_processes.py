"""A process that cannot be ended holds up nothing but its own model (P26)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from mlxsup.client import RequestError

from support.cli.scripted_daemon import ScriptedDaemon
from support.daemon.daemon import Daemon, fake, is_alive, row, wait_for_state
from support.eventually import eventually

LIMIT_S = 120.0
LEFT_BEHIND = 71


SPAWNER = """
import os
signal_group = os.killpg
def powerless(pid, number):
    listed = Path({listed!r})
    if not (listed.exists() and str(pid) in listed.read_text().split()):
        signal_group(pid, number)
os.killpg = powerless
"""

ORPHAN = """
import sys
from mlxsup.worker import __main__ as worker
worker.die_with_parent = lambda: None
worker.watch_pipe = lambda descriptor: None
worker.leave(worker.main([]))
"""
"""A worker that outlives its supervisor, as one that cannot be ended does."""


class Unkillable(ScriptedDaemon):
    """A daemon on whose signals the processes of a list do not end.

    `hold` puts one there and `let_go` ends it. It should be stuck by a fault of the fake engine, so
    that it hears no message either.
    """

    def __init__(
        self, models: dict[str, dict[str, Any]], supervisor: dict[str, Any] | None = None
    ) -> None:
        super().__init__(models, supervisor)
        self._listed = Path(self.folder) / "unkillable"
        self._held: list[int] = []
        self.scripted(
            SPAWNER.format(listed=os.fspath(self._listed)), argv=[sys.executable, "-c", ORPHAN]
        )

    def hold(self, pid: int) -> None:
        """From here on this process cannot be ended by its supervisor."""
        self._held.append(pid)
        self._listed.write_text(" ".join(map(str, self._held)))

    def let_go(self, pid: int) -> None:
        """It ends."""
        self._held.remove(pid)
        os.kill(pid, signal.SIGKILL)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in list(self._held):
            self.let_go(pid)
        super().__exit__(kind, error, trace)


@pytest.mark.timeout(600)
def test_a_load_that_cannot_be_ended_lets_the_others_load_P26() -> None:
    stuck = fake(fake={"load_stall": "gil", "load_fault_generations": 1}, load_stall_timeout_s=5)
    daemon = Unkillable({"stuck": stuck, "other": fake(preload=False)})
    with daemon, daemon.client() as client:
        pid = eventually(lambda: row(client, "stuck")["pid"], timeout_s=LIMIT_S)
        daemon.hold(pid)
        wait_for_state(client, "stuck", "STOPPING", LIMIT_S)
        assert client.complete("other", prompt="x", max_tokens=3).finish_reason == "length"
        failed = wait_for_state(client, "stuck", "FAILED", LIMIT_S)
        assert failed["cause"] == f"process {pid} cannot be ended"
        for command in (client.load, client.restart):
            with pytest.raises(RequestError, match=str(pid)) as refused:
                command("stuck")
            assert refused.value.code == "load_failed"
        assert row(client, "stuck")["generation"] == 1
        eventually(lambda: row(client, "stuck")["footprint_bytes"] > 0)
        daemon.let_go(pid)
        wait_for_state(client, "stuck", "READY", LIMIT_S)
        assert client.complete("stuck", prompt="x", max_tokens=3).finish_reason == "length"
        assert f"SIGKILL has no effect on process {pid} of stuck" in daemon.output


@pytest.mark.timeout(600)
def test_stop_ends_within_its_limit_and_names_it_and_so_does_the_next_start_P26() -> None:
    models = {"stuck": fake(), "other": fake()}
    with Unkillable(models, {"drain_timeout_s": 1.0}) as daemon:
        with daemon.client() as client:
            pid = wait_for_state(client, "stuck", "READY", LIMIT_S)["pid"]
            wait_for_state(client, "other", "READY", LIMIT_S)
            stream = client.generate("stuck", prompt="[[fault stall=gil at=3]]", max_tokens=9)
            next(iter(stream))
            daemon.hold(pid)
            stuck = psutil.Process(pid)
            done = subprocess.run(
                Daemon.command("stop", "--endpoint", daemon.endpoint),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            with pytest.raises(RequestError) as ended:
                list(stream)
            assert ended.value.code == "shutting_down"
        assert (done.returncode, done.stdout) == (LEFT_BEHIND, "")
        assert f"SIGKILL has no effect on stuck (pid {pid})" in done.stderr
        assert daemon.process is not None
        assert daemon.process.wait(LIMIT_S) == LEFT_BEHIND
        assert f"SIGKILL has no effect on process {pid} of stuck" in daemon.output
        assert is_alive(stuck)
        record = json.loads((daemon.folder / "run" / "workers.json").read_text())
        assert [entry["pid"] for entry in record] == [pid]
        daemon.let_go(pid)
