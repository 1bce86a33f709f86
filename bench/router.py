"""What the router costs, by the clock of its own thread: the supervisor's first.

*Unpaced*: the supervisor is stopped while the worker makes a few steps. Then the worker is stopped
and the supervisor continues: it is woken once, and works off what was left without waiting again,
for clients that only receive. A backlog of one step costs the same wake-up, so what a long one
costs more is the cost of its further steps. *Paced*: an engine whose steps take 5 ms.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mlxsup.client import Client

from .report import NotMeasured, print_table, spread, thread_ns
from support.daemon.child import Child
from support.daemon.daemon import Daemon, fake, row
from support.eventually import eventually

MODEL = "fake"
STREAMS = 16
KINDS = {
    "a token of 16 streams over one connection": 1,
    "a token of 16 streams over 16 connections": STREAMS,
}
"""Connections of each row about an unpaced router."""

PACED = {"a step of one stream, paced": 1, "a step of 16 streams, paced": STREAMS}

BACKLOGS = 24
LONG, SHORT = 8, 1
"""Steps of a backlog. Eight messages find room for each connection even if its client receives
none of them: the kernel takes more."""

STEP_S = 0.005
WINDOW_S = 3.0
CONTEXT = 3_000_000


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


@contextmanager
def drained(endpoint: str, connections: int, streams: int) -> Iterator[Child]:
    """Streams for somebody who only receives, and has received something on each connection.

    Args:
        endpoint: to connect to.
        connections: over which they come.
        streams: how many.
    """
    with Child("-m", "bench.drain", endpoint, MODEL, connections, streams) as child:
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
    def streams(self, connections: int, streams: int) -> Iterator[Child]:
        """See `drained`; every stream decodes, and nothing of earlier ones is left."""
        eventually(lambda: not row(self._client, MODEL)["running"])
        with drained(self.endpoint, connections, streams) as child:
            eventually(lambda: len(row(self._client, MODEL)["running"]) == streams)
            steps = self.steps()
            eventually(lambda: self.steps() > steps + 2 * streams)  # all prompts are read
            yield child

    def steps(self) -> int:
        """Return the number of steps that the worker has reported to the supervisor."""
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

    def paced_us(self, streams: int, window_s: float) -> float:
        """Return the processor time per step in µs."""
        with self.streams(1, streams):
            steps, spent_ns = self.steps(), thread_ns(self.pid)
            time.sleep(window_s)
            spent_ns = thread_ns(self.pid) - spent_ns
            steps = self.steps() - steps
        return spent_ns / 1000 / steps


@contextmanager
def routing() -> Iterator[Router]:
    """Start a daemon whose engine takes `STEP_S` for each step."""
    options = {"context_length": CONTEXT, "step_s": STEP_S}
    entry = fake(max_concurrency=STREAMS, fake=options)
    with Daemon({MODEL: entry}) as daemon, daemon.client() as client:
        client.load(MODEL)
        yield Router(daemon, client)


# ---------------------------------------------------------------- the rows


Pair = tuple[Backlog, Backlog]
"""A long backlog and a short one, after one another."""


def whole(found: Sequence[Pair], connections: int) -> list[Pair]:
    """Return the pairs in which the clients got one message for each step and connection.

    Pieces of several steps in one message would be cheaper.

    Raises:
        NotMeasured: there is none.
    """
    unmerged = [
        pair
        for pair in found
        if all(0 < one.steps * connections == one.messages for one in pair)
        and pair[0].steps > pair[1].steps
    ]
    if not unmerged:
        raise NotMeasured(f"none of {len(found)} pairs of backlogs had steps that were not merged")
    return unmerged


def us_per_token(found: Sequence[Pair]) -> float:
    """Processor time of the supervisor's own thread for each further token, over all pairs."""
    steps = sum(long.steps - short.steps for long, short in found)
    return sum(long.spent_ns - short.spent_ns for long, short in found) / 1000 / steps / STREAMS


def run(repeats: int) -> None:
    """Measure and print."""
    values: dict[str, list[float]] = {kind: [] for kind in (*KINDS, *PACED)}
    with routing() as router:
        for _ in range(repeats):
            for kind, connections in KINDS.items():
                with router.streams(connections, STREAMS) as child:
                    router.backlog(child, LONG)  # the first one warms up
                    found = [
                        (router.backlog(child, LONG), router.backlog(child, SHORT))
                        for _ in range(BACKLOGS)
                    ]
                values[kind].append(us_per_token(whole(found, connections)))
            for kind, streams in PACED.items():
                values[kind].append(router.paced_us(streams, WINDOW_S))
    print("## Processor time of the supervisor's own thread (fake engine)\n")
    print(f"{repeats} rounds; µs, median (range)\n")
    print_table(["what", "µs"], [[kind, spread(found, "", 1)] for kind, found in values.items()])
