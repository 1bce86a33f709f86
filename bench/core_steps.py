"""The child of `bench against`: microseconds that `Core.handle` of one step takes, as JSON.

`python -P bench/core_steps.py ROWS [ROWS …]`, with `typings` and `tests` of the tree that is to
be measured in PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

from mlxsup.protocol.delta import pack_body
from mlxsup.protocol.ids import ModelName, RequestKey, pack_tokens
from mlxsup.protocol.states import Channel
from mlxsup.protocol.step_batch import PackedRow
from mlxsup.protocol.worker_messages import Step
from mlxsup.supervisor.core import core
from mlxsup.supervisor.core.events import WorkerSaid
from mlxsup.supervisor.core.settings import CoreSettings

from support.core.driver import LAUNCH, Driver, entry

BATCHES = 25
STEPS = 40
"""In each batch; the quickest batch counts, because nothing but other work makes one slower."""


def ready(rows: int) -> Driver:
    """Return a driver with a READY model that has accepted that many rows."""
    limits = CoreSettings(max_queue=1000, max_queue_per_client=1000)
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=rows))], limits)
    driver.is_checked = False
    driver.load()
    driver.come_up()
    for number in range(rows):
        driver.ask(f"r{number}")
    for key in list(driver.model().batch.running):
        driver.accept(key)
    return driver


def step_us(driver: Driver) -> float:
    """Microseconds of processor time for one step that gives each row a token."""
    body = pack_body("x", Channel.CONTENT)
    keys = [RequestKey(key) for key in driver.model().batch.running]
    handle = driver.core.handle
    quickest = float("inf")
    for _ in range(BATCHES):
        events = []
        for _ in range(STEPS):
            driver.now += 0.01
            rows = [PackedRow(key=key, tokens=pack_tokens([9]), body=body) for key in keys]
            events.append(
                WorkerSaid(
                    now=driver.now, model=ModelName("m"), generation=driver.generation(),
                    message=Step(step=1, rows=rows, took_s=0.01, decode_s=0.01),
                )
            )  # fmt: skip
        begin = time.process_time()
        for event in events:
            handle(event)
        quickest = min(quickest, time.process_time() - begin)
    return 1e6 * quickest / STEPS


def main() -> None:
    """Prints the file that was measured, and a figure for each number of rows."""
    found = {rows: step_us(ready(int(rows))) for rows in sys.argv[1:]}
    print(json.dumps({"file": core.__file__, "us": found}))


if __name__ == "__main__":
    main()
