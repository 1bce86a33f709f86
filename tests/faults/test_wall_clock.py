"""A wall clock that is set forward and back by an hour kills nobody and ends no request (P7)."""

from __future__ import annotations

import os
import signal
import sys

from support.cli.scripted_daemon import ScriptedDaemon
from support.client.streams import Reader
from support.daemon.daemon import fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

JUMPING = """
import itertools, time
_real, _hours = time.time, itertools.cycle((0, 3600, -3600))
time.time = lambda: _real() + next(_hours)
time.time_ns = lambda: int(time.time() * 1e9)
"""
WORKER = "from mlxsup.worker import __main__ as worker; worker.leave(worker.main([]))"


def test_a_wall_clock_that_jumps_by_an_hour_kills_nobody_P7() -> None:
    model = fake(
        fake={"step_s": 0.01}, step_timeout_s=5.0, load_stall_timeout_s=10.0, idle_unload_s=300.0
    )
    argv = [sys.executable, "-P", "-c", JUMPING + WORKER]
    with (
        ScriptedDaemon({"m": model, "n": model}).scripted(JUMPING, argv) as daemon,
        daemon.client() as client,
    ):
        limits = {"timeout_s": 60.0, "queue_timeout_s": 60.0, "first_token_timeout_s": 60.0}
        readers = [
            Reader(client, name, f"{name} {number}", max_tokens=300, **limits)
            for name in ("m", "n")
            for number in range(4)
        ]
        readers[-1].started()
        os.kill(row(client, "n")["pid"], signal.SIGKILL)
        for reader, prompt in zip(
            readers, [f"{name} {n}" for name in ("m", "n") for n in range(4)], strict=True
        ):
            assert reader.finished().token_ids == undisturbed(prompt, 300)
        wait_for_state(client, "n", "READY")
        assert [row(client, name)["generation"] for name in ("m", "n")] == [1, 2]
        times = [line[:20] for line in (daemon.logs / "mlxsup.log").read_text().splitlines()]
        assert times != sorted(times), "the clock did jump"
        eventually(lambda: row(client, "m")["phase"] == "idle")
