"""What the router costs, by the clock of its own thread: the supervisor's first.

*Unpaced*: the supervisor is stopped while the worker makes a few steps. Then the worker is stopped
and the supervisor continues: it is woken once, and works off what was left without waiting again,
for clients that only receive. A backlog of one step costs the same wake-up, so what a long one
costs more is the cost of its further steps. *Paced*: an engine whose steps take 5 ms, next to a
forwarder that does nothing but pass on messages of the same size.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mlxsup.client import Client

from ..thread_clock import thread_ns
from .quiet import until_quiet
from .results import Found
from .stages import Rows, Setting
from support.child import Child
from support.daemon import Daemon, fake, row
from support.eventually import eventually
from support.verdict import NotShown

MODEL = "fake"
STREAMS = 16
KINDS = {"router_one": (1, 0), "router_many": (STREAMS, 0), "router_logprobs": (1, 20)}
"""Connections, and `top_logprobs`, of each claim about an unpaced router."""

REPEATS = 9
BACKLOGS, SMALL = 24, 8
LONG, SHORT = 8, 1
"""Steps of a backlog. Eight messages find room for each connection even if its client receives
none of them: the kernel takes more."""

STEP_S = 0.005
WINDOW_S = 3.0
CONTEXT = 3_000_000
WOKEN, USED = "backlogs of one step, in µs each", f"pairs used, of {BACKLOGS}"


def until_still(pid: int, since: int = -1) -> None:
    """Waits until a process's first thread has nothing to do.

    Args:
        pid: of the process.
        since: it must have used more processor time than this.
    """
    seen = -1

    def is_still() -> bool:
        nonlocal seen
        before, seen = seen, thread_ns(pid)
        return seen == before and seen > since

    eventually(is_still, what=f"process {pid} being still")


def child_of(module: str, *arguments: object) -> Child:
    """A process of this folder."""
    return Child("-m", f"bench.fast_path.{module}", *arguments)


@contextmanager
def drained(
    endpoint: str, connections: int, streams: int, top_logprobs: int = 0
) -> Iterator[Child]:
    """Streams for somebody who only receives, and has received something on each connection.

    Args:
        endpoint: to connect to.
        connections: over which they come.
        streams: how many.
        top_logprobs: that they ask for; 0 for none.
    """
    with child_of("drain", endpoint, MODEL, connections, streams, top_logprobs) as child:
        child.line()
        yield child


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What the supervisor was left, and has worked off.

    Attributes:
        spent_ns: the processor time of its own thread.
        steps: of the engine.
        messages: that the client has received for them.
    """

    spent_ns: int
    steps: int
    messages: int


class Router:
    """A daemon with a fake engine, and the clocks of its processes.

    Args:
        daemon: that runs.
        client: of it.
    """

    def __init__(self, daemon: Daemon, client: Client) -> None:
        assert daemon.process is not None
        self._client = client
        self.endpoint = daemon.endpoint
        self.pid = daemon.process.pid
        self.worker = int(row(client, MODEL)["pid"])

    @contextmanager
    def streams(self, connections: int, streams: int, top_logprobs: int = 0) -> Iterator[Child]:
        """See `drained`; every stream decodes, and nothing of earlier ones is left."""
        eventually(lambda: not row(self._client, MODEL)["running"])
        with drained(self.endpoint, connections, streams, top_logprobs) as child:
            eventually(lambda: len(row(self._client, MODEL)["running"]) == streams)
            steps = self.steps()
            eventually(lambda: self.steps() > steps + 2 * streams)  # all prompts are read
            yield child

    def steps(self) -> int:
        """How many steps the engine has made, as far as the supervisor has seen."""
        return int(row(self._client, MODEL)["steps"])

    def backlog(self, child: Child, steps: int) -> Backlog:
        """Has the supervisor work off what it was left for the streams of a client.

        Args:
            child: the client.
            steps: as many at most; fewer on a machine that is slow.
        """
        try:
            os.kill(self.worker, signal.SIGSTOP)
            until_still(self.pid)
            until_still(child.pid)
            steps_before, messages = self.steps(), child.ask()["messages"]
            until_still(self.pid)
            os.kill(self.pid, signal.SIGSTOP)
            spent_ns = thread_ns(self.pid)
            os.kill(self.worker, signal.SIGCONT)
            time.sleep(steps * STEP_S)  # each step takes at least as long
            os.kill(self.worker, signal.SIGSTOP)
            os.kill(self.pid, signal.SIGCONT)
            until_still(self.pid, spent_ns)
            spent_ns = thread_ns(self.pid) - spent_ns
            until_still(child.pid)
            return Backlog(
                spent_ns=spent_ns,
                steps=self.steps() - steps_before,
                messages=child.ask()["messages"] - messages,
            )
        finally:
            for pid in (self.pid, self.worker):
                os.kill(pid, signal.SIGCONT)

    def paced_us(self, streams: int, window_s: float) -> tuple[float, int]:
        """Processor time per step in µs, and the mean size of a message to the client."""
        with self.streams(1, streams) as child:
            steps, spent_ns = self.steps(), thread_ns(self.pid)
            time.sleep(window_s)
            spent_ns = thread_ns(self.pid) - spent_ns
            steps = self.steps() - steps
            received = child.ask()
        return spent_ns / 1000 / steps, received["bytes"] // received["messages"]


@contextmanager
def routing() -> Iterator[Router]:
    """A daemon whose engine takes `STEP_S` for each step."""
    options = {"context_length": CONTEXT, "step_s": STEP_S}
    entry = fake(max_concurrency=STREAMS, fake=options)
    with Daemon({MODEL: entry}) as daemon, daemon.client() as client:
        client.load(MODEL)
        yield Router(daemon, client)


def forwarder_us(size_bytes: int, window_s: float) -> float:
    """What a bare forwarder needs for each message of that size, in µs."""
    with (
        tempfile.TemporaryDirectory(prefix="mlxsup-f-", dir="/tmp") as folder,
        child_of("forwarder", folder) as forwarder,
    ):
        forwarder.line()
        front = f"ipc://{folder}/front.sock"
        with child_of("forwarder", folder, size_bytes, STEP_S), drained(front, 1, 1):
            before = forwarder.ask()
            time.sleep(window_s)
            after = forwarder.ask()
    spent_ns = after["cpu_ns"] - before["cpu_ns"]
    return float(spent_ns / 1000 / (after["messages"] - before["messages"]))


# ---------------------------------------------------------------- the rows


Pair = tuple[Backlog, Backlog]
"""A long backlog and a short one, after one another."""


def whole(found: Sequence[Pair], connections: int) -> list[Pair]:
    """Those of which the clients got one message for each step and connection.

    Pieces of several steps in one message would be cheaper.

    Raises:
        NotShown: there is none.
    """
    unmerged = [
        pair
        for pair in found
        if all(0 < one.steps * connections == one.messages for one in pair)
        and pair[0].steps > pair[1].steps
    ]
    if not unmerged:
        raise NotShown(f"none of {len(found)} pairs of backlogs had steps that were not merged")
    return unmerged


def us_per_token(found: Sequence[Pair]) -> float:
    """Processor time of the supervisor's own thread for each further token, over all pairs."""
    steps = sum(long.steps - short.steps for long, short in found)
    return sum(long.spent_ns - short.spent_ns for long, short in found) / 1000 / steps / STREAMS


async def unpaced(setting: Setting, wanted: Sequence[str]) -> Rows:
    """The router alone, working off what was left for it."""
    values: dict[str, list[float]] = {claim: [] for claim in KINDS}
    sides: dict[str, dict[str, list[float]]] = {claim: {WOKEN: [], USED: []} for claim in KINDS}
    with routing() as router:
        for _ in range(setting.runs(REPEATS)):
            for claim, (connections, top_logprobs) in KINDS.items():
                await until_quiet(setting)
                with router.streams(connections, STREAMS, top_logprobs) as child:
                    router.backlog(child, LONG)  # the first one warms up
                    found = [
                        (router.backlog(child, LONG), router.backlog(child, SHORT))
                        for _ in range(SMALL if setting.is_small else BACKLOGS)
                    ]
                used = whole(found, connections)
                values[claim].append(us_per_token(used))
                woken_ns = sum(short.spent_ns for _, short in used)
                sides[claim][WOKEN].append(woken_ns / 1000 / len(used))
                sides[claim][USED].append(len(used))
    yield "router", {claim: Found(values=values[claim], sides=sides[claim]) for claim in KINDS}


async def paced(setting: Setting, wanted: Sequence[str]) -> Rows:
    """The router next to a bare forwarder, in turn."""
    window_s = 0.5 if setting.is_small else WINDOW_S
    found: dict[int, tuple[list[float], list[float]]] = {1: ([], []), STREAMS: ([], [])}
    with routing() as router:
        sizes = {streams: router.paced_us(streams, 0.5)[1] for streams in found}
        for repeat in range(setting.runs(REPEATS)):
            for streams, (ours, bare) in found.items():
                await until_quiet(setting)
                if repeat % 2:
                    bare.append(forwarder_us(sizes[streams], window_s))
                ours.append(router.paced_us(streams, window_s)[0])
                if not repeat % 2:
                    bare.append(forwarder_us(sizes[streams], window_s))
    yield (
        "paced",
        {
            f"paced_{streams}": Found(
                values=[our / its for our, its in zip(ours, bare, strict=True)],
                sides={"mlxsup": ours, "forwarder": bare},
                unit="µs",
            )
            for streams, (ours, bare) in found.items()
        },
    )
