"""P3, P4, P8, P9, P10, P14: workers die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
from mlxsup.client import Client, RequestError
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

from .crowd_process import Crowd
from .measure import (
    CPU,
    FAKE,
    Figure,
    Measure,
    Place,
    Values,
    at_most,
    at_most_beside,
    equals,
    quantile,
)
from .replacing import replaced_after
from .watching import Changes, ExitWatch, TimedReader

ROWS = 64
SOON = {"max_restarts": 1_000_000, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}
WARM_UP_CYCLES = 20
MAX_CRASHES = 3

Entry = Callable[[Place], dict[str, Any]]


def real_entry(place: Place) -> dict[str, Any]:
    """The tiny model on the CPU."""
    return {"path": str(place.tiny), "preload": True, "restart": SOON}


# ---------------------------------------------------------------- P3


def all_run(row: dict[str, Any]) -> bool:
    """Whether every row has been read and has a token: one prompt is read in each step."""
    return len(row["running"]) == ROWS and row["steps"] > ROWS + 8


def news_of_crashes(place: Place) -> Values:
    """From the end of the process to the state change, as a client hears of it."""
    options = {"step_s": 0.04, "context_length": 10_000_000}
    models = {"m": fake(fake=options, max_concurrency=ROWS, restart=SOON)}
    known_ms, torn_down_ms = [], []
    with Daemon(models) as daemon, daemon.client() as client:
        changes = Changes(client)
        wait_for_state(client, "m", "READY")
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


# ---------------------------------------------------------------- P4


def undisturbed_neighbour(place: Place, *, entry: Entry, tokens: int) -> Values:
    """The largest gap in the other worker's stream, with a crash of the first and without."""
    models = {"first": entry(place), "other": entry(place)}
    with Daemon(models) as daemon, daemon.client() as client:
        for name in models:
            wait_for_state(client, name, "READY")
        client.complete("other", prompt="neighbour", max_tokens=tokens // 10)
        gaps, answers, steps = [], [], []
        for is_struck in (False, True):
            before = row(client, "other")["steps"]
            first = TimedReader(client, "first", "busy", max_tokens=tokens)
            other = TimedReader(client, "other", "neighbour", max_tokens=tokens).started()
            first.started()
            if is_struck:
                os.kill(row(client, "first")["pid"], signal.SIGSEGV)
            answers.append(other.finished().token_ids)
            steps.append(row(client, "other")["steps"] - before)
            gaps.append(other.largest_gap_ms)
            first.finished()
        assert answers[0] == answers[1], "other tokens"
        assert steps[0] == steps[1], f"steps {steps}"
        assert row(client, "other")["generation"] == 1
    return {"without": gaps[0], "gap": gaps[1], "ratio": gaps[1] / gaps[0]}


# ---------------------------------------------------------------- P8


def ready_again(place: Place, *, entry: Entry) -> Values:
    """From SIGKILL to READY, and a cold load."""
    return replaced_after(entry(place), signal.SIGKILL, tokens=300)


# ---------------------------------------------------------------- P9


def crash_loop(place: Place) -> Values:
    """A worker that dies in every load, under the default count of restarts."""
    restart = {"backoff_initial_s": 0.05, "backoff_max_s": 0.1}
    entry = fake(fake={"crash_in_load": "SIGKILL"}, preload=False, restart=restart)
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        refuse(client, "load_failed")
        after = wait_for_state(client, "m", "FAILED")
        assert "SIGKILL" in after["cause"], after["cause"]
        start_s = time.monotonic()
        refuse(client, "model_failed")
        refused_s = time.monotonic() - start_s
        assert row(client, "m")["generation"] == after["generation"]
    return {"starts": after["generation"], "refused": 1000 * refused_s}


def refuse(client: Client, code: str) -> None:
    """A request must end with this code."""
    try:
        client.complete("m", prompt="x", max_tokens=1)
    except RequestError as error:
        found = error.code
    else:
        found = None
    assert found == code, f"{found} instead of {code}"


# ---------------------------------------------------------------- P10


def poisoned(*places: int) -> int:
    """Eight requests, some of which kill their engine at these tokens; returns the crashes."""
    tokens = 60
    entry = fake(fake={"step_s": 0.004}, max_concurrency=8, restart=SOON)
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
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


# ---------------------------------------------------------------- P14


def crash_cycles(place: Place) -> Values:
    """A worker that is killed again and again, and what that leaves in the supervisor."""
    with Daemon({"m": fake(restart=SOON)}) as daemon, daemon.client() as client:
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)
        wait_for_state(client, "m", "READY")

        def cycle() -> None:
            before = row(client, "m")
            os.kill(before["pid"], signal.SIGKILL)
            eventually(lambda: row(client, "m")["generation"] > before["generation"])
            wait_for_state(client, "m", "READY")

        def held() -> tuple[int, int, float]:
            eventually(lambda: len(supervisor.children()) == 1)
            return (
                supervisor.num_fds(),
                supervisor.num_threads(),
                supervisor.memory_info().rss / 1e6,
            )

        for _ in range(WARM_UP_CYCLES):
            cycle()
        files, threads, rss_mb = held()
        start_s = time.monotonic()
        for _ in range(place.sizes.cycles):
            cycle()
        cycle_s = (time.monotonic() - start_s) / place.sizes.cycles
        zombies = sum(p.status() == psutil.STATUS_ZOMBIE for p in supervisor.children())
        files_after, threads_after, rss_mb_after = held()
        client.complete("m", prompt="serves", max_tokens=2)
    return {
        "zombies": zombies,
        "files": files_after - files,
        "threads": threads_after - threads,
        "rss": rss_mb_after - rss_mb,
        "cycle": cycle_s,
    }


def _neighbour(where: str, entry: Entry, tokens: int) -> Measure:
    return Measure(
        promise="P4",
        where=where,
        round=partial(undisturbed_neighbour, entry=entry, tokens=tokens),
        figures=(
            Figure(
                key="gap",
                what="largest gap of the other worker's stream while the first dies and loads;"
                " same tokens, same steps",
                unit="ms",
                digits=1,
                without="without",
            ),
            Figure(key="ratio", what="the same: with / without", unit="", target="reported"),
        ),
    )


def _ready_again(where: str, entry: Entry) -> Measure:
    return Measure(
        promise="P8",
        where=where,
        round=partial(ready_again, entry=entry),
        figures=(
            Figure(
                key="ready",
                what="SIGKILL to READY (without: a cold load); its stream goes on",
                target="≤cold load + 1 s",
                is_kept=at_most_beside("ready", "cold", 1.0),
                without="cold",
            ),
        ),
    )


def _count(key: str, what: str, limit: int) -> Figure:
    return Figure(
        key=key,
        what=what,
        unit="crashes",
        digits=0,
        target=f"≤{limit}",
        is_kept=at_most(key, limit),
    )


MEASURES = (
    Measure(
        promise="P3",
        where=FAKE,
        round=news_of_crashes,
        figures=(
            Figure(
                key="known",
                what="from the exit of a worker with 64 running rows to the news of it",
                unit="ms",
                digits=1,
                quantile=0.99,
                target="p99 ≤50 ms",
                is_kept=lambda samples: quantile(samples["known"], 0.99) <= 50.0,
            ),
            Figure(
                key="torn_down",
                what="the teardown before: from SIGKILL to the exit",
                unit="ms",
                digits=1,
                target="reported",
            ),
        ),
    ),
    _neighbour(FAKE, lambda place: fake(fake={"step_s": 0.01}, restart=SOON), 250),
    _neighbour(CPU, real_entry, 1000),
    _ready_again(CPU, real_entry),
    Measure(
        promise="P9",
        where=FAKE,
        round=crash_loop,
        figures=(
            Figure(
                key="starts",
                what="crash loop, `max_restarts` 8: starts until FAILED",
                unit="",
                digits=0,
                target="9",
                is_kept=equals("starts", 9),
            ),
            Figure(
                key="refused", what="then: time to refuse", unit="ms", digits=1, target="reported"
            ),
        ),
    ),
    Measure(
        promise="P10",
        where=FAKE,
        round=poison,
        figures=(
            _count("early", "8 requests, one kills its engine at token 3", MAX_CRASHES),
            _count("late", "8 requests, one kills its engine at token 58 of 60", MAX_CRASHES),
            _count("two", "8 requests, two of them poison", 2 * MAX_CRASHES),
        ),
    ),
    Measure(
        promise="P14",
        where=FAKE,
        round=crash_cycles,
        most_repeats=1,
        figures=(
            Figure(
                key="zombies",
                what="1,000 crashes: zombies",
                unit="",
                digits=0,
                target="0",
                is_kept=equals("zombies", 0),
            ),
            Figure(
                key="files",
                what="1,000 crashes: open files more",
                unit="",
                digits=0,
                target="0",
                is_kept=equals("files", 0),
            ),
            Figure(
                key="threads",
                what="1,000 crashes: threads more",
                unit="",
                digits=0,
                target="0",
                is_kept=equals("threads", 0),
            ),
            Figure(
                key="rss",
                what="1,000 crashes: supervisor RSS more",
                unit="MB",
                digits=1,
                target="<5 MB",
                is_kept=at_most("rss", 5.0),
            ),
            Figure(key="cycle", what="one crash to READY, on average", target="reported"),
        ),
    ),
)
