"""P26: a process that SIGKILL does not end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from .bounds import at_most
from .measure import FAKE, Figure, Measure, Place, Values
from support import freezer
from support.daemon import Daemon, fake, is_alive, row, wait_for_state
from support.eventually import eventually
from support.unkillable import Unkillable

IS_REAL = freezer.is_there()
WHERE = f"{FAKE}, {'frozen in the kernel' if IS_REAL else 'a kill that does nothing'}"
"""A cgroup v1 freezer, which needs root; else a supervisor whose signals have no effect."""

LIMIT_S = 120.0
MODELS = {
    "stuck": fake(fake={"load_stall": "gil", "load_fault_generations": 1}, load_stall_timeout_s=1),
    "other": fake(preload=False),
}
LEFT_BEHIND = 71


@contextmanager
def daemon_and_hold() -> Iterator[tuple[Daemon, Callable[[int], None]]]:
    """A daemon that has not begun, and what makes a process of it unkillable."""
    if not IS_REAL:
        daemon = Unkillable(MODELS)
        with daemon:
            yield daemon, daemon.hold
        return
    cage = freezer.Freezer()
    try:
        with Daemon(MODELS) as real:
            yield real, cage.hold
    finally:
        cage.close()


def stuck_processes(place: Place) -> Values:
    """One that loads, while another model waits; then that other one, and the daemon is to end."""
    with daemon_and_hold() as (daemon, hold), daemon.client() as client:
        stuck = eventually(lambda: row(client, "stuck")["pid"], timeout_s=LIMIT_S)
        hold(stuck)
        wait_for_state(client, "stuck", "STOPPING", LIMIT_S)
        start_s = time.monotonic()
        client.load("other")
        other_s = time.monotonic() - start_s
        assert row(client, "stuck")["cause"] == f"process {stuck} cannot be ended"
        other = row(client, "other")["pid"]
        if not IS_REAL:  # nothing but its own lock keeps it from hearing that it is to exit
            next(iter(client.generate("other", prompt="[[fault stall=gil at=3]]", max_tokens=9)))
        hold(other)
        assert daemon.process is not None
        start_s = time.monotonic()
        done = daemon.run("stop", "--now", timeout_s=LIMIT_S)
        end_s = time.monotonic() - start_s
        assert done.returncode == daemon.process.wait(LIMIT_S) == LEFT_BEHIND, done
        for pid in (stuck, other):
            assert is_alive(psutil.Process(pid))
            assert str(pid) in done.stderr, done.stderr
            assert f"process {pid} " in daemon.output
    return {"other": other_s, "stop": end_s}


MEASURES = (
    Measure(
        promise="P26",
        name="stuck",
        most_repeats=3,
        where=WHERE,
        round=stuck_processes,
        figures=(
            Figure(
                key="other",
                what="SIGKILL without effect on a model that loads: until the next has loaded",
                bound=at_most(12.5),
            ),
            Figure(
                key="stop",
                what="the same on a model that serves: `stop --now`, exit 71, both are named",
                bound=at_most(18.5),
            ),
        ),
    ),
)
