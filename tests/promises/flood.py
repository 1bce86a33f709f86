"""P16: one client asks for everything at once, and keeps asking; another asks now and then."""

from __future__ import annotations

import time
from typing import Any

from mlxsup.client import Client

from .bounds import equals, quantile_at_most
from .crowd_process import Crowd
from .daemons import Daemon, ready
from .measure import FAKE, Figure, Measure, Place, Values, require
from .watching import TimedReader
from support.daemon import fake, row
from support.eventually import eventually

PROBES = 5
ROWS = 8
QUEUE = 64
"""What may wait of one client."""


def first_token_ms(client: Client, prompt: str) -> float:
    """Time to the first token of a short answer."""
    start_s = time.monotonic()
    reader = TimedReader(client, "m", prompt, max_tokens=3)
    reader.finished(120.0)
    return 1000 * (reader.times[0] - start_s)


FULL = 48
"""Places that are taken, at least, whenever that is looked at: some have just been served, and the
flood is a process that has to ask again."""


def is_full(client: Client) -> bool:
    """Whether the flood's share of the queue is full."""
    waiting: int = client.status()["queue"]["waiting"]
    return waiting >= FULL


def flood(place: Place) -> Values:
    """The probes begin when the queue is full, and count only if it is full after each of them."""
    entry = fake(fake={"step_s": 0.02}, max_concurrency=ROWS)
    limits: dict[str, Any] = {"max_queue_per_client": QUEUE}
    with Daemon({"m": entry}, limits) as daemon, daemon.client() as client:
        ready(client, "m")
        usual = [first_token_ms(client, f"usual {n}") for n in range(PROBES)]
        with Crowd("flood", daemon.endpoint, "m", str(place.sizes.flood)) as crowd:
            eventually(lambda: is_full(client), timeout_s=60.0, what="a full queue")
            beside = []
            for n in range(PROBES):
                beside.append(first_token_ms(client, f"beside {n}"))
                require(is_full(client), "the queue was no longer full")
            said = crowd.result()
        assert row(client, "m")["generation"] == 1
    ends = said["ends"]
    others = sum(count for end, count in ends.items() if end not in ("served", "overloaded"))
    asked_first = place.sizes.flood
    require(sum(ends.values()) >= asked_first, f"of {asked_first} requests ended {ends}")
    return {
        "others": others,
        "served": ends.get("served", 0),
        "refusals": ends.get("overloaded", 0),
        "usual": usual,
        "beside": beside,
        "ratio": max(beside) / max(usual),
        "refused": said["refused_ms"],
        "took": said["took_s"],
    }


MEASURES = (
    Measure(
        promise="P16",
        name="flood",
        where=FAKE,
        round=flood,
        figures=(
            Figure(
                key="others",
                what="10,000 requests of one client at once, 100 of them again and again: those"
                " neither served nor refused as `overloaded`",
                unit="",
                digits=0,
                bound=equals(0),
            ),
            Figure(key="served", what="the same: served", unit="", digits=0),
            Figure(key="refusals", what="the same: refused", unit="", digits=0),
            Figure(
                key="refused",
                what="while its queue is full (48 to 64 wait): from asking to the refusal",
                unit="ms",
                digits=1,
                quantile=0.99,
                bound=quantile_at_most(0.99, 100.0, least=500),
            ),
            Figure(
                key="beside",
                what="while its queue is full: time to first token of another client",
                unit="ms",
                digits=0,
                without="usual",
            ),
            Figure(
                key="ratio",
                what="the same: slowest with / slowest without",
                unit="",
                digits=1,
            ),
            Figure(key="took", what="until each of the first 10,000 is served or refused"),
        ),
    ),
)
