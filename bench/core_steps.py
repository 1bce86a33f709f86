"""The child of `bench against`: microseconds that `Core.handle` of one step takes, as JSON.

`python -P bench/core_steps.py ROWS [ROWS …]`, with `typings` and `tests` of the tree that is to
be measured in PYTHONPATH. It knows trees from before steps said how long they took, and from before
the rows of a step arrived packed.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mlxsup.protocol import worker_messages
from mlxsup.protocol.ids import ModelName, RequestKey, pack_tokens
from mlxsup.protocol.worker_messages import Step
from mlxsup.supervisor.core import core
from mlxsup.supervisor.core.events import WorkerSaid
from mlxsup.supervisor.core.settings import CoreSettings

from support.core.driver import LAUNCH, Driver, entry

BATCHES = 25
STEPS = 40
"""In each batch; the quickest batch counts, because nothing but other work makes one slower."""


def ready(rows: int) -> Driver:
    """A READY model with that many rows that have been accepted."""
    limits = CoreSettings(max_queue=1000, max_queue_per_client=1000)
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=rows))], limits)
    driver.is_checked = False
    driver.load()
    driver.come_up()
    for number in range(rows):
        driver.ask(f"r{number}")
    for key in list(driver.model().running):
        driver.accept(key)
    return driver


def token(key: RequestKey) -> Any:
    """A row that got a token, as the core is given it."""
    if find_spec("mlxsup.protocol.packed_rows") is None:
        return worker_messages.RowDelta(key=key, text="x", tokens=pack_tokens([9]))
    packed_rows = import_module("mlxsup.protocol.packed_rows")
    return packed_rows.PackedRow(key=key, tokens=pack_tokens([9]), body=b"\x81\xa4text\xa1x")


def step_us(driver: Driver) -> float:
    """Microseconds of processor time for one step that gives each row a token."""
    times: dict[str, Any] = {"took_s": 0.01, "decode_s": 0.01}
    timed = times if {one.name for one in fields(Step)} >= times.keys() else {}
    keys = [RequestKey(key) for key in driver.model().running]
    handle = driver.core.handle
    quickest = float("inf")
    for _ in range(BATCHES):
        events = []
        for _ in range(STEPS):
            driver.now += 0.01
            rows = [token(key) for key in keys]
            events.append(
                WorkerSaid(
                    now=driver.now, model=ModelName("m"), generation=driver.generation(),
                    message=Step(step=1, rows=rows, **timed),
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
