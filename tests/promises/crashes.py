"""P3, P8, P9, P10: workers die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mlxsup.client import Client, RequestError

from .bounds import at_most, at_most_beside, equals, quantile_at_most
from .crowd_process import Crowd
from .daemons import Daemon, ready
from .entries import SOON, Entry, real_entry
from .measure import CPU, FAKE, Figure, Measure, Place, Values
from .replacing import replaced_after
from .watching import Changes, ExitWatch, TimedReader
from support.daemon import fake, row, wait_for_state
from support.eventually import eventually

ROWS = 64
MAX_CRASHES = 3

# ---------------------------------------------------------------- P3


def all_run(row: dict[str, Any]) -> bool:
    """Whether every row has been read and has a token: one prompt is read in each step."""
    return len(row["running"]) == ROWS and row["steps"] > ROWS + 8


def news_of_crashes(place: Place) -> Values:
    """From the end of the process to the state change, as a client hears of it."""
    longest = 3_000_000
    # What a row has said is read again after each crash, in one step however long it has become.
    options = {"step_s": 0.005, "context_length": longest, "prefill_tokens_per_step": longest}
    models = {"m": fake(fake=options, max_concurrency=ROWS, restart=SOON)}
    known_ms, torn_down_ms = [], []
    with Daemon(models) as daemon, daemon.client() as client:
        changes = Changes(client)
        ready(client, "m")
        # Their reader is another process, so that this one hears of the change in time.
        with Crowd("reading", daemon.endpoint, "m", "row", str(ROWS)):
            for _ in range(place.sizes.crashes):
                eventually(lambda: all_run(row(client, "m")), timeout_s=60.0)
                before = row(client, "m")
                watch = ExitWatch(before["pid"])
                start_s = time.monotonic()
                os.kill(before["pid"], signal.SIGKILL)
                known_at = changes.left_ready_at("m", before["generation"])
                ended_at = watch.ended_at()
                known_ms.append(1000 * (known_at - ended_at))
                torn_down_ms.append(1000 * (ended_at - start_s))
    return {"known": known_ms, "torn_down": torn_down_ms}


# ---------------------------------------------------------------- P8


def ready_again(place: Place, *, entry: Entry) -> Values:
    """From SIGKILL to READY, and a cold load."""
    return replaced_after(entry(place), signal.SIGKILL, tokens=300)


# ---------------------------------------------------------------- P9

RESTART = {"backoff_initial_s": 0.05, "backoff_max_s": 0.1}
MAX_STARTS = 9
"""`max_restarts` is 8 by default."""


def crash_in_loads(place: Place) -> Values:
    """A worker that dies in every load, under the default count of restarts."""
    entry = fake(fake={"crash_in_load": "SIGKILL"}, preload=False, restart=RESTART)
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        refuse(client, "load_failed")
        return given_up(client)


def crash_while_serving(place: Place) -> Values:
    """A worker that is READY and streams, and is killed each time; never by a request's fault."""
    with (
        Daemon({"m": fake(fake={"step_s": 0.01}, restart=RESTART)}) as daemon,
        daemon.client() as client,
    ):
        stream = TimedReader(client, "m", "held", max_tokens=4000)
        for generation in range(1, MAX_STARTS + 2):
            seen = eventually(partial(serves_or_failed, client, generation), timeout_s=60.0)
            if seen["state"] == "FAILED":
                break
            os.kill(seen["pid"], signal.SIGKILL)
        assert stream.failed().code in ("model_failed", "worker_crashed"), stream.error
        return given_up(client)


def serves_or_failed(client: Client, generation: int) -> dict[str, Any] | None:
    """The model's row, once that life of it has made steps, or when it was given up."""
    seen = row(client, "m")
    is_serving = seen["state"] == "READY" and seen["generation"] == generation and seen["steps"] > 2
    return seen if is_serving or seen["state"] == "FAILED" else None


def given_up(client: Client) -> Values:
    """How many starts there were; and the next request."""
    after = wait_for_state(client, "m", "FAILED")
    assert "SIGKILL" in after["cause"], after["cause"]
    start_s = time.monotonic()
    refuse(client, "model_failed")
    refused_s = time.monotonic() - start_s
    assert row(client, "m")["generation"] == after["generation"], "it was started again"
    return {"starts": after["generation"], "refused": 1000 * refused_s}


def refuse(client: Client, code: str) -> None:
    """A request must end with this code."""
    found: str | None = None
    try:
        client.complete("m", prompt="x", max_tokens=1)
    except RequestError as error:
        found = error.code
    assert found == code, f"{found} instead of {code}"


# ---------------------------------------------------------------- P10


def poisoned(*places: int) -> int:
    """Eight requests, some of which kill their engine at these tokens; returns the crashes."""
    tokens = 60
    entry = fake(fake={"step_s": 0.004}, max_concurrency=8, restart=SOON)
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        ready(client, "m")
        innocent = [f"innocent {n}" for n in range(8 - len(places))]
        right = [client.complete("m", prompt=p, max_tokens=tokens).token_ids for p in innocent]
        poisons = [
            TimedReader(client, "m", f"[[fault crash=SIGABRT at={at}]] {n}", max_tokens=tokens)
            for n, at in enumerate(places)
        ]
        readers = [TimedReader(client, "m", prompt, max_tokens=tokens) for prompt in innocent]
        for reader in poisons:
            assert reader.failed().code == "quarantined", reader.error
        assert [reader.finished().token_ids for reader in readers] == right
        return int(wait_for_state(client, "m", "READY")["generation"]) - 1


def poison(place: Place) -> Values:
    """P10: early, late, and two at once."""
    return {"early": poisoned(3), "late": poisoned(58), "two": poisoned(3, 30)}


def _ready_again(where: str, entry: Entry) -> Measure:
    return Measure(
        promise="P8",
        name="mlx",
        where=where,
        round=partial(ready_again, entry=entry),
        figures=(
            Figure(
                key="ready",
                what="SIGKILL to READY (without: a cold load); its stream resumes",
                bound=at_most_beside("cold", "cold load", 1.0),
                without="cold",
            ),
        ),
    )


def _crash_loop(name: str, how: Callable[[Place], Values], what: str) -> Measure:
    return Measure(
        promise="P9",
        name=name,
        where=FAKE,
        round=how,
        figures=(
            Figure(
                key="starts",
                what=f"`max_restarts` 8, a worker that {what}: starts until FAILED",
                unit="",
                digits=0,
                bound=equals(MAX_STARTS),
            ),
            Figure(key="refused", what="then: time to refuse", unit="ms", digits=1),
        ),
    )


def _count(key: str, what: str, limit: int) -> Figure:
    return Figure(
        key=key,
        what=what,
        unit="crashes",
        digits=0,
        bound=at_most(limit),
    )


MEASURES = (
    Measure(
        promise="P3",
        name="news",
        where=FAKE,
        round=news_of_crashes,
        figures=(
            Figure(
                key="known",
                what="from the exit of a worker with 64 running rows to the news of it",
                unit="ms",
                digits=1,
                quantile=0.99,
                bound=quantile_at_most(0.99, 50.0, least=500),
            ),
            Figure(
                key="torn_down",
                what="the teardown before: from SIGKILL to the exit",
                unit="ms",
                digits=1,
            ),
        ),
    ),
    _ready_again(CPU, real_entry),
    _crash_loop("load", crash_in_loads, "dies in each load"),
    _crash_loop("serving", crash_while_serving, "is killed each time that it streams"),
    Measure(
        promise="P10",
        name="poison",
        where=FAKE,
        round=poison,
        figures=(
            _count("early", "8 requests, one kills its engine at token 3", MAX_CRASHES),
            _count("late", "8 requests, one kills its engine at token 58 of 60", MAX_CRASHES),
            _count("two", "8 requests, two of them poison", 2 * MAX_CRASHES),
        ),
    ),
)
