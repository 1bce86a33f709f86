"""P24, P15: storms of silent connections, and crowds that do not read."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import ExitStack
from statistics import fmean, median

import psutil

from mlxsup.client import Client

from .bounds import at_most
from .crowd_process import Crowd
from .daemons import Daemon, ready
from .measure import FAKE, Figure, Measure, Place, Values, require
from .watching import TimedReader, peak_rss
from support.daemon import fake, row
from support.eventually import eventually
from support.files import LimitedDaemon, most_files

TOKENS = 400
OWN_TOKENS = 600
OWN_TURNS = 6
"""Streams of another model on each of two daemons, one after the other: the median counts."""
OF_ONE_PROCESS = 50
STEPS = 150
"""That many of the crowd's model are compared; half of them while its clients have no room."""


class SoftDaemon(LimitedDaemon):
    """Begins with a soft limit of 1,024 files, as most systems give it."""

    open_files = 1024
    is_soft = True


class RoomyDaemon(LimitedDaemon):
    """May open 20,000 files, or what this machine has."""

    open_files = min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def storms(place: Place) -> Values:
    """Storms over two processes at each limit of open files, with one model and with many."""
    values: dict[str, float | list[float]] = {}
    for name, kind, models in (
        ("soft", SoftDaemon, 1),
        ("few", LimitedDaemon, 1),
        ("many", LimitedDaemon, place.sizes.many_models),
        ("roomy", RoomyDaemon, place.sizes.many_models),
    ):
        values |= stormed(name, kind, models, place)
    return values


def stormed(name: str, kind: type[LimitedDaemon], models: int, place: Place) -> Values:
    """One daemon; every model streams, before the storms and through them."""
    names = [f"m{number}" for number in range(models)]
    # All models together make two hundred steps each second.
    entry = fake(fake={"step_s": 0.005 * models})
    with kind(dict.fromkeys(names, entry)) as daemon, daemon.client() as client:
        for one in names:
            ready(client, one)
        assert daemon.process is not None
        main = psutil.Process(daemon.process.pid)
        before = main.num_fds()
        count = max(40, TOKENS // models)
        calm = stream_all(client, names, count)
        answers = [reader.finished(120.0).token_ids for reader in calm]
        path = daemon.endpoint.removeprefix("ipc://")
        times, size = str(place.sizes.storms // 2), str(place.sizes.storm_connects)
        rough: list[float] = []
        with most_files(main) as files, ExitStack() as stack:
            crowds = [stack.enter_context(Crowd("storm", path, size, times)) for _ in range(2)]
            while not rough or not all(crowd.is_over for crowd in crowds):
                streams = stream_all(client, names, count)
                assert [stream.finished(120.0).token_ids for stream in streams] == answers
                rough += [stream.largest_gap_ms for stream in streams]
            connected = [crowd.result()["connected"] for crowd in crowds]
        wanted = [place.sizes.storm_connects * int(times)] * 2
        require(connected == wanted, f"{connected} connections came instead of {wanted}")
        assert [row(client, one)["generation"] for one in names] == [1] * models
        eventually(lambda: main.num_fds() <= before, timeout_s=60.0)
    return {
        f"{name}_gap": max(rough),
        f"{name}_calm": max(reader.largest_gap_ms for reader in calm),
        f"{name}_files": float(files[-1] - before),
    }


def stream_all(client: Client, names: list[str], count: int) -> list[TimedReader]:
    """A stream of each model."""
    return [TimedReader(client, name, f"of {name}", max_tokens=count) for name in names]


# ---------------------------------------------------------------- crowds that do not read


def silent_crowd(place: Place) -> Values:
    """P15: connections of several processes with one stream each; read, not read, and again."""
    read, unread = ReadCrowd(), UnreadCrowd()
    for crowd in (read, unread, unread, read):
        crowd.take_turn(place)
    step, step_without = fmean(unread.step_us), fmean(read.step_us)
    beside, alone = median(unread.beside_us), median(unread.alone_us)
    return {
        "step": step,
        "step_without": step_without,
        "step_ratio": step / step_without,
        "beside": beside,
        "alone": alone,
        "beside_ratio": beside / alone,
        "rss": max(unread.grown_mb),
    }


class ReadCrowd:
    """A crowd that reads what it is sent.

    Attributes:
        step_us: CPU of the supervisor for a step of the crowd's model, of each turn.
        grown_mb: by how much the supervisor's RSS has grown in each turn.
    """

    what = "apart-reading"

    def __init__(self) -> None:
        self.step_us: list[float] = []
        self.grown_mb: list[float] = []

    def take_turn(self, place: Place) -> None:
        """A daemon with such a crowd, from its first connection until it has gone."""
        count = place.sizes.silent * OF_ONE_PROCESS
        big = fake(fake={"step_s": 0.05}, max_concurrency=count)
        with (
            Daemon({"m": fake(fake={"step_s": 0.005}), "big": big}) as daemon,
            daemon.client() as client,
            ExitStack() as stack,
        ):
            for name in ("m", "big"):
                ready(client, name)
            assert daemon.process is not None
            main = psutil.Process(daemon.process.pid)
            grown = stack.enter_context(peak_rss(main))
            crowds = [
                stack.enter_context(Crowd(self.what, daemon.endpoint, "big", str(OF_ONE_PROCESS)))
                for _ in range(place.sizes.silent)
            ]
            wait_for_running(client, count)
            self.step_us.append(crowd_step_us(main, client))
            self.look_at(main, client)
            self.grown_mb.append(grown[-1])
            for crowd in crowds:
                crowd.result()

    def look_at(self, main: psutil.Process, client: Client) -> None:
        """Nothing more."""


class UnreadCrowd(ReadCrowd):
    """A crowd that does not read, and is given up.

    Attributes:
        beside_us: CPU of the supervisor for a token of another stream then.
        alone_us: the same of a daemon without a crowd, measured in turn with it.
    """

    what = "apart-silent"

    def __init__(self) -> None:
        super().__init__()
        self.beside_us: list[float] = []
        self.alone_us: list[float] = []

    def look_at(self, main: psutil.Process, client: Client) -> None:
        """Once all are given up, beside a daemon that never had a crowd."""
        wait_for_running(client, 0)
        with Daemon({"m": fake(fake={"step_s": 0.005})}) as calm, calm.client() as other:
            ready(other, "m")
            assert calm.process is not None
            calm_main = psutil.Process(calm.process.pid)
            for _ in range(OWN_TURNS):
                self.alone_us.append(own_step_us(calm_main, other))
                self.beside_us.append(own_step_us(main, client))


def wait_for_running(client: Client, count: int) -> None:
    """Waits until that many requests run on the crowd's model."""
    eventually(lambda: len(row(client, "big")["running"]) == count, timeout_s=120.0)


def cpu_s(process: psutil.Process) -> float:
    """What the process has used, its children not.

    On Linux by the clock of the process (clock_getcpuclockid(3) says how it is called), which
    counts nanoseconds; /proc counts ticks of 10 ms.
    """
    if sys.platform == "linux":
        return time.clock_gettime(~process.pid << 3 | 2)
    times = process.cpu_times()
    return float(times.user + times.system)


def crowd_step_us(main: psutil.Process, client: Client) -> float:
    """CPU of the supervisor for each step of the crowd's model, over the next `STEPS`."""
    first: int = row(client, "big")["steps"]
    used_s = cpu_s(main)
    last: int = eventually(
        lambda: (steps := row(client, "big")["steps"]) >= first + STEPS and steps, timeout_s=120.0
    )
    return 1e6 * (cpu_s(main) - used_s) / (last - first)


def own_step_us(main: psutil.Process, client: Client) -> float:
    """CPU of the supervisor for each token of a stream of the other model."""
    used_s = cpu_s(main)
    reader = TimedReader(client, "m", "beside", max_tokens=OWN_TOKENS)
    assert len(reader.finished(120.0).token_ids) == OWN_TOKENS
    return 1e6 * (cpu_s(main) - used_s) / OWN_TOKENS


def _storm_figures(name: str, what: str) -> tuple[Figure, ...]:
    return (
        Figure(
            key=f"{name}_gap",
            what=f"20 storms of 3,000 silent connections, {what}: largest gap of any stream, each"
            " of which is whole",
            unit="ms",
            digits=1,
            without=f"{name}_calm",
        ),
        Figure(
            key=f"{name}_files",
            what="the same: open files more than before, at most",
            unit="",
            digits=0,
            bound=at_most(1024 + 256),
        ),
    )


MEASURES = (
    Measure(
        promise="P24",
        name="storms",
        most_repeats=3,
        where=FAKE,
        round=storms,
        figures=(
            *_storm_figures("soft", "1 model, soft limit 1,024 files"),
            *_storm_figures("few", "1 model, 4,096 files"),
            *_storm_figures("many", "24 models, 4,096 files"),
            *_storm_figures("roomy", "24 models, 20,000 files"),
        ),
    ),
    Measure(
        promise="P15",
        name="crowd",
        most_repeats=3,
        where=FAKE,
        round=silent_crowd,
        figures=(
            Figure(
                key="step",
                what="250 connections of 5 processes with a stream each that they do not read"
                " (without: that they read): supervisor CPU for each step of their model",
                unit="µs",
                digits=0,
                without="step_without",
            ),
            Figure(
                key="step_ratio",
                what="the same: with / without",
                unit="",
                bound=at_most(1.3),
            ),
            Figure(
                key="beside",
                what="when they have been given up and still read nothing (without: of a daemon"
                " without them, in turn): supervisor CPU for each token of another stream",
                unit="µs",
                digits=0,
                without="alone",
            ),
            Figure(
                key="beside_ratio",
                what="the same: with / without",
                unit="",
                bound=at_most(1.3),
            ),
            Figure(
                key="rss",
                what="the same: by how much the supervisor's RSS grows at most",
                unit="MB",
                digits=0,
                bound=at_most(640.0),
            ),
        ),
    ),
)
