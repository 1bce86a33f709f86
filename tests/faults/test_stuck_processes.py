"""A process that cannot be ended holds up nothing but its own model (P26)."""

from __future__ import annotations

import json
import subprocess

import psutil
import pytest

from mlxsup.client import RequestError

from support.cli.unkillable import Unkillable
from support.daemon.daemon import Daemon, fake, is_alive, row, wait_for_state
from support.eventually import eventually

LIMIT_S = 120.0
LEFT_BEHIND = 71


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
