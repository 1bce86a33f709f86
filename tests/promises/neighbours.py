"""P4: another worker while one dies and loads: no error, the same tokens, no step missed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from mlxsup.client import Client

from .bounds import equals, median_at_most
from .daemons import Daemon, ready
from .entries import SOON, Entry, real_entry
from .measure import CPU, FAKE, Figure, Measure, Place, Values, require
from .watching import Changes, TimedReader
from support.daemon import fake, row

STEP_S = 0.025


def missed_steps(times: Sequence[float], step_s: float) -> int:
    """Steps without a token, by when the tokens came; a gap shorter than two steps misses none."""
    return sum(max(0, int((after - before) / step_s) - 1) for before, after in pairwise(times))


def strike(client: Client) -> None:
    """What happens to the other worker's neighbour."""
    os.kill(row(client, "first")["pid"], signal.SIGSEGV)


def neighbour(place: Place, *, entry: Entry, tokens: int, step_s: float | None) -> Values:
    """Another worker's stream, while the first lives and while it dies and loads.

    Args:
        place: of the round.
        entry: of both models.
        tokens: of the stream, which must outlast the load.
        step_s: how long a step takes; None if that is not fixed.
    """
    models = {"first": entry(place), "other": entry(place)}
    with Daemon(models) as daemon, daemon.client() as client:
        for name in models:
            ready(client, name)
        client.complete("other", prompt="neighbour", max_tokens=tokens // 10)
        changes = Changes(client)
        streams: list[TimedReader] = []
        for is_struck in (False, True):
            first = TimedReader(client, "first", "busy", max_tokens=tokens)
            other = TimedReader(client, "other", "neighbour", max_tokens=tokens).started()
            first.started()
            if is_struck:
                strike(client)
            other.finished(300.0)
            first.finished(300.0)
            streams.append(other)
        calm, struck = streams
        require(
            changes.ready_at("first", 2) < struck.ended_at,
            "the other stream had ended before the first model was loaded again",
        )
        assert calm.tokens == struck.tokens, "other tokens"
        assert row(client, "other")["generation"] == 1
    gaps = calm.largest_gap_ms, struck.largest_gap_ms
    values = {"without": gaps[0], "gap": gaps[1], "ratio": gaps[1] / gaps[0]}
    if step_s is not None:
        own = missed_steps(calm.times, step_s)
        require(own == 0, f"the machine is too busy: undisturbed, the stream missed {own} steps")
        values |= {"missed": missed_steps(struck.times, step_s), "missed_without": own}
    return values


GAPS = (
    Figure(
        key="gap",
        what="largest gap of the other worker's stream while the first dies and loads; same tokens",
        unit="ms",
        digits=1,
        without="without",
    ),
    Figure(
        key="ratio", what="the same: with / without", unit="", bound=median_at_most(2.0)
    ),
)  # fmt: skip

MEASURES = (
    Measure(
        promise="P4",
        name="steps",
        where=FAKE,
        round=partial(
            neighbour,
            entry=lambda place: fake(fake={"step_s": STEP_S}, restart=SOON),
            tokens=120,
            step_s=STEP_S,
        ),
        figures=(
            Figure(
                key="missed",
                what=f"steps of {1000 * STEP_S:g} ms that the other worker's stream misses while"
                " the first dies and loads",
                unit="",
                digits=0,
                without="missed_without",
                bound=equals(0, is_exact=False),
            ),
            *GAPS,
        ),
    ),
    Measure(
        promise="P4",
        name="mlx",
        where=CPU,
        round=partial(neighbour, entry=real_entry, tokens=2000, step_s=None),
        figures=GAPS,
    ),
)
