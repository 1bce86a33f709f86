"""What the flight recorder adds to `Core.handle` of a whole request.

The core alone, without processes or sockets, in microseconds of processor time. What is to be found
is smaller than the spread of whole requests, so its parts are timed by themselves: making the entry
of the start and that of the end, and keeping both. Their lines are made and written by the thread
of the logs; what the loop's own thread takes to hand them over is no part of `Core.handle`, and is
shown next to it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxsup.protocol.delta_body import pack_body
from mlxsup.protocol.ids import ModelName, RequestKey, pack_tokens
from mlxsup.protocol.packed_rows import PackedRow
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import Step
from mlxsup.supervisor.core.events import Event, WorkerSaid
from mlxsup.supervisor.core.flight_entries import request_ended, request_started
from mlxsup.supervisor.core.outbox import Outbox
from mlxsup.supervisor.flight_files import FlightFiles
from mlxsup.supervisor.log_files import LogWriter

from .report import print_table, spread
from support.core_driver import LAUNCH, Driver, entry

TOKENS = (16, 64, 256)
REQUESTS = 40
"""In each repeat; the quickest counts, because nothing but other work makes one slower."""

ENTRIES = 2000
HANDED_OVER = 200
MOST = 0.01


def ready() -> Driver:
    """A READY model with one row."""
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=1))])
    driver.is_checked = False
    driver.load()
    driver.come_up()
    return driver


def request_us(tokens: int) -> float:
    """One request, from its arrival to its end, with a step for each token."""
    driver = ready()
    handle, taken = driver.core.handle, [0.0]

    def timed(event: Event) -> object:
        began = time.process_time()
        actions = handle(event)
        taken[-1] += time.process_time() - began
        return actions

    driver.core.handle = timed  # type: ignore[assignment, method-assign]
    for number in range(REQUESTS):
        driver.ask(f"r{number}")
        (key,) = driver.model().running
        driver.accept(key)
        steps = [_step(driver, key, is_last=token == tokens) for token in range(1, tokens + 1)]
        began = time.process_time()
        for step in steps:
            handle(step)
        taken[-1] += time.process_time() - began
        taken.append(0.0)
    return 1e6 * min(taken[:-1])


def _step(driver: Driver, key: RequestKey, *, is_last: bool) -> Event:
    driver.now += 0.01
    row = PackedRow(
        key=key,
        tokens=pack_tokens([9]),
        body=pack_body("x", Channel.CONTENT),
        finish=FinishReason.STOP if is_last else None,
    )
    return WorkerSaid(
        now=driver.now,
        model=ModelName("m"),
        generation=driver.generation(),
        message=Step(step=1, rows=[row], took_s=0.01, decode_s=0.01),
    )


def entries_us() -> float:
    """Both entries of a request, made and kept."""
    driver = ready()
    driver.ask("r")
    model = driver.model()
    (request,) = model.running.values()
    outbox, now = Outbox(), driver.now
    usage, timings = request.usage(), request.timings(now)  # its client gets them, too

    def start() -> None:
        outbox.record(request_started(model, request, now), now)

    def end() -> None:
        outbox.record(request_ended(request, FinishReason.STOP, usage, timings), now)

    def nothing() -> None:
        """Costs the call, which is no part of an entry."""

    return sum(_quickest_us(part, outbox) - _quickest_us(nothing, outbox) for part in (start, end))


def handing_over_us() -> float:
    """Both entries of a request, handed over to their file on the loop's thread."""
    driver = ready()
    driver.ask("r")
    model, times = driver.model(), list[float]()
    (request,) = model.running.values()
    start = request_started(model, request, driver.now)
    end = request_ended(request, FinishReason.STOP, request.usage(), request.timings(driver.now))
    with TemporaryDirectory() as folder:
        writer = LogWriter(print)
        files = FlightFiles(Path(folder), writer)
        for _ in range(25):
            began = time.thread_time()
            for _ in range(HANDED_OVER):
                files.write(start)
                files.write(end)
            times.append(time.thread_time() - began)
        writer.close(60.0)
    return 1e6 * min(times) / HANDED_OVER


def _quickest_us(part: Callable[[], None], outbox: Outbox) -> float:
    times = []
    for _ in range(25):
        began = time.process_time()
        for _ in range(ENTRIES):
            part()
        times.append(time.process_time() - began)
        outbox.take()
    return 1e6 * min(times) / ENTRIES


def run(repeats: int) -> None:
    """Prints a row for each length of an answer."""
    print("## What the flight recorder adds to a request, the core alone (fake engine)\n")
    requests: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    entries, handing_over = list[float](), list[float]()
    for _ in range(repeats):
        entries.append(entries_us())
        handing_over.append(handing_over_us())
        for tokens, times in requests.items():
            times.append(request_us(tokens))
    table = []
    for tokens, times in requests.items():
        parts = [part / whole for part, whole in zip(entries, times, strict=True)]
        verdict = "kept" if statistics.median(parts) < MOST else "MISSED"
        percent = [100 * part for part in parts]
        table.append(
            [
                str(tokens),
                spread(times, " µs", 0),
                spread(entries, " µs"),
                spread(percent, " %"),
                f"<{MOST:.0%}, {verdict}",
                spread(handing_over, " µs"),
            ]
        )
    print_table(("tokens", "the request", "its entries", "part", "target", "handing over"), table)
