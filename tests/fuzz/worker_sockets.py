"""Hostile bytes at the sockets that the supervisor keeps for its workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgpack
import zmq

from mlxsup.client import Client
from mlxsup.protocol.folders import BEAT_SUFFIX

from .frames import hostile_frames
from .instrument import MARK, Counters, Slot
from support.daemon import Daemon, row, wait_for_state
from support.eventually import eventually
from support.verdict import NotShown

ATTEMPTS = 20
PATIENCE_S = 60.0


def fuzz_workers(daemon: Daemon, counters: Counters, count: int, seed: int) -> int:
    """Strangers at the sockets of serving workers; returns how many messages arrived."""
    dice, before = random.Random(seed), counters[Slot.STRANGERS]
    for path in worker_sockets(daemon):
        before += count
        messages = [stranger(dice) for _ in range(count)]
        _send(path, zmq.DEALER, messages, partial(counters.has, Slot.STRANGERS, before))
    return counters[Slot.STRANGERS]


def fuzz_beats(daemon: Daemon, counters: Counters, count: int, seed: int) -> int:
    """The same where heartbeats arrive; nothing but a beat is a beat."""
    dice, before = random.Random(seed), counters[Slot.BEATS]
    for path in worker_sockets(daemon):
        before += count
        beats = [[stranger(dice)[0] + MARK] for _ in range(count)]
        socket = path.with_name(path.name + BEAT_SUFFIX)
        _send(socket, zmq.PUSH, beats, partial(counters.has, Slot.BEATS, before))
    return counters[Slot.BEATS]


def fuzz_early(daemon: Daemon, client: Client, counters: Counters, seed: int) -> int:
    """Strangers before a worker has said HELLO, who claim to be it; it must load all the same.

    Returns:
        How many messages came before HELLO.

    Raises:
        NotShown: the worker was always first.
    """
    dice, known = random.Random(seed), set(worker_sockets(daemon))
    for _ in range(ATTEMPTS):
        generation = row(client, "late")["generation"]
        with zmq.Context() as context, daemon.client() as other:
            loading = other.generate("late", prompt="x", max_tokens=1)
            new = eventually(lambda: set(worker_sockets(daemon)) - known, timeout_s=PATIENCE_S)
            with context.socket(zmq.DEALER) as socket:
                socket.set(zmq.LINGER, 0)
                socket.connect(f"ipc://{new.pop()}")
                for _ in range(20):
                    socket.send_multipart(stranger(dice))
                list(loading)
        wait_for_state(client, "late", "READY")
        assert row(client, "late")["generation"] == generation + 1, "a stranger ended the worker"
        client.unload("late")
        if counters[Slot.EARLY_STRANGERS]:
            return counters[Slot.EARLY_STRANGERS]
    raise NotShown("no stranger was heard before a worker's HELLO")


def stranger(dice: random.Random) -> list[bytes]:
    """What is not the worker's: noise, a HELLO without the token, messages of other lives."""
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
    """Of all workers that there are."""
    run = daemon.folder / "run"
    return sorted(path for path in run.glob("*.sock") if path.name != "client.sock")


def _send(
    path: Path, kind: int, messages: list[list[bytes]], have_arrived: Callable[[], bool]
) -> None:
    """Sends, and stays until all have arrived: libzmq drops what a closed peer has left unread."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDTIMEO, int(1000 * PATIENCE_S))
        socket.connect(f"ipc://{path}")
        for frames in messages:
            socket.send_multipart(frames)
        eventually(have_arrived, timeout_s=PATIENCE_S, what=f"all at {path.name} have arrived")
