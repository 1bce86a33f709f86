"""P16: one client asks for everything at once, and keeps asking; another asks now and then, and in
the end without pause, too.

Both are named in `[clients]`, with equal weights: what is measured must not depend on which process
each of them happens to be.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlxsup.client import Client

from .bounds import equals, quantile_at_most, within
from .crowd_process import Crowd
from .daemons import Daemon, ready
from .measure import FAKE, Figure, Measure, Place, Values, require
from support.daemon import fake, row
from support.eventually import eventually

PROBES = 5
ROWS = 8
QUEUE = 64
"""What may wait of one client."""

OTHER = "other"
ACCOUNTS = f"\n[clients.flood]\n\n[clients.{OTHER}]\n"
ASKERS = 2 * ROWS
"""Of the other client, while it asks without pause: some of its requests always wait."""

ASKED = 25 * ROWS
"""Its requests in that time; what it has of the first few rows and of the last is a small part."""


def first_token_ms(client: Client, prompt: str) -> float:
    """Time to the first token of a short answer to the other client."""
    start_s = time.monotonic()
    stream = client.generate("m", prompt=prompt, max_tokens=3, client=OTHER, timeout_s=120.0)
    next(stream)
    took_s = time.monotonic() - start_s
    for _ in stream:  # to its end
        pass
    return 1000 * took_s


FULL = 48
"""Places that are taken, at least, whenever that is looked at: some have just been served, and the
flood is a process that has to ask again."""


def is_full(client: Client) -> bool:
    """Whether the flood's share of the queue is full."""
    waiting: int = client.status()["queue"]["waiting"]
    return waiting >= FULL


def share(client: Client) -> float:
    """What the other client gets of the engine while both ask for more than there is."""

    def ask(number: int) -> float:
        result = client.complete("m", prompt=f"share {number}", max_tokens=5, client=OTHER)
        return result.usage.engine_s

    before_s = row(client, "m")["engine_s"]
    with ThreadPoolExecutor(ASKERS) as askers:
        own_s = sum(askers.map(ask, range(ASKED)))
    return float(own_s / (row(client, "m")["engine_s"] - before_s))


def flood(place: Place) -> Values:
    """The probes begin when the queue is full, and count only if it is full after each of them."""
    entry = fake(fake={"step_s": 0.02}, max_concurrency=ROWS)
    limits: dict[str, Any] = {"max_queue_per_client": QUEUE}
    daemon = Daemon({"m": entry}, limits)
    daemon.config.write_text(daemon.config.read_text() + ACCOUNTS)
    with daemon, daemon.client() as client:
        ready(client, "m")
        usual = [first_token_ms(client, f"usual {n}") for n in range(PROBES)]
        with Crowd("flood", daemon.endpoint, "m", str(place.sizes.flood)) as crowd:
            eventually(lambda: is_full(client), timeout_s=60.0, what="a full queue")
            beside = []
            for n in range(PROBES):
                beside.append(first_token_ms(client, f"beside {n}"))
                require(is_full(client), "the queue was no longer full")
            own = share(client)
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
        "share": own,
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
            Figure(
                key="share",
                what="the same, while both ask for more than there is, with equal weights:"
                " the other client's share of the engine seconds",
                unit="",
                bound=within(0.4, 0.6),
            ),
            Figure(key="took", what="until each of the first 10,000 is served or refused"),
        ),
    ),
)
