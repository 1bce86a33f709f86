"""Serves HTTP on the socket that the supervisor listens at, until the supervisor says or dies."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from mlxsup.client import AsyncClient
from mlxsup.protocol.gateway import GatewaySpec, is_loopback
from mlxsup.protocol.log_format import PrintableFormatter

from . import limits
from .app import Gateway
from .connection import LimitedProtocol
from .keys import Keys

ORPHANED_EXIT = 1
"""The exit code of one that could not end its answers in time after its supervisor had died."""

CUT_OFF = "ASGI callable returned without completing response."
"""What uvicorn says of an answer that is cut off on purpose, because it is not whole."""


class Server(uvicorn.Server):
    """uvicorn's server, which says when it accepts connections.

    Args:
        config: of the server.
        gateway: ends what is open when the server is to end.
        ready_pipe: the descriptor that gets one byte.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway, ready_pipe: int) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._ready_pipe = ready_pipe

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets=sockets)
        if self.started:
            try:
                os.write(self._ready_pipe, b"1")
            except BrokenPipeError:  # the supervisor has died, as is about to be seen
                pass
        os.close(self._ready_pipe)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn. What has not ended by half of the time is ended with an error."""
        loop = asyncio.get_running_loop()
        loop.call_later(limits.END_LIMIT_S / 2, self._gateway.open_answers.cancel)
        await super().shutdown(sockets=sockets)


def serve(spec: GatewaySpec) -> None:
    """Serves until SIGTERM, or until standard input ends because the supervisor has died."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=spec.log_level.upper())
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != CUT_OFF)
    for noisy in ("uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    gateway = Gateway(lambda: AsyncClient(spec.endpoint), spec.rules.names)
    keys = Keys(Path(spec.keys), is_needed=not is_loopback(spec.host))
    config = uvicorn.Config(
        gateway.app(spec.host, keys, spec.rules.hosts, spec.rules.origins),
        http=cast(Any, partial(LimitedProtocol, responded=gateway.open_answers.meter.responded)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(limits.IDLE_LIMIT_S),
        timeout_graceful_shutdown=int(limits.END_LIMIT_S),
    )
    server = Server(config, gateway, spec.ready_pipe)
    threading.Thread(target=_watch_parent, args=(server,), name="parent-watch", daemon=True).start()
    server.run(sockets=[socket.socket(fileno=spec.listener)])


def _watch_parent(server: uvicorn.Server) -> None:
    """Ends the process once the supervisor has died, at once if it does not by itself (E6)."""
    while os.read(0, 4096):
        pass
    server.should_exit = True
    threading.Event().wait(limits.ORPHAN_LIMIT_S)
    os._exit(ORPHANED_EXIT)
