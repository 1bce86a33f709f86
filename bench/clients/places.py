"""The servers that are asked: the gateway of a daemon, and mlx_lm.server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ..peers import MlxLmServer
from .case import Place
from .crowd import ROWS, WAITING
from support.daemon import row
from support.http_daemon import HttpDaemon

MODEL = "known"

LOOK_S = 0.5
BUSY_PERCENT = 10.0
"""Of a core: an idle server takes about one, and one that generates a hundred."""


@contextmanager
def gateway(folder: Path) -> Iterator[Place]:
    """A daemon with the model of this folder, two rows, and room for one request that waits."""
    entry = {"path": str(folder), "preload": True, "max_concurrency": ROWS}
    with HttpDaemon({MODEL: entry}, {"max_queue": WAITING}) as daemon, daemon.client() as client:
        client.load(MODEL)

        def is_idle() -> bool:
            return not row(client, MODEL)["running"]

        yield Place(name="mlxsup", url=daemon.url, model=MODEL, is_idle=is_idle)


@contextmanager
def mlx_lm_server(folder: Path) -> Iterator[Place]:
    """mlx_lm.server with the same model; clients that leave make it print tracebacks.

    It lists models only if there is a folder of downloaded ones, so it gets an empty one.
    """
    cache = folder.parent / "cache"
    cache.mkdir(exist_ok=True)
    with MlxLmServer({MODEL: folder}, "--model", str(folder), cache=cache) as server:
        process = psutil.Process(server.pid)

        def is_idle() -> bool:
            return process.cpu_percent(interval=LOOK_S) < BUSY_PERCENT

        yield Place(name=server.name, url=server.url, model=str(folder), is_idle=is_idle)
        server.give_up()
