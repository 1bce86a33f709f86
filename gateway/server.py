"""Serves HTTP on the socket that the supervisor listens at, until the supervisor says or dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from mlxsup.client import AsyncClient
from mlxsup.protocol.gateway import (
    BEAT,
    BEAT_S,
    BEAT_WITH_KEYS,
    Address,
    GatewaySpec,
    find_key_need,
)
from mlxsup.protocol.key_file import KeyPlace
from mlxsup.protocol.log_format import LineFormatter

from . import limits
from .app import Gateway
from .connection import LimitedProtocol
from .keys import Keys

ORPHANED_EXIT = 1
"""The exit code of one that could not end its answers in time after its supervisor had died."""

CUT_OFF = "ASGI callable returned without completing response."
"""What uvicorn says of an answer that is cut off on purpose, because it is not whole."""


class Server(uvicorn.Server):
    """uvicorn's server, which says when it accepts connections, and that its loop runs."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, keys: Keys, beat_pipe: int
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._keys = keys
        self._beat_pipe = beat_pipe
        self._beating: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn, whose answer to SIGINT is that of a program in a terminal."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon, which ends us
        await super().startup(sockets=sockets)
        if self.started:
            self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        os.set_blocking(self._beat_pipe, False)
        while True:
            try:
                os.write(self._beat_pipe, BEAT_WITH_KEYS if self._keys.are_in_force else BEAT)
            except (BlockingIOError, BrokenPipeError):
                pass  # the supervisor was stopped for hours; or it has died, as is about to be seen
            self._keys.pulse()
            if (digests := self._keys.digests) is not None:
                self._gateway.kept.retain(digests)
            await asyncio.sleep(BEAT_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn. What has not ended by half of the time is ended with an error."""
        loop = asyncio.get_running_loop()
        loop.call_later(limits.END_LIMIT_S / 2, self._gateway.open_answers.cancel)
        await super().shutdown(sockets=sockets)


def serve(spec: GatewaySpec) -> None:
    """Serve until SIGTERM, or until standard input ends because the supervisor has died."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(handlers=[handler], level=spec.log_level.upper())
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != CUT_OFF)
    for noisy in ("uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    gateway = Gateway(lambda: AsyncClient(spec.endpoint), spec.rules)
    need = find_key_need(Address(host=spec.host, port=spec.port), spec.rules)
    keys = Keys(
        KeyPlace(Path(spec.key_file), Path(spec.key_mark)),
        are_required=need is not None,
        were_in_force=spec.has_had_keys,
    )
    keys.watch()
    config = uvicorn.Config(
        gateway.app(spec.host, keys),
        http=cast(Any, partial(LimitedProtocol, responded=gateway.daemon.meter.responded)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(limits.IDLE_LIMIT_S),
        timeout_graceful_shutdown=int(limits.END_LIMIT_S),
    )
    server = Server(config, gateway, keys, spec.beat_pipe)
    threading.Thread(target=_watch_parent, args=(server,), name="parent-watch", daemon=True).start()
    server.run(sockets=[socket.socket(fileno=spec.listener)])


def _watch_parent(server: uvicorn.Server) -> None:
    """End the process once the supervisor has died, at once if it does not by itself (E6)."""
    while os.read(0, 4096):
        pass
    server.should_exit = True
    threading.Event().wait(limits.ORPHAN_LIMIT_S)
    os._exit(ORPHANED_EXIT)
