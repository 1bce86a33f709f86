"""What the router costs, by the clock of its own thread: the supervisor's first.

*Unpaced*: the supervisor is stopped while the worker steps, until nobody takes what it sends. Then
the worker is stopped and the supervisor continues: it works off what was left, as fast as it can
and without waiting once, for clients that only receive. *Paced*: an engine whose steps take 5 ms,
next to a forwarder that does nothing but pass on messages of the same size.
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
BACKLOGS = 20
STEP_S = 0.005
WINDOW_S = 3.0
CONTEXT = 10_000_000
LEFT, USED = "steps left each time", f"backlogs used, of {BACKLOGS}"


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

    def backlog(self, child: Child) -> Backlog:
        """Has the supervisor work off what it was left for the streams of a client."""
        try:
            os.kill(self.worker, signal.SIGSTOP)
            until_still(self.pid)
            until_still(child.pid)
            steps, messages = self.steps(), child.ask()["messages"]
            until_still(self.pid)
            os.kill(self.pid, signal.SIGSTOP)
            spent_ns = thread_ns(self.pid)
            begun_ns = thread_ns(self.worker)
            os.kill(self.worker, signal.SIGCONT)
            until_still(self.worker, begun_ns)
            os.kill(self.worker, signal.SIGSTOP)
            os.kill(self.pid, signal.SIGCONT)
            until_still(self.pid, spent_ns)
            spent_ns = thread_ns(self.pid) - spent_ns
            until_still(child.pid)
            return Backlog(
                spent_ns=spent_ns,
                steps=self.steps() - steps,
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
def routing(step_s: float) -> Iterator[Router]:
    """A daemon whose engine takes that long for each step."""
    options = {"context_length": CONTEXT, "step_s": step_s}
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


def whole(found: Sequence[Backlog], connections: int) -> list[Backlog]:
    """Those of which the clients got one message for each step and connection.

    A client that does not keep up gets pieces of several steps in one message, which is cheaper.

    Raises:
        NotShown: there is none.
    """
    kept_up = [one for one in found if one.messages >= one.steps * connections]
    if not kept_up:
        raise NotShown(f"the clients did not keep up with any of {len(found)} backlogs")
    return kept_up


def us_per_token(found: Sequence[Backlog]) -> float:
    """Processor time of the supervisor's own thread, over all backlogs."""
    steps = sum(one.steps for one in found)
    return sum(one.spent_ns for one in found) / 1000 / steps / STREAMS


async def unpaced(setting: Setting, wanted: Sequence[str]) -> Rows:
    """The router alone, working off what was left for it."""
    values: dict[str, list[float]] = {claim: [] for claim in KINDS}
    sides: dict[str, dict[str, list[float]]] = {claim: {LEFT: [], USED: []} for claim in KINDS}
    with routing(0.0) as router:
        for _ in range(setting.runs(REPEATS)):
            for claim, (connections, top_logprobs) in KINDS.items():
                await until_quiet(setting)
                with router.streams(connections, STREAMS, top_logprobs) as child:
                    router.backlog(child)  # the first one warms up
                    found = [router.backlog(child) for _ in range(setting.runs(BACKLOGS))]
                used = found if setting.is_small else whole(found, connections)
                values[claim].append(us_per_token(used))
                sides[claim][LEFT].append(sum(one.steps for one in used) / len(used))
                sides[claim][USED].append(len(used))
    yield "router", {claim: Found(values=values[claim], sides=sides[claim]) for claim in KINDS}


async def paced(setting: Setting, wanted: Sequence[str]) -> Rows:
    """The router next to a bare forwarder, in turn."""
    window_s = 0.5 if setting.is_small else WINDOW_S
    found: dict[int, tuple[list[float], list[float]]] = {1: ([], []), STREAMS: ([], [])}
    with routing(STEP_S) as router:
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
