"""Hostile bytes through the client socket of a daemon, whose streams must not notice."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgpack
import psutil
import zmq

from mlxsup.client import Client
from mlxsup.protocol.codec import MAX_FRAME_BYTES

from .figures import TARGET_CALL_S, SocketFigures
from .frames import ANYTHING, Hostile, changed_bytes, hostile
from .instrument import MARK, Counters, Slot, setup
from .watching import PingLoop, RawStream
from .worker_sockets import fuzz_beats, fuzz_early, fuzz_workers
from support.daemon import Daemon, fake, is_alive, row, wait_for_state
from support.outside import must_have_whole_logs, why_it_ended
from support.raw_client import RawClient
from support.scripted_daemon import ScriptedDaemon

WINDOW = 64
"""Things said before an answer to a last ping is waited for: nothing paces the client but that."""

WINDOWS = 8
"""Of one connection."""

PATIENCE_S = 60.0
LOOK_MS = 1000
OVERSIZED_FRAMES = 5
MAX_PROBLEMS = 20
MODELS = {
    "m": fake(fake={"step_s": 0.01, "context_length": 10_000_000}),
    "n": fake(fake={"step_s": 0.002, "context_length": 10_000_000}),
    "late": fake(preload=False),
}
UNASKED = ("alive", "deltas", "notice", "event")


def fuzz_socket(
    wanted: int,
    seed: int,
    *,
    folder: Path,
    max_call_s: float = TARGET_CALL_S,
    sabotage: str = "",
    workers: int = 500,
) -> SocketFigures:
    """Hostile messages until that many have arrived at the supervisor (fake engine).

    Args:
        wanted: messages that must arrive through the client socket.
        folder: for the file of the counters.
        max_call_s: bound of the CPU time of a callback of the supervisor's loop.
        sabotage: Python that the supervisor runs first: the bugs that a test plants.
        workers: messages for each worker's socket.

    Raises:
        AssertionError: the daemon ended, or its log says what it must not.
        NotShown: a fault could not strike, the daemon was ended from outside, or a disk was full.
    """
    counters = Counters.create(folder / "counters")
    script = setup(folder / "counters") + sabotage
    with (
        ScriptedDaemon(MODELS, {"drain_timeout_s": 1.0}).scripted(script) as daemon,
        daemon.client() as client,
    ):
        for name in ("m", "n"):
            wait_for_state(client, name, "READY")
        assert daemon.process is not None
        campaign = Campaign(daemon.endpoint, psutil.Process(daemon.process.pid), counters, seed)
        figures = campaign.figures
        with ExitStack() as until_the_end:
            pings = until_the_end.enter_context(PingLoop(daemon.endpoint))
            streams = [
                until_the_end.enter_context(RawStream(daemon.endpoint, model, f"stream of {model}"))
                for model in ("m", "n")
            ]
            counters[Slot.LONGEST_CALL_NS] = 0
            pings.begin()
            try:
                campaign.run(wanted)
                campaign.run_at_workers(daemon, client, workers)
            except ConnectionError as error:
                raise why_it_ended(daemon) from error
            for stream in streams:
                figures.tokens += stream.judged(figures.problems)
        for name in ("m", "n"):
            if row(client, name)["generation"] != 1:
                figures.problems.append(f"{name} was replaced")
        must_have_whole_logs(daemon)
        figures.longest_call_s = counters[Slot.LONGEST_CALL_NS] / 1e9
        figures.longest_ping_s, figures.calm_ping_s = pings.longest_s, pings.calm_s
    figures.judge(wanted, max_call_s)
    return figures


@dataclass(slots=True)
class Window:
    """What one window of a connection expects, and what has come.

    Attributes:
        expected: answers that must come, by id and outcome.
        is_loose: whether any answer will do, none too.
        unanswered: messages of a loose window for which nothing has come.
    """

    barrier: str
    expected: Counter[tuple[str, str]] = field(default_factory=Counter)
    is_loose: bool = False
    unanswered: int = 0
    is_over: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the last ping was answered, and all that must come has come."""
        return self.is_over and not self.expected


class Campaign:
    """Says hostile things, window by window, and holds each answer against what must come.

    Args:
        endpoint: of the daemon.
        supervisor: whose memory is watched.
        counters: of what arrives there.
        seed: of what is said.
    """

    def __init__(
        self, endpoint: str, supervisor: psutil.Process, counters: Counters, seed: int
    ) -> None:
        self._endpoint = endpoint
        self._supervisor = supervisor
        self._counters = counters
        self._seed = seed
        self._dice = random.Random(seed)
        self._numbers = count()
        self._source = hostile(self._dice, self._numbers)
        self._changed = (changed_bytes(self._dice) for _ in count())
        self._before_bytes = supervisor.memory_info().rss
        self.figures = SocketFigures()

    def run(self, wanted: int) -> None:
        """Until that many have arrived; each way of connecting comes at least once."""
        for _ in range(OVERSIZED_FRAMES):
            self._send_oversized()
        self._speak_under_own_id()
        while self._counters[Slot.ARRIVED] < wanted and len(self.figures.problems) < MAX_PROBLEMS:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.set(zmq.LINGER, 0)
                self._open(socket)
                for number in range(WINDOWS):
                    is_loose = number == WINDOWS - 1
                    source = self._changed if is_loose else self._source
                    self._say_window(socket, list(islice(source, WINDOW)))
        self.figures.arrived = self._counters[Slot.ARRIVED]

    def run_at_workers(self, daemon: Daemon, client: Client, count: int) -> None:
        """This many at each worker's sockets, and some before a worker has said HELLO."""
        figures, counters, seed = self.figures, self._counters, self._seed
        figures.strangers = fuzz_workers(daemon, counters, count, seed)
        figures.beats = fuzz_beats(daemon, counters, count, seed)
        figures.early = fuzz_early(daemon, client, counters, seed)

    # ------------------------------------------------------------ ways of connecting

    def _open(self, socket: zmq.Socket[bytes]) -> None:
        socket.connect(self._endpoint)
        self._send(socket, [msgpack.packb({"type": "ping", "id": MARK.decode()})], "mark")
        self.figures.answered["reply"] += 1
        assert socket.poll(int(1000 * PATIENCE_S)), "the daemon does not answer"
        socket.recv_multipart()

    def _speak_under_own_id(self) -> None:
        """A routing id that the client has set: everything is refused, the mark too."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.ROUTING_ID, b"chosen by me")
            self._open(socket)
            self.figures.answered["reply"] -= 1
            self.figures.answered["invalid_request"] += 1
            pings = [
                Hostile(
                    kind="own routing id",
                    messages=([msgpack.packb({"type": "ping", "id": f"own {n}"})],),
                    id=f"own {n}",
                )
                for n in range(WINDOW)
            ]
            self._say_window(socket, pings, barrier="invalid_request")

    def _send_oversized(self) -> None:
        """A frame beyond what a socket accepts: its connection ends, and nothing else."""
        with RawClient(self._endpoint) as client:
            client.say([bytes(MAX_FRAME_BYTES + 1)])
            self.figures.sent += 1
            self.figures.kinds["oversized frame"] += 1
            if client.monitor.poll(int(1000 * PATIENCE_S)):
                self.figures.dropped["its frame was over the limit: connection ended"] += 1
            else:
                self.figures.problems.append("an oversized frame did not end its connection")
        self._look_at_memory()

    # ------------------------------------------------------------ one window

    def _say_window(
        self, socket: zmq.Socket[bytes], things: list[Hostile], barrier: str = "reply"
    ) -> None:
        window = Window(barrier=f"last of {next(self._numbers)}")
        for thing in things:
            for frames in thing.messages:
                self._send(socket, frames, thing.kind)
            if thing.answers == (ANYTHING,):
                window.is_loose = True
                window.unanswered += 1
            elif not thing.answers:
                self.figures.dropped["a cancel of nothing: no answer is due"] += 1
            else:
                window.expected.update((thing.id, answer) for answer in thing.answers)
        window.expected[window.barrier, barrier] += 1
        ping = {"type": "ping", "id": window.barrier}
        self._send(socket, [msgpack.packb(ping)], "last ping")
        until = time.monotonic() + PATIENCE_S
        while not window.is_complete and time.monotonic() < until:
            if socket.poll(LOOK_MS):
                self._hear(window, msgpack.unpackb(socket.recv_multipart()[0]))
            if not is_alive(self._supervisor):
                raise ConnectionResetError("the daemon ended")
        if window.unanswered:
            self.figures.dropped["changed into a message that has no answer"] += window.unanswered
        for id, outcome in islice(window.expected, 3):
            self.figures.problems.append(f"{outcome} for {id[:60]!r} never came")
        self._look_at_memory()

    def _hear(self, window: Window, message: dict[str, Any]) -> None:
        if message["type"] in UNASKED:
            return
        outcome = outcome_of(message)
        self.figures.answered[outcome] += 1
        found = (message["id"], outcome)
        window.is_over = window.is_over or message["id"] == window.barrier
        if window.expected[found] > 0:
            window.expected[found] -= 1
        elif window.is_loose and window.unanswered:
            window.unanswered -= 1
        else:
            self.figures.problems.append(f"{outcome} for {message['id'][:60]!r} was not expected")
        if window.is_over:  # answers to what has no id come in the order of the messages
            unanswered = [one for one, n in window.expected.items() if n and not one[0]]
            for _, missing in unanswered:
                self.figures.problems.append(f"{missing} for a message without an id never came")
                window.expected.pop(("", missing))
        window.expected += Counter()  # drops what is at 0

    def _send(self, socket: zmq.Socket[bytes], frames: list[bytes], kind: str) -> None:
        socket.send_multipart(frames)
        self.figures.sent += 1
        self.figures.kinds[kind] += 1

    def _look_at_memory(self) -> None:
        grown = self._supervisor.memory_info().rss - self._before_bytes
        self.figures.peak_bytes = max(self.figures.peak_bytes, grown)
        self.figures.grown_bytes = grown


def outcome_of(message: dict[str, Any]) -> str:
    """In a word or two: the code of an error, `reply`, or `done` and the reason."""
    if message["type"] == "failed":
        return str(message["error"]["code"])
    if message["type"] == "done":
        return f"done {message['finish_reason']}"
    return str(message["type"])
