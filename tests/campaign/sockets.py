"""P17: hostile bytes at the decoder, the client socket and the workers' sockets."""

from __future__ import annotations

import random
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count as counting
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import psutil
import zmq

from mlxsup.client import Client
from mlxsup.protocol.client_messages import CLIENT_MESSAGES
from mlxsup.protocol.codec import MAX_FRAME_BYTES, MAX_HEADER_BYTES, DecodeError, Decoder
from mlxsup.protocol.folders import BEAT_SUFFIX

from .frames import ANYTHING, INVALID, KINDS, Hostile, changed_bytes, hostile, hostile_frames
from .instrument import STRANGER, Counters, Slot, setup
from .oracle import answer_of, wrongs
from .scenario import FAKE, Figure, Place, Scenario, Values, at_most, count
from .watch import require
from support.cli.scripted_daemon import ScriptedDaemon
from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, is_alive, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually
from support.outside import must_have_whole_logs, why_it_ended

MAX_PEAK_BYTES = 4 * MAX_HEADER_BYTES
"""Of what one message makes the decoder allocate."""

MAX_CALL_S = 0.1
"""CPU time of the longest message, and of the longest callback of the loop."""

MAX_RSS_MB = 34.0
"""Growth of the supervisor: a connection has at most two frames of 16 MiB read ahead."""

TRACED = 1_000
"""That many messages are decoded with every allocation traced, which takes several times longer."""

WINDOW = 64
"""Things said before the answer to a last ping is waited for: nothing else paces the client."""

WINDOWS = 8
"""Of one connection; in the last of them bytes were changed at random."""

PATIENCE_S = 60.0
MAX_PROBLEMS = 20
UNASKED = ("alive", "deltas", "notice", "event")
LONG = {"context_length": 10_000_000}


def decoded(wanted: int, seed: int, *, max_call_s: float = MAX_CALL_S) -> dict[str, float]:
    """Decode that many messages; each passes, or is refused with the right code."""
    dice, problems, seen = random.Random(seed), list[str](), Counter[str]()
    decoder, source = Decoder(CLIENT_MESSAGES, is_strict=True), hostile(dice)
    longest_s = peak = 0.0
    tracemalloc.start()
    try:
        while seen["messages"] < wanted and len(problems) < MAX_PROBLEMS:
            one = changed_bytes(dice) if dice.random() < 0.1 else next(source)
            due = one.answers[0] if one.answers else ""
            is_loose = one.kind in ("odd", "duplicate id") or due not in (INVALID, VERSION)
            for frames in one.messages:
                seen["messages"] += 1
                outcome, took_s, used = _decode(decoder, frames)
                longest_s, peak = max(longest_s, took_s), max(peak, used)
                seen["refused"] += outcome in (INVALID, VERSION)
                if outcome != due and not is_loose:
                    problems.append(f"{one.kind}: {outcome} instead of {due}")
                elif outcome not in ("decoded", INVALID, VERSION):
                    problems.append(f"{one.kind}: {outcome} came out of the decoder")
            if seen["messages"] >= TRACED and tracemalloc.is_tracing():
                tracemalloc.stop()
    finally:
        tracemalloc.stop()
    if longest_s > max_call_s:
        problems.append(f"a message took {longest_s:.3f} s")
    if peak > MAX_PEAK_BYTES:
        problems.append(f"{peak} bytes were allocated for one message")
    assert not problems, problems
    return {**seen, "longest": 1000 * longest_s, "peak": peak / 1024}


VERSION = "unsupported_version"


def _decode(decoder: Decoder[Any], frames: list[bytes]) -> tuple[str, float, float]:
    """Return the outcome, the CPU time and the bytes that were allocated."""
    before = 0
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
    start_s = time.thread_time()
    try:
        decoder.decode(frames)
        outcome = "decoded"
    except DecodeError as error:
        outcome = error.code.value
    except Exception as error:  # noqa: BLE001 - whatever else escapes is a finding
        outcome = repr(error)
    used = tracemalloc.get_traced_memory()[1] - before if tracemalloc.is_tracing() else 0
    return outcome, time.thread_time() - start_s, used


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


# ---------------------------------------------------------------- at workers' sockets


def stranger(dice: random.Random) -> list[bytes]:
    """Return what is not the worker's: noise, a HELLO without the token, messages of others."""
    hello = {"type": "hello", "model": "m", "generation": 1, "token": "guessed", "pid": 1}
    said = (
        hello | {"version": "0"},
        hello | {"version": "0", "generation": dice.choice((0, 2, 2**31)), "token": ""},
        hello,
        {"type": "dying", "code": 70, "message": "forged"},
        {"type": "step", "step": 1, "results": []},
        {"type": "rejected", "key": 1, "error": {}},
    )
    if dice.random() < 0.5:
        return [msgpack.packb(dice.choice(said))]
    while True:
        frames = hostile_frames(dice)
        # Another version ends a worker that has not said HELLO yet, whoever says it.
        if b"\xa1v" not in frames[0]:
            return frames


def worker_sockets(daemon: Daemon) -> list[Path]:
    """Return those of all workers that there are."""
    run = daemon.folder / "run"
    return sorted(path for path in run.glob("*.sock") if path.name != "client.sock")


def attack_workers(daemon: Daemon, counters: Counters, wanted: int, seed: int) -> None:
    """Send strangers' messages to serving workers' sockets, and beats where beats arrive."""
    dice = random.Random(seed)
    for path in worker_sockets(daemon):
        for kind, slot, to, mark in (
            (zmq.DEALER, Slot.STRANGERS, path, b""),
            (zmq.PUSH, Slot.BEATS, path.with_name(path.name + BEAT_SUFFIX), STRANGER),
        ):
            due = counters[slot] + wanted
            with zmq.Context() as context, context.socket(kind) as socket:
                socket.set(zmq.LINGER, 0)
                socket.set(zmq.SNDTIMEO, int(1000 * PATIENCE_S))
                if kind == zmq.DEALER:
                    socket.set(zmq.ROUTING_ID, STRANGER)
                socket.connect(f"ipc://{to}")
                for _ in range(wanted):
                    first, *rest = stranger(dice)
                    socket.send_multipart([first + mark] if mark else [first, *rest])
                eventually(lambda s=slot, n=due: counters[s] >= n, what=f"all at {to.name}")  # type: ignore[misc]


def attack_early(daemon: Daemon, client: Client, counters: Counters, seed: int) -> None:
    """Send a stranger's messages before a worker has said HELLO; it must load all the same."""
    dice, known = random.Random(seed), set(worker_sockets(daemon))
    for _ in range(20):
        generation = row(client, "late")["generation"]
        with zmq.Context() as context, daemon.client() as other:
            loading = other.generate("late", prompt="x", max_tokens=1)
            new = eventually(lambda: set(worker_sockets(daemon)) - known, timeout_s=PATIENCE_S)
            with context.socket(zmq.DEALER) as socket:
                socket.set(zmq.LINGER, 0)
                socket.set(zmq.ROUTING_ID, STRANGER)
                socket.connect(f"ipc://{new.pop()}")
                for _ in range(20):
                    socket.send_multipart(stranger(dice))
                list(loading)
        wait_for_state(client, "late", "READY")
        assert row(client, "late")["generation"] == generation + 1, "a stranger ended the worker"
        client.unload("late")
        if counters[Slot.EARLY]:
            return
    require(False, "no stranger was heard before a worker's HELLO")


def through_sockets(wanted: int, seed: int = 1, *, sabotage: str = "", strangers: int = 500,
                    max_call_s: float = MAX_CALL_S) -> dict[str, float]:  # fmt: skip
    """Attack a daemon until that many messages have arrived, while two streams are compared.

    Args:
        sabotage: Python that the supervisor runs first: the bugs that a test plants.

    Raises:
        AssertionError: the daemon ended, a stream was harmed, or an answer was not the one due.
        NotShown: a fault could not strike, the daemon was ended from outside, or a disk was full.
    """
    models = {"m": fake(fake={"step_s": 0.01, **LONG}), "n": fake(fake={"step_s": 0.002, **LONG}),
              "late": fake(preload=False)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        counters = Counters(Path(folder) / "counters")
        scripted = ScriptedDaemon(models, {"drain_timeout_s": 1.0})
        script = setup(Path(folder) / "counters") + sabotage
        daemon = stack.enter_context(scripted.scripted(script))
        client = stack.enter_context(daemon.client())
        for name in ("m", "n"):
            wait_for_state(client, name, "READY")
        assert daemon.process is not None
        attack = Attack(daemon.endpoint, psutil.Process(daemon.process.pid), seed)
        streams = {m: Reader(client, m, "beside", max_tokens=3_000_000).started() for m in "mn"}
        counters[Slot.LONGEST_CALL_NS] = 0
        try:
            attack.run(wanted)
            attack_workers(daemon, counters, strangers, seed)
            attack_early(daemon, client, counters, seed)
        except ConnectionError as error:
            raise why_it_ended(daemon) from error
        longest_s = counters[Slot.LONGEST_CALL_NS] / 1e9
        problems = attack.problems
        for model, stream in streams.items():
            stream.stream.cancel()
            answer = answer_of(stream)
            found = wrongs(answer, undisturbed("beside", len(answer.tokens)), may_be_cut=True)
            found += [f"{end} instead of cancelled" for end in answer.ends if end != "cancelled"]
            problems += [f"stream of {model}: {one}" for one in found]
        problems += [f"{m} was replaced" for m in ("m", "n") if row(client, m)["generation"] != 1]
        must_have_whole_logs(daemon)
    if longest_s > max_call_s:
        problems.append(f"a callback of the loop took {longest_s:.2f} s")
    if attack.peak_mb > MAX_RSS_MB:
        problems.append(f"RSS grew by {attack.peak_mb:.1f} MB at most")
    assert not problems, problems[:MAX_PROBLEMS]
    if missing := [kind for kind in KINDS if not attack.kinds[kind]]:
        require(False, f"never drawn: {missing}")
    return {"sent": attack.sent, "answered": attack.answered.total(),
            "strangers": counters[Slot.STRANGERS] + counters[Slot.BEATS],
            "early": counters[Slot.EARLY], "rss": attack.peak_mb, "call": 1000 * longest_s,
            "tokens": sum(len(stream.tokens) for stream in streams.values())}  # fmt: skip


def at_decoder(place: Place) -> Values:
    """P17: the decoder alone."""
    wanted = place.requests or place.size(1_000_000, small=5000)
    return decoded(wanted, place.seed, max_call_s=_limit(place))


def at_sockets(place: Place) -> Values:
    """P17: through the sockets of a daemon."""
    wanted, strangers = (
        place.requests or place.size(100_000, small=3000),
        place.size(500, small=100),
    )
    return through_sockets(wanted, place.seed, strangers=strangers, max_call_s=_limit(place))


def _limit(place: Place) -> float:
    """A short run may be slowed down tenfold by what else the machine does."""
    return 10 * MAX_CALL_S if place.is_small else MAX_CALL_S


SCENARIOS = (
    Scenario(name="decoder", promises="P17", where="in process", rounds=1, run=at_decoder, figures=(
        count("messages", "hostile messages at the decoder, decoded or refused as is due", None),
        count("refused", "the same: refused", None),
        Figure("longest", "the same: CPU time of the longest", "ms", at_most(1000 * MAX_CALL_S)),
        Figure("peak", "the same: allocated for one at most", "KiB",
               at_most(MAX_PEAK_BYTES / 1024)))),
    Scenario(name="sockets", promises="P17", where=FAKE, rounds=1, run=at_sockets, figures=(
        count("sent", "hostile messages through the client socket, each answered as is due, two"
              " streams beside them whole", None),
        count("strangers", "the same: at the workers' sockets", None),
        count("early", "the same: of strangers before a worker's HELLO", None),
        Figure("call", "the same: CPU time of the longest callback of the loop", "ms",
               at_most(1000 * MAX_CALL_S)),
        Figure("rss", "the same: supervisor RSS more at most", "MB", at_most(MAX_RSS_MB)))),
)  # fmt: skip
