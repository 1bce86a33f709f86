"""P15, P16, P18: clients that do not read, flood, or come in crowds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

from .crowd import BIG, STREAMS
from .crowd_process import Crowd
from .measure import FAKE, Figure, Measure, Place, Values, at_most
from .watching import TimedReader, peak_rss

PROBES = 5


@contextmanager
def one_model(**options: Any) -> Iterator[tuple[Daemon, Any, psutil.Process]]:
    """A daemon with a model that is READY, a client, and its process."""
    with Daemon({"m": fake(**options)}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        assert daemon.process is not None
        yield daemon, client, psutil.Process(daemon.process.pid)
        assert row(client, "m")["generation"] == 1


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
                eventually(lambda client=client: not row(client, "m")["running"], timeout_s=60.0)  # type: ignore[misc]
                codes = crowd.result()["codes"]
                assert codes == {"slow_consumer": STREAMS}, codes
            values["rss_without" if is_read else "rss"] = grown[-1]
    return values


def first_token_ms(client: Any, prompt: str) -> float:
    """Time to the first token of a short answer."""
    start_s = time.monotonic()
    reader = TimedReader(client, "m", prompt, max_tokens=3)
    reader.finished(120.0)
    return 1000 * (reader.times[0] - start_s)


def flood(place: Place) -> Values:
    """P16: one client asks for everything at once; another asks now and then."""
    with one_model(fake={"step_s": 0.005}) as (daemon, client, _):
        usual = [first_token_ms(client, f"usual {n}") for n in range(PROBES)]
        with Crowd("flood", daemon.endpoint, "m", str(place.sizes.flood)) as crowd:
            beside = [first_token_ms(client, f"beside {n}") for n in range(PROBES)]
            said = crowd.result()
        ends = said["ends"]
        assert sum(ends.values()) == place.sizes.flood, ends
        assert set(ends) <= {"served", "overloaded"}, ends
    return {
        "usual": usual,
        "beside": beside,
        "ratio": max(beside) / max(usual),
        "refused": said["refused_ms"],
        "took": said["took_s"],
    }


def connects(place: Place) -> Values:
    """P18: connections that come and go while a stream runs."""
    with one_model(fake={"step_s": 0.01}) as (daemon, client, _):
        calm = TimedReader(client, "m", "stream", max_tokens=150)
        right = calm.finished().token_ids
        path = daemon.endpoint.removeprefix("ipc://")
        stream = TimedReader(client, "m", "stream", max_tokens=150).started()
        with Crowd("connect", path, str(place.sizes.connects)) as crowd:
            took_s = crowd.result()["took_s"]
        assert stream.finished().token_ids == right
        client.ping()
    return {"without": calm.largest_gap_ms, "gap": stream.largest_gap_ms, "took": took_s}


MEASURES = (
    Measure(
        promise="P15",
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
                target="reported",
            ),
            Figure(
                key="rss",
                what="the same: by how much the supervisor's RSS grows at most",
                unit="MB",
                digits=1,
                without="rss_without",
                target="bounded (≤64 MB)",
                is_kept=at_most("rss", 64.0),
            ),
        ),
    ),
    Measure(
        promise="P16",
        where=FAKE,
        round=flood,
        figures=(
            Figure(
                key="beside",
                what="10,000 requests of one client: time to first token of another",
                unit="ms",
                digits=0,
                without="usual",
                target="reported",
            ),
            Figure(
                key="ratio",
                what="the same: slowest with / slowest without",
                unit="",
                digits=1,
                target="reported",
            ),
            Figure(
                key="refused",
                what="the same: from asking to the refusal (all are sent at once), median",
                unit="ms",
                digits=0,
                target="reported",
            ),
            Figure(
                key="took",
                what="the same: until the last is served or refused",
                target="reported",
            ),
        ),
    ),
    Measure(
        promise="P18",
        where=FAKE,
        round=connects,
        figures=(
            Figure(
                key="gap",
                what="10,000 connects: largest gap of a stream, which is whole",
                unit="ms",
                digits=1,
                without="without",
                target="reported",
            ),
            Figure(key="took", what="the same: until the last has come and gone"),
        ),
    ),
)
