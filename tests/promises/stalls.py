"""P5, P6: workers that live and make no progress."""

from __future__ import annotations

import signal
from functools import partial

from .bounds import at_most, at_most_beside
from .daemons import Daemon
from .entries import SOON, Entry, real_entry
from .measure import CPU, FAKE, Figure, Measure, Place, Values
from .replacing import replaced_after
from .watching import Changes, TimedReader
from support.daemon import fake, wait_for_state

LIMIT_S = 2.0
STALLS = ("sleep", "busy", "gil")


def stopped_worker(place: Place, *, entry: Entry) -> Values:
    """P5: SIGSTOP in the middle of an answer; and a cold load."""
    return replaced_after(entry(place), signal.SIGSTOP, tokens=500)


def stuck_step(place: Place) -> Values:
    """P6: from the last token before the stall until the supervisor acts."""
    found_s: dict[str, float] = {}
    entry = fake(fake={"step_s": 0.02}, step_timeout_s=LIMIT_S, restart=SOON)
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        changes = Changes(client)
        for how in STALLS:
            generation = wait_for_state(client, "m", "READY")["generation"]
            stuck = TimedReader(
                client, "m", f"[[fault stall={how} at=9]]", max_tokens=20, resume=False
            ).started()
            assert stuck.failed().code == "worker_crashed"
            found_s[how] = changes.left_ready_at("m", generation) - stuck.times[-1]
        assert "most recent call first" in daemon.log_text(), "no stacks in the worker's log"
    return found_s


def _stopped(name: str, where: str, entry: Entry) -> Measure:
    return Measure(
        promise="P5",
        name=name,
        where=where,
        round=partial(stopped_worker, entry=entry),
        figures=(
            Figure(
                key="ready",
                what="SIGSTOP to READY in a new process (without: a cold load); its stream resumes",
                bound=at_most_beside("cold", "cold load", 6.0),
                without="cold",
            ),
        ),
    )


MEASURES = (
    _stopped("fake", FAKE, lambda place: fake(fake={"step_s": 0.01}, restart=SOON)),
    _stopped("mlx", CPU, real_entry),
    Measure(
        promise="P6",
        name="stuck",
        where=FAKE,
        round=stuck_step,
        figures=tuple(
            Figure(
                key=how,
                what=f"a step that never ends ({name}), limit 2 s: until it is found",
                bound=at_most(LIMIT_S + 1.0),
            )
            for how, name in zip(STALLS, ("sleeps", "Python loop", "GIL held"), strict=True)
        ),
    ),
)
