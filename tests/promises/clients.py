"""P15, P18: clients that do not read, or come in crowds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil

from mlxsup.client import Client

from .bounds import at_most, equals
from .crowd import BIG, STREAMS
from .crowd_process import Crowd
from .daemons import Daemon, ready
from .measure import FAKE, Figure, Measure, Place, Values
from .watching import TimedReader, peak_rss
from support.daemon import fake, row
from support.eventually import eventually


@contextmanager
def one_model(**options: Any) -> Iterator[tuple[Daemon, Client, psutil.Process]]:
    """A daemon with a model that is READY, a client, and its process."""
    with Daemon({"m": fake(**options)}) as daemon, daemon.client() as client:
        ready(client, "m")
        assert daemon.process is not None
        yield daemon, client, psutil.Process(daemon.process.pid)
        assert row(client, "m")["generation"] == 1


def is_at_rest(client: Client) -> bool:
    """Whether no request runs."""
    return not row(client, "m")["running"]


def silent_clients(place: Place) -> Values:
    """P15: eight streams of 2 MB/s each that are read, and then ones that are not."""
    values: dict[str, float | list[float]] = {}
    for is_read in (True, False):
        with (
            one_model(fake={"step_s": 0.01}, max_concurrency=STREAMS + 1) as (daemon, client, main),
            peak_rss(main) as grown,
            Crowd(
                "reading" if is_read else "silent", daemon.endpoint, "m", BIG, str(STREAMS)
            ) as crowd,
        ):
            other = TimedReader(client, "m", "other", max_tokens=300)
            assert len(other.finished().token_ids) == 300
            values["without" if is_read else "gap"] = other.largest_gap_ms
            if not is_read:
                eventually(partial(is_at_rest, client), timeout_s=60.0)
                codes = crowd.result()["codes"]
                assert codes == {"slow_consumer": STREAMS}, codes
            values["rss_without" if is_read else "rss"] = grown[-1]
    return values


def connects(place: Place) -> Values:
    """P18: connections that come and go while a stream runs."""
    with one_model(fake={"step_s": 0.01}) as (daemon, client, _):
        calm = TimedReader(client, "m", "stream", max_tokens=150)
        right = calm.finished().token_ids
        path = daemon.endpoint.removeprefix("ipc://")
        stream = TimedReader(client, "m", "stream", max_tokens=150).started()
        with Crowd("connect", path, str(place.sizes.connects)) as crowd:
            took_s = crowd.result()["took_s"]
        is_whole = stream.finished().token_ids == right
        client.ping()
    return {
        "broken": int(not is_whole),
        "without": calm.largest_gap_ms,
        "gap": stream.largest_gap_ms,
        "took": took_s,
    }


MEASURES = (
    Measure(
        promise="P15",
        name="streams",
        where=FAKE,
        round=silent_clients,
        figures=(
            Figure(
                key="gap",
                what="8 streams of 2 MB/s that nobody reads (without: that are read): each ends"
                " as `slow_consumer`; largest gap of another client's stream",
                unit="ms",
                digits=1,
                without="without",
            ),
            Figure(
                key="rss",
                what="the same: by how much the supervisor's RSS grows at most",
                unit="MB",
                digits=1,
                without="rss_without",
                bound=at_most(64.0),
            ),
        ),
    ),
    Measure(
        promise="P18",
        name="connects",
        where=FAKE,
        round=connects,
        figures=(
            Figure(
                key="broken",
                what="10,000 connects: streams with a token missing or wrong",
                unit="",
                digits=0,
                bound=equals(0),
            ),
            Figure(
                key="gap",
                what="the same: largest gap of the stream",
                unit="ms",
                digits=1,
                without="without",
            ),
            Figure(key="took", what="the same: until the last has come and gone"),
        ),
    ),
)
