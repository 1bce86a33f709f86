"""P13: what outlives a supervisor that is killed, by the kernel's own news of each process."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import psutil

from mlxsup.client import Client

from .bounds import at_most
from .daemons import Daemon
from .measure import FAKE, Figure, Measure, Place, Values
from .watching import ExitWatch, TimedReader
from support.daemon import fake, row, wait_for_state
from support.eventually import eventually

STEP_S = 0.05
WINDOWS = {
    "load": "loads",
    "prefill": "prefills",
    "decode": "decodes",
    "idle": "is idle",
    "stopped": "is stopped",
    "wedged": "is wedged, GIL held",
}


def orphans_in(window: str) -> float:
    """From before the SIGKILL to the supervisor until the last of its processes has ended."""
    options: dict[str, Any] = {"step_s": STEP_S, "prefill_tokens_per_step": 1}
    if window == "load":
        options["load_s"] = 30.0
    daemon = Daemon({"m": fake(fake=options)})
    try:
        daemon.start()
        assert daemon.process is not None
        with daemon.client() as client:
            wait_for_state(client, "m", "LOADING" if window == "load" else "READY")
            eventually(lambda: row(client, "m")["pid"])
            readers = prepare(client, window)
            processes = daemon.processes()
            assert len(processes) == 2
            if window == "stopped":
                processes[1].suspend()
                eventually(lambda: processes[1].status() == psutil.STATUS_STOPPED)
            watches = [ExitWatch(process.pid) for process in processes]
            start_s = time.monotonic()
            daemon.process.kill()
            gone_s = max(watch.ended_at(what=window) for watch in watches) - start_s
            for reader in readers:
                reader.join(60.0)
        return gone_s
    finally:
        daemon.kill()
        daemon.__exit__(None, None, None)


def prepare(client: Client, window: str) -> list[TimedReader]:
    """Brings the worker into the state."""
    if window not in ("prefill", "decode", "wedged"):
        return []
    prompts = {"prefill": "x" * 500, "decode": "x", "wedged": "[[fault stall=gil at=2]]"}
    reader = TimedReader(client, "m", prompts[window], max_tokens=1000)
    if window == "prefill":
        eventually(lambda: row(client, "m")["steps"] > 2)
    else:
        reader.started()
    if window == "wedged":
        eventually(partial(stands_still, client), timeout_s=20.0, what="a worker that is wedged")
    return [reader]


def stands_still(client: Client) -> bool:
    """Whether no step ends in a time in which twenty should."""
    before = row(client, "m")["steps"]
    time.sleep(20 * STEP_S)  # the time itself, not a wait for anything
    return bool(row(client, "m")["steps"] == before)


def orphans(place: Place) -> Values:
    """Each state in its own daemon."""
    return {window: orphans_in(window) for window in WINDOWS}


MEASURES = (
    Measure(
        promise="P13",
        name="orphans",
        where=FAKE,
        round=orphans,
        figures=tuple(
            Figure(
                key=window,
                what=f"supervisor SIGKILL, worker {state}: from the signal to the last exit",
                digits=3,
                bound=at_most(1.0),
            )
            for window, state in WINDOWS.items()
        ),
    ),
)
