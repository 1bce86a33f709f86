"""P14: a worker with streams is killed again and again, and what that leaves in the supervisor."""

from __future__ import annotations

import os
import signal
import time

import psutil

from .bounds import at_most, equals
from .daemons import Daemon, ready
from .entries import SOON
from .measure import FAKE, Figure, Measure, Place, Values
from .watching import TimedReader
from support.daemon import fake, row, wait_for_state
from support.eventually import eventually
from support.faults import undisturbed

WARM_UP_CYCLES = 20
STREAMS = 4
OPTIONS = {"step_s": 0.005, "context_length": 10_000_000}


def crash_cycles(place: Place) -> Values:
    """Each crash interrupts all streams; the next comes when each has a new token."""
    entry = fake(fake=OPTIONS, max_concurrency=STREAMS, restart=SOON)
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)
        ready(client, "m")
        prompts = [f"stream {number}" for number in range(STREAMS)]
        streams = [TimedReader(client, "m", one, max_tokens=1_000_000) for one in prompts]
        for stream in streams:
            stream.started()

        def cycle() -> None:
            before = row(client, "m")
            os.kill(before["pid"], signal.SIGKILL)
            eventually(lambda: row(client, "m")["generation"] > before["generation"])
            wait_for_state(client, "m", "READY")
            had = [len(stream.tokens) for stream in streams]
            eventually(
                lambda: all(
                    len(stream.tokens) > count for stream, count in zip(streams, had, strict=True)
                ),
                timeout_s=60.0,
                what="a new token of each stream",
            )

        def held() -> tuple[int, int, float]:
            rss_mb = supervisor.memory_info().rss / 1e6
            return supervisor.num_fds(), supervisor.num_threads(), rss_mb

        for _ in range(WARM_UP_CYCLES):
            cycle()
        files, threads, rss_mb = held()
        start_s = time.monotonic()
        for _ in range(place.sizes.cycles):
            cycle()
        cycle_s = (time.monotonic() - start_s) / place.sizes.cycles
        zombies = sum(p.status() == psutil.STATUS_ZOMBIE for p in supervisor.children())
        files_after, threads_after, rss_mb_after = held()
        for stream in streams:
            stream.stream.cancel()
        results = [stream.finished() for stream in streams]
        wrong = sum(
            result.token_ids != undisturbed(prompt, len(result.token_ids))
            for prompt, result in zip(prompts, results, strict=True)
        )
        resumed = min(result.resumed for result in results)
    return {
        "resumed": resumed - WARM_UP_CYCLES - place.sizes.cycles,
        "wrong": wrong,
        "zombies": zombies,
        "files": files_after - files,
        "threads": threads_after - threads,
        "rss": rss_mb_after - rss_mb,
        "cycle": cycle_s,
    }


def _count(key: str, what: str) -> Figure:
    return Figure(
        key=key,
        what=f"1,000 crashes of a worker with 4 streams: {what}",
        unit="",
        digits=0,
        bound=equals(0),
    )


MEASURES = (
    Measure(
        promise="P14",
        name="cycles",
        where=FAKE,
        round=crash_cycles,
        most_repeats=1,
        figures=(
            _count("resumed", "resumes of a stream more or fewer than crashes"),
            _count("wrong", "streams with a token that an undisturbed one has not"),
            _count("zombies", "zombies"),
            _count("files", "open files more"),
            _count("threads", "threads more"),
            Figure(
                key="rss",
                what="1,000 crashes of a worker with 4 streams: supervisor RSS more",
                unit="MB",
                digits=1,
                bound=at_most(5.0),
            ),
            Figure(key="cycle", what="one crash until all streams continue, on average"),
        ),
    ),
)
