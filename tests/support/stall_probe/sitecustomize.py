"""Watches the event loop of a gateway: a folder for PYTHONPATH.

`MLXSUP_LOOP_PROBE` names a file, to which the gateway appends a line when it starts to serve, and
one for each turn of its loop that has used more CPU than any may. CPU, and not time: a busy machine
changes nothing.
"""

import asyncio
import os
import sys
import time
from typing import Any

MOST_S = 0.1
TICK_S = 0.002


def watch(path: str) -> None:
    """Begin with the server."""
    import uvicorn

    startup = uvicorn.Server.startup

    async def watched(self: uvicorn.Server, *arguments: Any, **named: Any) -> None:
        await startup(self, *arguments, **named)
        append(path, f"started {os.getpid()}")
        tick(path, asyncio.get_running_loop(), time.thread_time())

    uvicorn.Server.startup = watched  # type: ignore[method-assign]


def tick(path: str, loop: asyncio.AbstractEventLoop, before_s: float) -> None:
    """Append a line if the loop has used too much since the last tick, and come again."""
    now_s = time.thread_time()
    if now_s - before_s > MOST_S:
        append(path, f"a turn of the loop took {now_s - before_s:.3f} s of CPU")
    loop.call_later(TICK_S, tick, path, loop, now_s)


def append(path: str, line: str) -> None:
    """Append a line."""
    with open(path, "a") as file:
        file.write(line + "\n")


if (found := os.environ.get("MLXSUP_LOOP_PROBE")) and "mlxsup.gateway" in sys.orig_argv:
    watch(found)
