"""Processor time of the gateway, by the clocks of all threads of its process.

*Unpaced*: sixteen answers of an engine that takes no time, from the first request to the last mark;
what the gateway has spent is divided by the chunks that have arrived, one for each token. *Paced*:
one answer of an engine whose steps take 5 ms.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .openai_stream import Address
from .report import NotMeasured, print_table, spread, threads_ns
from support.daemon.child import Child, EndedError
from support.daemon.daemon import fake
from support.gateway.http_daemon import HttpDaemon, gateway_of

MODEL = "fake"
STREAMS = 16
TOKENS = 2000
"""Of each unpaced answer, so that its request is a small part of what it costs."""

STEP_S = 0.005
WINDOW_S = 5.0
LEAST_OF_PACE = 0.5
"""Of the chunks that the pace would give: a step takes longer than its pause, and on a busy machine
much longer."""

CONTEXT = 6_000_000
PROMPT = "[[fault big=4]]"
"""Makes every token four letters, so that each is a chunk."""


@contextmanager
def readers(address: Address, streams: int, tokens: int) -> Iterator[Child]:
    """Somebody who reads streams of that many tokens each, all of which have begun.

    Raises:
        NotMeasured: one has not, or has been refused.
    """
    messages = [{"role": "user", "content": PROMPT}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": tokens})
    with Child("-m", "bench.readers", *address, streams, body) as child:
        try:
            child.line()
            yield child
        except EndedError:
            raise NotMeasured("a stream has brought nothing, or has broken off") from None


@contextmanager
def serving(step_s: float) -> Iterator[tuple[Address, int]]:
    """Start a daemon whose engine takes `step_s` for a step; yield its gateway's address and
    pid."""
    options = {"context_length": CONTEXT, "step_s": step_s}
    entry = fake(max_concurrency=STREAMS, fake=options)
    with HttpDaemon({MODEL: entry}) as daemon, daemon.client() as client:
        client.load(MODEL)
        yield daemon.address, gateway_of(client)["pid"]


# ---------------------------------------------------------------- what is measured


def unpaced_us(address: Address, pid: int, tokens: int) -> tuple[float, float]:
    """Processor time per chunk in µs: of the first thread, and of the others.

    Raises:
        NotMeasured: there was not a chunk for each token: larger ones are cheaper.
    """
    before = threads_ns(pid)
    with readers(address, STREAMS, tokens) as child:
        whole = child.line()
    after = threads_ns(pid)
    return per_chunk_us(before, after, pid, whole, STREAMS * tokens)


def per_chunk_us(
    before: dict[int, int], after: dict[int, int], pid: int, whole: dict[str, int], tokens: int
) -> tuple[float, float]:
    """See `unpaced_us`."""
    if not whole["events"] == whole["tokens"] == tokens:
        raise NotMeasured(f"{whole['events']} chunks came for {tokens} tokens")
    loop = after[pid] - before[pid]
    all_of_them = sum(after.values()) - sum(before.values())
    return loop / 1000 / tokens, (all_of_them - loop) / 1000 / tokens


def paced(address: Address, pid: int, window_s: float) -> float:
    """Return the processor time per chunk in µs, of all threads.

    Raises:
        NotMeasured: chunks did not come at their pace.
    """
    with readers(address, 1, CONTEXT // 2) as child:
        before, spent = child.ask(), threads_ns(pid)
        time.sleep(window_s)
        after, spent_then = child.ask(), threads_ns(pid)
    chunks = at_pace(after["events"] - before["events"], window_s)
    spent_ns = sum(spent_then.values()) - sum(spent.values())
    return spent_ns / 1000 / chunks


def at_pace(chunks: int, window_s: float) -> int:
    """Return the number of chunks.

    Raises:
        NotMeasured: too few came, so the figure would be too good.
    """
    least = window_s / STEP_S * LEAST_OF_PACE
    if chunks < least:
        raise NotMeasured(
            f"{chunks} chunks came in {window_s:g} s, at least {least:.0f} are needed"
        )
    return chunks


def run(repeats: int) -> None:
    """Measure and print."""
    rows = []
    with serving(0.0) as (address, pid):
        unpaced_us(address, pid, TOKENS)  # the first one warms up
        found = [unpaced_us(address, pid, TOKENS) for _ in range(repeats)]
    rows.append(["16 streams, unpaced: its event loop", spread([one[0] for one in found], "", 1)])
    rows.append(
        ["16 streams, unpaced: its other threads", spread([one[1] for one in found], "", 1)]
    )
    with serving(STEP_S) as (address, pid):
        paced(address, pid, 0.5)
        times = [paced(address, pid, WINDOW_S) for _ in range(repeats)]
    rows.append(["one stream of 200 tokens a second", spread(times, "", 1)])
    print("## Processor time of the gateway for each chunk (fake engine)\n")
    print(f"{repeats} rounds; µs, median (range)\n")
    print_table(["what", "µs"], rows)
