"""P17: hostile bytes at the client socket."""

from __future__ import annotations

import random
import select
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count as counting
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import psutil
import zmq

from mlxsup.protocol.client_messages import (
    Cancel,
    Generate,
    Ping,
    Reload,
    StatusQuery,
    Subscribe,
)
from mlxsup.protocol.codec import MAX_BODY_BYTES, MAX_FRAME_BYTES, encode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.supervisor.sockets.clients import MAX_LARGE_BYTES
from mlxsup.supervisor.sockets.zmtp import GREETING

from .oracle import answer_of, wrongs
from .scenario import FAKE, Figure, Place, Scenario, Values, at_most, count, require
from support.bad.input import FRAMES, HEADERS, VALUES, WRONG_FIELDS, BadInput
from support.cli.scripted_daemon import ScriptedDaemon
from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.client.zmtp import READY
from support.daemon.daemon import fake, is_alive, row, wait_for_state
from support.daemon.faults import undisturbed

HARMLESS: tuple[Message, ...] = (
    Generate(id=RequestId("x"), model=ModelName("no such model"), body=b"\x80"),
    Cancel(id=RequestId("x")),
    Ping(id=RequestId("p")),
    StatusQuery(id=RequestId("s")),
    Subscribe(id=RequestId("e")),
    Reload(id=RequestId("r")),
)
INVALID = "invalid_request"
ANYTHING = "anything"
"""Only bytes that were changed at random may be answered by whatever they happen to say."""

HELLO = GREETING + READY
pack = msgpack.packb


@dataclass(frozen=True, slots=True)
class Hostile:
    """One thing that a hostile client says.

    Attributes:
        kind: which of `KINDS`.
        messages: the frames of each message, in order.
        id: what the answers will carry; empty if the id cannot be read.
        answers: the code of each error, `reply`, or `done` and the reason.
    """

    kind: str
    messages: tuple[list[bytes], ...]
    id: str = ""
    answers: tuple[str, ...] = (INVALID,)


Dice = random.Random
Said = tuple[tuple[list[bytes], ...], str, tuple[str, ...]]
"""The messages, the id that can be read, and the answers."""

MOST_DRAWN_BYTES = 2**20
TABLES = {"frames": FRAMES, "headers": HEADERS, "fields": WRONG_FIELDS, "values": VALUES}
"""Of the bad input that every daemon is sent, what needs no model of its own."""


def _from(table: Sequence[BadInput]) -> Callable[[Dice, str], Said]:
    cases = [one for one in table if sum(map(len, one.sends[-1])) < MOST_DRAWN_BYTES]

    def draw(dice: Dice, id: str) -> Said:
        case = dice.choice(cases)
        return case.sends, case.id, (case.code.value,)

    return draw


def _garbage(dice: Dice, id: str) -> Said:
    frames = [dice.randbytes(dice.randrange(200)) for _ in range(dice.randint(1, 4))]
    return (frames,), "", (INVALID,)


def _truncated(dice: Dice, id: str) -> Said:
    first, *rest = encode(dice.choice(HARMLESS))
    return ([first[: dice.randrange(len(first))], *rest],), "", (INVALID,)


def _changed(dice: Dice, id: str) -> Said:
    first, *rest = encode(dice.choice(HARMLESS))
    damaged = bytearray(first)
    for _ in range(dice.randint(1, 4)):
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
    return ([bytes(damaged), *rest],), "", (ANYTHING,)


def _request(id: str, **body: Any) -> list[bytes]:
    header = {"type": "generate", "id": id, "model": "m"}
    return [pack(header), pack({"max_tokens": 1} | body)]


LARGE_BODY = bytes(MAX_BODY_BYTES + 1)


def _oversized_body(dice: Dice, id: str) -> Said:
    return ([_request(id)[0], LARGE_BODY],), id, (INVALID,)


def _duplicate(dice: Dice, id: str) -> Said:
    asked, cancel = (
        _request(id, prompt="twice", max_tokens=1_000_000),
        encode(Cancel(id=RequestId(id))),
    )
    return (asked, asked, cancel), id, ("duplicate_id", "done cancelled")


def _unknown_id(dice: Dice, id: str) -> Said:
    """Cancel what is not there; it may have overtaken its request, so nothing answers it."""
    return (encode(Cancel(id=RequestId(id))),), id, ()


def _odd(dice: Dice, id: str) -> Said:
    """Say what the decoder lets pass, as it must: odd, but a message."""
    if dice.random() < 0.5:
        id = (id + "\x00é\U0001f600" + "x" * 128)[:128]
    prompt = dice.choice(("odd", "\x00" * 50, "\ud7ff" * 50, "\u202e\u202e", " " * 2000))
    return (_request(id, prompt=prompt),), id, ("done length",)


MAKERS: dict[str, tuple[Callable[[Dice, str], Said], int]] = {
    **{name: (_from(table), 200) for name, table in TABLES.items()},
    "garbage": (_garbage, 100),
    "truncated": (_truncated, 100),
    "duplicate id": (_duplicate, 20),
    "unknown id": (_unknown_id, 50),
    "odd": (_odd, 100),
    "oversized body": (_oversized_body, 1),
}
"""What may stand in one window with others, and how often it is drawn."""

KINDS = (*MAKERS, "changed bytes")


def hostile(dice: Dice, sequence: Iterator[int] | None = None) -> Iterator[Hostile]:
    """Draw without end: one of each kind first, then by weight; ids carry numbers in sequence."""
    numbers = counting() if sequence is None else sequence
    for kind in MAKERS:
        yield Hostile(kind, *MAKERS[kind][0](dice, f"{kind} {next(numbers)}"))
    kinds, weights = [*MAKERS], [weight for _, weight in MAKERS.values()]
    while True:
        (kind,) = dice.choices(kinds, weights)
        yield Hostile(kind, *MAKERS[kind][0](dice, f"hostile {next(numbers)}"))


def changed_bytes(dice: Dice) -> Hostile:
    """Return a message of which some bytes were changed; it may still be one."""
    return Hostile("changed bytes", *_changed(dice, ""))


HARMFUL = (_garbage, _truncated, _changed, _from(FRAMES), _from(WRONG_FIELDS))


def hostile_frames(dice: Dice) -> list[bytes]:
    """Return one multipart message that is no request."""
    return dice.choice(HARMFUL)(dice, "x")[0][0]


MAX_CALL_S = 0.1
"""CPU time of the longest callback of the loop."""

MAX_RSS_MB = 165.0
"""Growth of the supervisor: 127 MB were measured, for 120 MiB of messages that are read at once."""

UNFINISHED = 24
CHUNK_BYTES = 256 * 1024
UNREAD_S = 1.0
"""After this time without room in any socket the daemon reads none of them."""

WINDOW = 64
"""Things said before the answer to a last ping is waited for: nothing else paces the client."""

WINDOWS = 8
"""Of one connection; in the last of them bytes were changed at random."""

PATIENCE_S = 60.0
MAX_PROBLEMS = 20
UNASKED = ("alive", "deltas", "notice", "event")
LONG = {"context_length": 10_000_000}


# ---------------------------------------------------------------- through the sockets


class Attack:
    """Says hostile things, window by window, and holds each answer against what must come."""

    def __init__(self, endpoint: str, main: psutil.Process, seed: int) -> None:
        self._endpoint, self._main = endpoint, main
        self._dice, self._numbers = random.Random(seed), counting()
        self._source = hostile(self._dice, self._numbers)
        self._changed = (changed_bytes(self._dice) for _ in self._numbers)
        self._before = main.memory_info().rss
        self.sent = 0
        self.kinds, self.answered = Counter[str](), Counter[str]()
        self.peak_mb = 0.0
        self.problems: list[str] = []

    def run(self, wanted: int) -> None:
        """Attack until that many were sent and answered; each way of connecting comes once."""
        self._send_oversized()
        self._send_unfinished()
        with self._connection(b"chosen by me") as socket:
            pings = [msgpack.packb({"type": "ping", "id": f"own {n}"}) for n in range(WINDOW)]
            own = [Hostile("own routing id", ([p],), f"own {n}") for n, p in enumerate(pings)]
            self._say(socket, own, barrier=INVALID)
        while self.sent < wanted and len(self.problems) < MAX_PROBLEMS:
            with self._connection() as socket:
                for number in range(WINDOWS):
                    is_loose = number == WINDOWS - 1
                    self._say(
                        socket, list(islice(self._changed if is_loose else self._source, WINDOW))
                    )

    @contextmanager
    def _connection(self, own_id: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
        """A connection; under an id of its own every message is refused."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            if own_id:
                socket.set(zmq.ROUTING_ID, own_id)
            socket.connect(self._endpoint)
            yield socket

    def _send_oversized(self) -> None:
        """A frame beyond what a socket accepts ends its connection, and nothing else."""
        for _ in range(3):
            with RawClient(self._endpoint) as client:
                client.say([bytes(MAX_FRAME_BYTES + 1)])
                if not client.monitor.poll(int(1000 * PATIENCE_S)):
                    self.problems.append("an oversized frame did not end its connection")
            self._look_at_memory()

    def _send_unfinished(self) -> None:
        """Messages of the largest size that lack a byte: as many as are read at once, and more."""
        start = HELLO + b"\x02" + MAX_FRAME_BYTES.to_bytes(8, "big")
        at_once, filler = MAX_LARGE_BYTES // MAX_FRAME_BYTES, bytes(MAX_FRAME_BYTES - 1)
        with ExitStack() as stack:
            left = {}
            for _ in range(UNFINISHED):
                peer = stack.enter_context(socket.socket(socket.AF_UNIX))
                peer.connect(self._endpoint.removeprefix("ipc://"))
                peer.sendall(start)
                peer.setblocking(False)
                left[peer] = memoryview(filler)
            while writable := select.select([], list(left), [], UNREAD_S)[1]:
                for peer in writable:
                    left[peer] = left[peer][peer.send(left[peer][:CHUNK_BYTES]) :]
                    if not left[peer]:
                        del left[peer]
                self._look_at_memory()
            read = UNFINISHED - len(left)
            require(read >= at_once, f"{read} of {at_once} large messages were read at once")
        if read > at_once:
            self.problems.append(f"{read} large messages were read at once, and not {at_once}")

    def _say(
        self, socket: zmq.Socket[bytes], things: list[Hostile], barrier: str = "reply"
    ) -> None:
        """Say all of it and a last ping; answers to what has no id come in order."""
        last, expected, loose = f"last of {next(self._numbers)}", Counter[tuple[str, str]](), 0
        for thing in things:
            self.kinds[thing.kind] += 1
            for frames in thing.messages:
                self._send(socket, frames)
            if thing.answers == (ANYTHING,):
                loose += 1
            else:
                expected.update((thing.id, answer) for answer in thing.answers)
        expected[last, barrier] += 1
        self._send(socket, [msgpack.packb({"type": "ping", "id": last})])
        is_over, until = False, time.monotonic() + PATIENCE_S
        while (not is_over or +expected) and time.monotonic() < until:
            if not is_alive(self._main):
                raise ConnectionResetError("the daemon ended")
            if not socket.poll(1000):
                continue
            message = msgpack.unpackb(socket.recv_multipart()[0])
            if message["type"] in UNASKED:
                continue
            found = (message["id"], outcome_of(message))
            self.answered[found[1]] += 1
            is_over = is_over or message["id"] == last
            if expected[found] > 0:
                expected[found] -= 1
            elif loose:
                loose -= 1
            else:
                self.problems.append(f"{found[1]} for {found[0][:60]!r} was not expected")
            if is_over:
                for id, outcome in [one for one, n in expected.items() if n and not one[0]]:
                    self.problems.append(f"{outcome} for a message without an id never came")
                    del expected[id, outcome]
        for id, outcome in islice(+expected, 3):
            self.problems.append(f"{outcome} for {id[:60]!r} never came")
        self._look_at_memory()

    def _send(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        socket.send_multipart(frames)
        self.sent += 1

    def _look_at_memory(self) -> None:
        self.peak_mb = max(self.peak_mb, (self._main.memory_info().rss - self._before) / 1e6)


def outcome_of(message: dict[str, Any]) -> str:
    """Return the code of an error, `reply`, or `done` and the reason."""
    if message["type"] == "failed":
        return str(message["error"]["code"])
    return f"done {message['finish_reason']}" if message["type"] == "done" else message["type"]


TIMED = """
import asyncio, mmap, time
with open({file!r}, "r+b") as file:
    longest_ns = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
call = asyncio.Handle._run
def timed(handle):
    start_ns = time.thread_time_ns()
    try:
        call(handle)
    finally:
        longest_ns[0] = max(longest_ns[0], time.thread_time_ns() - start_ns)
asyncio.Handle._run = timed
"""
"""Python that a supervisor runs first: a file holds the CPU time of its loop's longest callback."""


def through_sockets(
    wanted: int, seed: int = 1, *, max_call_s: float = MAX_CALL_S
) -> dict[str, float]:
    """Attack a daemon until that many messages have arrived, while two streams are compared.

    Raises:
        AssertionError: the daemon ended, a stream was harmed, or an answer was not the one due.
        NotShown: a fault could not strike, the daemon was ended from outside, or a disk was full.
    """
    models = {"m": fake(fake={"step_s": 0.01, **LONG}), "n": fake(fake={"step_s": 0.002, **LONG})}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        longest_ns = Path(folder) / "longest_ns"
        longest_ns.write_bytes(bytes(8))
        scripted = ScriptedDaemon(models, {"drain_timeout_s": 1.0})
        script = TIMED.format(file=str(longest_ns))
        daemon = stack.enter_context(scripted.scripted(script))
        client = stack.enter_context(daemon.client())
        for name in ("m", "n"):
            wait_for_state(client, name, "READY")
        assert daemon.process is not None
        attack = Attack(daemon.endpoint, psutil.Process(daemon.process.pid), seed)
        streams = {m: Reader(client, m, "beside", max_tokens=3_000_000).started() for m in "mn"}
        with longest_ns.open("r+b") as file:  # of the start
            file.write(bytes(8))
        attack.run(wanted)
        longest_s = int.from_bytes(longest_ns.read_bytes(), sys.byteorder) / 1e9
        problems = attack.problems
        for model, stream in streams.items():
            stream.stream.cancel()
            answer = answer_of(stream)
            found = wrongs(answer, undisturbed("beside", len(answer.tokens)), may_be_cut=True)
            found += [f"{end} instead of cancelled" for end in answer.ends if end != "cancelled"]
            problems += [f"stream of {model}: {one}" for one in found]
        problems += [f"{m} was replaced" for m in ("m", "n") if row(client, m)["generation"] != 1]
    if longest_s > max_call_s:
        problems.append(f"a callback of the loop took {longest_s:.2f} s")
    if attack.peak_mb > MAX_RSS_MB:
        problems.append(f"RSS grew by {attack.peak_mb:.1f} MB at most")
    assert not problems, problems[:MAX_PROBLEMS]
    if missing := [kind for kind in KINDS if not attack.kinds[kind]]:
        require(False, f"never drawn: {missing}")
    return {"sent": attack.sent, "answered": attack.answered.total(),
            "rss": attack.peak_mb, "call": 1000 * longest_s,
            "tokens": sum(len(stream.tokens) for stream in streams.values())}  # fmt: skip


def at_sockets(place: Place) -> Values:
    """P17: through the sockets of a daemon."""
    wanted = place.requests or place.size(100_000, small=3000)
    return through_sockets(wanted, place.seed, max_call_s=_limit(place))


def _limit(place: Place) -> float:
    """A short run may be slowed down tenfold by what else the machine does."""
    return 10 * MAX_CALL_S if place.is_small else MAX_CALL_S


HOSTILE = (
    Scenario("sockets", "P17", FAKE, 1, at_sockets, (
        count("sent", "hostile messages through the client socket, each answered as is due, two"
              " streams beside them whole", None),
        Figure("call", "the same: CPU time of the longest callback of the loop", "ms",
               at_most(1000 * MAX_CALL_S)),
        Figure("rss", "the same: supervisor RSS more at most", "MB", at_most(MAX_RSS_MB)))),
)  # fmt: skip
