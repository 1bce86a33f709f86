"""The same faults, mlxsup and mlx_lm.server: one model on the CPU, one round after the other."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import psutil

from mlxsup.client import Client, RequestError

from .crowd_process import Crowd
from .daemons import Daemon, ready
from .entries import real_entry
from .measure import CPU, Figure, Measure, Place, Values
from .peer import TOO_LARGE, Peer, PeerStream
from .watching import TimedReader, peak_rss
from support.daemon import row, wait_for_state

TOKENS = 600

Strike = Callable[[Client], None]


# ---------------------------------------------------------------- the engine dies, stops, raises


def send(number: signal.Signals, client: Client) -> None:
    """A signal to the worker."""
    os.kill(row(client, "m")["pid"], number)


def raise_in_step(client: Client) -> None:
    """The request that the peer's engine raises for; ours may answer or refuse it."""
    try:
        client.complete("m", prompt="a b c", max_tokens=4, temperature=1.0, top_k=TOO_LARGE)
    except RequestError as error:
        code = error.code
    else:
        return
    assert code == "invalid_request", code


def ours_again_s(daemon: Daemon, strike: Strike) -> float:
    """How long until a new request is answered; a stream that was cut must come to its end."""
    with daemon.client() as client:
        wait_for_state(client, "m", "READY")
        stream = TimedReader(client, "m", "continues", max_tokens=TOKENS).started()
        strike(client)
        start_s = time.monotonic()
        client.complete("m", prompt="a b c", max_tokens=4)
        again_s = time.monotonic() - start_s
        assert len(stream.finished().token_ids) == TOKENS
    return again_s


def deaths(place: Place) -> Values:
    """Each fault at its own server: those that do not come back are waited for at once."""
    values: dict[str, float | list[float]] = {}
    faults: dict[str, tuple[Strike, Callable[[Peer], None]]] = {
        "killed": (partial(send, signal.SIGKILL), lambda peer: peer.strike(signal.SIGKILL)),
        "stopped": (partial(send, signal.SIGSTOP), lambda peer: peer.strike(signal.SIGSTOP)),
        "raised": (raise_in_step, Peer.raise_in_step),
    }
    with Daemon({"m": real_entry(place)}) as daemon:
        for name, (strike, _) in faults.items():
            values[name] = ours_again_s(daemon, strike)
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(place.tiny)) for name in faults}

        def their_turn(name: str) -> float:
            stream = peers[name].stream("continues", TOKENS, place.sizes.patience_s)
            stream.has_started.wait()
            faults[name][1](peers[name])
            return peers[name].answers_again_s(place.sizes.patience_s)

        with ThreadPoolExecutor(len(faults)) as pool:
            for name, again_s in zip(faults, pool.map(their_turn, faults), strict=True):
                values[f"their_{name}"] = again_s
    return values


# ---------------------------------------------------------------- bad clients


def gap_of(stream: TimedReader | PeerStream) -> float:
    """The largest gap of a stream, read to its end; infinite where it broke."""
    stream.join(120.0)
    if isinstance(stream, TimedReader):
        assert len(stream.finished().token_ids) == TOKENS
    elif not stream.is_whole:
        return math.inf
    return stream.largest_gap_ms


def bad_clients(place: Place) -> Values:
    """Streams that nobody reads, noise, and a flood; what another client sees of each."""
    values: dict[str, float | list[float]] = {}
    count = str(place.sizes.peer_flood)
    with Daemon({"m": real_entry(place)}) as daemon, daemon.client() as client:
        ready(client, "m")
        assert daemon.process is not None
        values["calm"] = gap_of(TimedReader(client, "m", "other", max_tokens=TOKENS))
        with (
            peak_rss(psutil.Process(daemon.process.pid)) as grown,
            Crowd("silent", daemon.endpoint, "m", "unread", "8"),
        ):
            values["unread"] = gap_of(TimedReader(client, "m", "other", max_tokens=TOKENS))
            values["rss"] = grown[-1]
        with Crowd("frames", daemon.endpoint, count):
            values["noise"] = gap_of(TimedReader(client, "m", "other", max_tokens=TOKENS))
        with Crowd("flood", daemon.endpoint, "m", count):
            start_s = time.monotonic()
            reader = TimedReader(client, "m", "beside", max_tokens=3)
            reader.finished()
            values["flood"] = reader.times[0] - start_s
    with Peer(place.tiny) as peer:
        values["their_calm"] = gap_of(peer.stream("other", TOKENS))
        with (
            peak_rss(psutil.Process(peer.process.pid)) as grown,
            Crowd("http-silent", str(peer.port)),
        ):
            values["their_unread"] = gap_of(peer.stream("other", TOKENS))
            values["their_rss"] = grown[-1]
    with Peer(place.tiny) as peer:
        with Crowd("http-garbage", str(peer.port), count):
            values["their_noise"] = gap_of(peer.stream("other", TOKENS))
        with Crowd("http-flood", str(peer.port), count):
            start_s = time.monotonic()
            stream = peer.stream("beside", 3, place.sizes.patience_s)
            stream.join(place.sizes.patience_s)
            first = stream.times[0] - start_s if stream.times else math.inf
            values["their_flood"] = first
    return values


def _gap(key: str, what: str) -> Figure:
    return Figure(key=key, what=what, unit="ms", digits=0, theirs=f"their_{key}")


def _again(key: str, what: str) -> Figure:
    return Figure(key=key, what=what, theirs=f"their_{key}")


MEASURES = (
    Measure(
        promise="P0",
        name="deaths",
        most_repeats=3,
        where=CPU,
        round=deaths,
        figures=(
            _again("killed", "the process with the engine is killed −9: the next answer after"),
            _again("stopped", "it is stopped (SIGSTOP): the next answer after"),
            _again("raised", "a request with `top_k` 1,000,000: the next answer after"),
        ),
    ),
    Measure(
        promise="P0",
        name="clients",
        most_repeats=3,
        where=CPU,
        round=bad_clients,
        figures=(
            _gap("calm", "nothing: largest gap of a stream of 600 tokens"),
            _gap("unread", "8 streams of another client that nobody reads: the same"),
            Figure(
                key="rss",
                what="… memory of the process that holds the socket: more",
                unit="MB",
                digits=0,
                theirs="their_rss",
            ),
            _gap("noise", "1,000 messages (connections) of noise: the same"),
            _again("flood", "1,000 requests of one client: first token of another"),
        ),
    ),
)
