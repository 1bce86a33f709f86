"""What it costs to decide who is next: dispatches from long lines, and steps of many rows.

The core alone, without processes or sockets: `Core.handle` of one event, in microseconds of
processor time, so that other work on the machine hurts less.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from mlxsup.protocol.delta_body import pack_body
from mlxsup.protocol.ids import ModelName, RequestKey, pack_tokens
from mlxsup.protocol.packed_rows import PackedRow
from mlxsup.protocol.states import Channel, FinishReason, Priority
from mlxsup.protocol.worker_messages import Step
from mlxsup.supervisor.core.events import WorkerSaid
from mlxsup.supervisor.core.settings import CoreSettings

from .report import print_table, spread
from support.core.driver import LAUNCH, Driver, entry

ACCOUNTS = 100
WAITING = (128, 1024, 8192)
ROWS = (1, 16, 64)
EVENTS = 300
MOST_GROWTH = 2.0
"""A dispatch from the longest line may take this many times as long as one from the shortest."""


def line_of(waiting: int, rows: int) -> Driver:
    """A READY model with that many rows running and that many requests of 100 accounts waiting."""
    limits = CoreSettings(max_queue=10**6, max_queue_per_client=10**6)
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=rows))], limits)
    driver.is_checked = False
    driver.load()
    driver.come_up()
    classes = tuple(Priority)
    for number in range(rows + waiting):
        account, priority = f"process {number % ACCOUNTS}@1", classes[number % len(classes)]
        driver.ask(f"r{number}", process=account, priority=priority)
    for key in driver.model().running:
        driver.accept(key)
    return driver


def handled_us(driver: Driver, *, is_end: bool) -> list[float]:
    """Microseconds of each step: with an end, one row leaves and the next request starts."""
    times, body = [], pack_body("x", Channel.CONTENT)
    for number in range(EVENTS):
        if is_end:  # the line stays as long as it was
            driver.ask(f"more {number}", process=f"process {number % ACCOUNTS}@1")
        running = list(driver.model().running)
        rows = [
            PackedRow(
                key=RequestKey(key),
                tokens=pack_tokens([9]),
                body=body,
                finish=FinishReason.STOP if is_end and key == running[0] else None,
            )
            for key in running
        ]
        driver.now += 0.01
        said = WorkerSaid(
            now=driver.now,
            model=ModelName("m"),
            generation=driver.generation(),
            message=Step(step=1, rows=rows, took_s=0.01, decode_s=0.01),
        )
        began = time.process_time()
        driver.core.handle(said)
        times.append(1e6 * (time.process_time() - began))
    return times


def dispatch_us(repeats: int) -> dict[int, list[float]]:
    """An end and the dispatch that follows, by how many wait, one for each repeat; lines of all
    lengths take turns, so that a busy moment meets all of them."""
    ends: dict[int, list[float]] = {waiting: [] for waiting in WAITING}
    for _ in range(repeats):
        for waiting in WAITING:
            ends[waiting].append(statistics.median(handled_us(line_of(waiting, 1), is_end=True)))
    return ends


def growth(ends: dict[int, list[float]]) -> dict[int, list[float]]:
    """How many times as long as from the shortest line, in each repeat, for the longer ones."""
    shortest, *longer = ends
    return {
        waiting: [long / short for long, short in zip(ends[waiting], ends[shortest], strict=True)]
        for waiting in longer
    }


def run(repeats: int) -> None:
    """Prints both tables."""
    print("## Deciding who is next, the core alone (fake engine)\n")
    ends = dispatch_us(repeats)
    steps: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(repeats):
        for rows in ROWS:
            steps[rows].append(statistics.median(handled_us(line_of(128, rows), is_end=False)))
    table = [[f"{waiting:,}", spread(times, " µs", 0)] for waiting, times in ends.items()]
    print_table(("waiting, of 100 accounts", "an end, and the dispatch that follows"), table)
    for waiting, times in growth(ends).items():
        found = f"{spread(times)} times, at most {MOST_GROWTH:g}"
        print(f"{waiting:,} to {WAITING[0]}: {found}")
    print()
    table = [[str(rows), spread(times, " µs", 0)] for rows, times in steps.items()]
    print_table(("rows", "a step that gives each a token"), table)
