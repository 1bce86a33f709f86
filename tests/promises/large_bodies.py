"""P29: streams over HTTP while hostile bodies arrive."""

from __future__ import annotations

import time
from itertools import pairwise

import psutil

from .bounds import at_most_beside
from .http_door import Daemon
from .measure import FAKE, Figure, Measure, Place, Values
from support.daemon import fake
from support.http_daemon import SseReader, chat, gateway_of
from support.large_bodies import hostile_bodies, send_all

STEP_S = 0.005
WIDE = {"context_length": 3_900_000, "prefill_tokens_per_step": 1_000_000}
TOKENS = 2_000_000
"""More than a round waits for."""


def hostile(place: Place) -> Values:
    """One stream while the bodies come, and for as long without them."""
    bodies = hostile_bodies()
    models = {"m": fake(fake={"step_s": STEP_S, **WIDE}), "other": fake(fake=WIDE)}
    with Daemon(models) as daemon, daemon.client() as client:
        gateway = psutil.Process(gateway_of(client)["pid"])
        reader = SseReader(daemon, chat("beside them", max_tokens=TOKENS)).started()
        times, cpus = [time.monotonic()], [_cpu_s(gateway)]
        answers = send_all(daemon, bodies)
        times.append(time.monotonic())
        cpus.append(_cpu_s(gateway))
        took_s = times[1] - times[0]
        time.sleep(took_s)  # the measurement, not a wait for anything
        times.append(time.monotonic())
        cpus.append(_cpu_s(gateway))
        assert reader.is_alive(), "the stream has ended"
    assert {status for status, _ in answers} <= {200, 400, 413}, (
        "a body was neither read nor refused"
    )
    own_s = (cpus[1] - cpus[0]) - (cpus[2] - cpus[1])
    return {
        "gap": _largest_gap_ms(reader, times[0], times[1]),
        "without": _largest_gap_ms(reader, times[1], times[2]),
        "cpu": 1000 * max(0.0, own_s) / len(bodies),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _largest_gap_ms(reader: SseReader, begin: float, end: float) -> float:
    """The longest wait for a piece that has begun or ended in this time."""
    gaps = [(one, other) for one, other in pairwise(reader.times) if other > begin and one < end]
    return 1000 * max(other - one for one, other in gaps)


MEASURES = (
    Measure(
        promise="P29",
        name="bodies",
        where=FAKE,
        round=hostile,
        figures=(
            Figure(
                key="gap",
                what="largest gap of a stream over HTTP, of steps of 5 ms, while 20 hostile bodies"
                " of up to 16 MB arrive, four at a time",
                unit="ms",
                digits=0,
                without="without",
                bound=at_most_beside("without", "without", 50.0),
            ),
            Figure(
                key="cpu",
                what="the same: CPU of the gateway's process for each body, in the mean",
                unit="ms",
                digits=0,
            ),
        ),
    ),
)
