"""P23: workers that live, beat, and have lost their work."""

from __future__ import annotations

import time

from .bounds import at_most
from .daemons import Daemon
from .entries import SOON
from .measure import FAKE, Figure, Measure, Place, Values
from .watching import Changes, TimedReader
from support.daemon import fake, wait_for_state
from support.faults import undisturbed
from support.lossy import LossyDaemon

LIMIT_S = 2.0
TOKENS = 30

FAULTS = {
    "drop": ("link=drop at=9", "its connection ends"),
    "oversized": ("frames=oversized at=9", "a frame too large ends its connection"),
    "insert": ("stall=sleep during=insert", "it is stuck in an insert"),
    "between": ("stall=sleep during=bytes_held at=9", "it is stuck between two steps"),
    "engine": ("row=lost at=9", "its engine loses a row"),
    "beats": ("beats=end at=9", "its heartbeats end"),
}
LOSSES = {
    "running": "its loop loses a row",
    "messages": "its messages vanish on the way",
}


def noticed(place: Place) -> Values:
    """From the last sign of its work until the supervisor acts; each stream continues, whole."""
    entry = fake(fake={"step_s": 0.02}, step_timeout_s=LIMIT_S, restart=SOON)
    with Daemon({"m": entry}) as daemon:
        found_s = {key: _strike(daemon, fault) for key, (fault, _) in FAULTS.items()}
    for what in LOSSES:
        with LossyDaemon(what, {"m": entry}) as lossy:
            found_s[what] = _strike(lossy, "")
    return found_s


def _strike(daemon: Daemon | LossyDaemon, fault: str) -> float:
    with daemon.client() as client:
        changes = Changes(client)
        generation = wait_for_state(client, "m", "READY")["generation"]
        prompt = f"[[fault {fault} generation={generation}]]"
        asked_at = time.monotonic()
        stream = TimedReader(client, "m", prompt, max_tokens=TOKENS)
        result = stream.finished()
        assert result.token_ids == undisturbed(prompt, TOKENS)
        assert result.resumed <= 1
        acted_at = changes.left_ready_at("m", generation)
        return acted_at - max([asked_at, *(t for t in stream.times if t < acted_at)])


MEASURES = (
    Measure(
        promise="P23",
        name="lost",
        most_repeats=3,
        where=FAKE,
        round=noticed,
        figures=tuple(
            Figure(
                key=key,
                what=f"a worker that lives, step limit 2 s: {name}: until it is noticed; the stream"
                " continues, token for token",
                bound=at_most(LIMIT_S + 2.0),
            )
            for key, name in [*((k, n) for k, (_, n) in FAULTS.items()), *LOSSES.items()]
        ),
    ),
)
