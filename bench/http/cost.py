"""What the gateway costs, by the clocks of all threads of its process.

*Unpaced*: sixteen answers of an engine that takes no time, from the first request to the last mark;
what the gateway has spent is divided by the chunks that have arrived, one for each token. *Paced*:
one answer of an engine whose steps take 5 ms, next to bare forwarders (`forwarder.py`) that are
handed events of the same size at the same pace, one on asyncio's own event loop and one on uvloop.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mlxsup.cli.benchmark.http_reading import Address

from ..fast_path.quiet import until_quiet
from ..fast_path.results import Found
from ..fast_path.stages import Rows, Setting
from ..rounds import order_in_round
from ..thread_clock import threads_ns
from support.child import Child, EndedError
from support.daemon import fake
from support.http_daemon import HttpDaemon, gateway_of
from support.verdict import NotShown

MODEL = "fake"
STREAMS = 16
TOKENS = 2000
"""Of each unpaced answer, so that its request is a small part of what it costs."""

REPEATS = 7
STEP_S = 0.005
WINDOW_S = 5.0
LEAST_OF_PACE = 0.5
"""Of the chunks that the pace would give: a step takes longer than its pause, and on a busy machine
much longer."""

CONTEXT = 6_000_000
PROMPT = "[[fault big=4]]"
"""Makes every token four letters, so that each is a chunk."""

LOOP, OTHERS = "its event loop", "its other threads"
SIDES = GATEWAY, ASYNCIO, UVLOOP = "gateway", "asyncio", "uvloop"


@contextmanager
def readers(address: Address, streams: int, tokens: int) -> Iterator[Child]:
    """Somebody who reads streams of that many tokens each, all of which have begun.

    Raises:
        NotShown: one has not, or has been refused.
    """
    messages = [{"role": "user", "content": PROMPT}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": tokens})
    with Child("-m", "bench.http.readers", *address, streams, body) as child:
        try:
            child.line()
            yield child
        except EndedError:
            raise NotShown("a stream has brought nothing, or has broken off") from None


@contextmanager
def serving(step_s: float) -> Iterator[tuple[Address, int]]:
    """A daemon whose engine takes that long for a step: the address and the pid of its gateway."""
    options = {"context_length": CONTEXT, "step_s": step_s}
    entry = fake(max_concurrency=STREAMS, fake=options)
    with HttpDaemon({MODEL: entry}) as daemon, daemon.client() as client:
        client.load(MODEL)
        yield daemon.address, gateway_of(client)["pid"]


@contextmanager
def forwarding(size_bytes: int, loop: str) -> Iterator[tuple[Address, int]]:
    """A bare forwarder on that loop that is handed events of that size: its address and its pid."""
    event = event_of(size_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="mlxsup-f-", dir="/tmp") as folder,
        Child("-m", "bench.http.forwarder", folder, loop) as forwarder,
    ):
        about = forwarder.line()
        assert about["loop"] == loop
        address = ("127.0.0.1", about["port"])
        with Child("-m", "bench.http.forwarder", folder, event, STEP_S):
            yield address, forwarder.pid


def event_of(size_bytes: int) -> str:
    """An event with text that is so long."""
    begin = 'data: {"choices":[{"index":0,"delta":{"content":"text"}}],"filling":"'
    end = '"}\n\n'
    return begin + "x" * (size_bytes - len(begin) - len(end)) + end


# ---------------------------------------------------------------- what is measured


def unpaced_us(address: Address, pid: int, tokens: int) -> tuple[float, float]:
    """Processor time per chunk in µs: of the first thread, and of the others.

    Raises:
        NotShown: there was not a chunk for each token: larger ones are cheaper.
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
        raise NotShown(f"{whole['events']} chunks came for {tokens} tokens")
    loop = after[pid] - before[pid]
    all_of_them = sum(after.values()) - sum(before.values())
    return loop / 1000 / tokens, (all_of_them - loop) / 1000 / tokens


def paced(address: Address, pid: int, window_s: float) -> tuple[float, int]:
    """Processor time per chunk in µs, of all threads, and the size of a chunk in bytes.

    Raises:
        NotShown: chunks did not come at their pace.
    """
    with readers(address, 1, CONTEXT // 2) as child:
        before, spent = child.ask(), threads_ns(pid)
        time.sleep(window_s)
        after, spent_then = child.ask(), threads_ns(pid)
    chunks = at_pace(after["events"] - before["events"], window_s)
    spent_ns = sum(spent_then.values()) - sum(spent.values())
    return spent_ns / 1000 / chunks, (after["bytes"] - before["bytes"]) // chunks


def at_pace(chunks: int, window_s: float) -> int:
    """How many chunks came.

    Raises:
        NotShown: too few: whoever does nothing costs nothing.
    """
    least = window_s / STEP_S * LEAST_OF_PACE
    if chunks < least:
        raise NotShown(f"{chunks} chunks came in {window_s:g} s, at least {least:.0f} are needed")
    return chunks


# ---------------------------------------------------------------- the rows


async def unpaced_row(setting: Setting, wanted: Sequence[str]) -> Rows:
    """Sixteen answers at once, as fast as they come."""
    found: list[tuple[float, float]] = []
    tokens = 100 if setting.is_small else TOKENS
    with serving(0.0) as (address, pid):
        unpaced_us(address, pid, tokens)  # the first one warms up
        for _ in range(setting.runs(REPEATS)):
            await until_quiet(setting)
            found.append(unpaced_us(address, pid, tokens))
    sides = {LOOP: [loop for loop, _ in found], OTHERS: [others for _, others in found]}
    yield (
        "http_cpu",
        {"http_cpu": Found(values=[sum(one) for one in found], sides=sides, unit="µs")},
    )


async def paced_row(setting: Setting, wanted: Sequence[str]) -> Rows:
    """One answer at its pace, and forwarders at the same, each first, second and last in turn."""
    window_s = 0.5 if setting.is_small else WINDOW_S
    spent: dict[str, list[float]] = {side: [] for side in SIDES}
    with serving(STEP_S) as (address, pid):
        _, framed_bytes = paced(address, pid, 0.5)
        # Less what frames a chunk in HTTP, which the forwarder adds as well.
        size_bytes = framed_bytes - len(b"%x\r\n\r\n" % framed_bytes)
        for repeat in range(setting.runs(REPEATS)):
            await until_quiet(setting)
            for side in order_in_round(SIDES, repeat):
                if side == GATEWAY:
                    spent[side].append(paced(address, pid, window_s)[0])
                else:
                    with forwarding(size_bytes, side) as (other, forwarder):
                        spent[side].append(paced(other, forwarder, window_s)[0])
    yield "http_paced", paced_founds(spent)


def paced_founds(spent: Mapping[str, Sequence[float]]) -> dict[str, Found]:
    """What the gateway costs more than each forwarder, round by round.

    Args:
        spent: µs per chunk, of each side in each round.
    """
    founds = {}
    for loop, id in ((ASYNCIO, "http_paced"), (UVLOOP, "http_paced_uvloop")):
        both = zip(spent[GATEWAY], spent[loop], strict=True)
        sides = {GATEWAY: list(spent[GATEWAY]), f"forwarder, {loop}": list(spent[loop])}
        founds[id] = Found(values=[our - its for our, its in both], sides=sides, unit="µs")
    return founds
