"""P2, P4, over HTTP: the daemon dies under streams of every kind, and the gateway under others."""

from __future__ import annotations

import os
import signal
import time

from . import daemons
from .bounds import at_most, equals
from .ends import ENDLESS, SLOW, start_streams
from .measure import FAKE, Figure, Measure, Place, Values
from support.daemon import fake, row
from support.eventually import eventually
from support.faults import undisturbed
from support.http_daemon import STREAMED, HttpDaemon, SseReader, asked_at, gateway_of

OF_EACH_PATH = 2
SOCKET_STREAMS = 4
SOCKET_TOKENS = 250


class Daemon(HttpDaemon, daemons.Daemon):
    """One with a gateway; if it does not start, nothing can be judged."""


def started_streams(daemon: Daemon) -> list[SseReader]:
    """Streams of every path, each with its first text."""
    readers = [
        SseReader(daemon, asked_at(path, f"{path} {n}", ENDLESS), path)
        for path in STREAMED
        for n in range(OF_EACH_PATH)
    ]
    return [reader.started() for reader in readers]


def daemon_dies(place: Place) -> Values:
    """SIGKILL to the supervisor; then the next one is started at the same port."""
    with Daemon({"m": fake(fake=SLOW)}) as daemon:
        readers = started_streams(daemon)
        start_s = time.monotonic()
        daemon.kill()
        for reader in readers:
            reader.finished()
            assert "error" in reader.events[-1], reader.events[-1]
        lost_s = max(reader.last_at for reader in readers) - start_s
        complete = sum(reader.is_complete for reader in readers)
        daemon.listen = daemon.url.removeprefix("http://")
        start_s = time.monotonic()
        daemon.start()
        bound_s = time.monotonic() - start_s
        assert daemon.url.endswith(daemon.listen), "another port"
    return {"lost": lost_s, "complete": float(complete), "bound": bound_s}


def gateway_dies(place: Place) -> Values:
    """SIGKILL to the gateway, next to streams over the socket of the daemon."""
    with Daemon({"m": fake(fake=SLOW, max_concurrency=16)}) as daemon, daemon.client() as client:
        streams = start_streams(client, "m", SOCKET_TOKENS, SOCKET_STREAMS)
        readers = started_streams(daemon)
        pid = gateway_of(client)["pid"]
        start_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: is_healthy(daemon), timeout_s=30.0, what="a gateway that answers")
        back_s = time.monotonic() - start_s
        assert gateway_of(client, after=pid)["restarts"] == 1
        for reader in readers:
            reader.finished()
        complete = sum(reader.is_complete for reader in readers)
        results = [stream.finished() for stream in streams]
        broken = sum(
            result.token_ids != undisturbed(f"{n}", SOCKET_TOKENS) or result.resumed > 0
            for n, result in enumerate(results)
        )
        assert row(client, "m")["generation"] == 1
    return {"back": back_s, "broken": float(broken), "cut": float(complete)}


def is_healthy(daemon: Daemon) -> bool:
    """Whether the gateway answers now; the one that dies may still accept a connection."""
    try:
        return daemon.get("/health")[0] == 200
    except ConnectionError:
        return False


MANY = f"{OF_EACH_PATH * len(STREAMED)} streams over HTTP, of all four kinds"

MEASURES = (
    Measure(
        promise="P2",
        name="http",
        where=FAKE,
        round=daemon_dies,
        figures=(
            Figure(
                key="lost",
                what=f"supervisor SIGKILL: until the last of {MANY}, has its error event",
                bound=at_most(3.5),
            ),
            Figure(
                key="complete",
                what="the same: streams that a client would take for whole answers",
                unit="",
                digits=0,
                bound=equals(0),
            ),
            Figure(
                key="bound",
                what="then from `mlxsup start` until the next gateway serves at the same port",
                bound=at_most(2.0),
            ),
        ),
    ),
    Measure(
        promise="P4",
        name="http",
        where=FAKE,
        round=gateway_dies,
        figures=(
            Figure(
                key="back",
                what="gateway SIGKILL: until `/health` answers again",
                bound=at_most(2.0),
            ),
            Figure(
                key="broken",
                what=f"the same: of {SOCKET_STREAMS} streams over the daemon's socket, those with"
                " another token or an interruption",
                unit="",
                digits=0,
                bound=equals(0),
            ),
            Figure(
                key="cut",
                what=f"the same: of {MANY}, those that a client would take for whole answers",
                unit="",
                digits=0,
                bound=equals(0),
            ),
        ),
    ),
)
