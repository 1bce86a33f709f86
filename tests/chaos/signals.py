"""Signals from outside, and the look-out for the ends of the processes that they strike."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psutil

from mlxsup.client import AsyncClient

from .ledger import Ledger
from .provocations import Provocation
from .setting import EVIDENCE, SHORT_STOP, SILENT
from support.daemon import Daemon, is_alive
from support.eventually import INTERVAL_S

SHORT_STOP_S = 0.3
HARMLESS_STOP_S = 2.0
"""A process that was stopped for longer may be found stopped, and replaced."""

Start = Callable[[Coroutine[Any, Any, bool], str, str], None]
"""Lets something run beside the next faults."""


class Signals:
    """Strikes processes of workers.

    Args:
        client: that names them.
        daemon: whose children they have to be.
        ledger: where each blow is entered before it falls.
        start: lets the look-out run.
    """

    def __init__(self, client: AsyncClient, daemon: Daemon, ledger: Ledger, start: Start) -> None:
        self._client, self._daemon, self._ledger, self._start = client, daemon, ledger, start

    async def find(self, model: str) -> tuple[psutil.Process, int, str] | None:
        """The process of a model, which life it is, and its state; None if there is none."""
        rows = (await self._client.status())["models"]
        row: dict[str, Any] = next(r for r in rows if r["name"] == model)
        if row["pid"] is None:
            return None
        assert self._daemon.process is not None
        try:
            process = psutil.Process(row["pid"])
            is_ours = process.ppid() == self._daemon.process.pid
        except psutil.NoSuchProcess:
            return None
        return (process, row["generation"], row["state"]) if is_ours else None

    async def strike(self, kind: str, model: str) -> bool:
        """Whether there was something to strike, and it may be struck."""
        found = await self.find(model)
        if found is None:
            return False
        if kind == SHORT_STOP:
            return await self._stop_for_a_moment(found[0], model)
        if kind in EVIDENCE and not self._ledger.may_accuse(model):
            return False
        entry = self._ledger.provocations.begin(
            kind, model, is_evidence=kind in EVIDENCE, is_silent=kind in SILENT
        )
        self._ledger.kill(model)
        self.look_out(found[0], entry)
        return _send(found[0], getattr(signal, kind))

    async def _stop_for_a_moment(self, process: psutil.Process, model: str) -> bool:
        """A stop that nobody should notice."""
        if self._ledger.provocations.is_open(model, "SIGSTOP"):
            return False
        entry = self._ledger.provocations.begin(SHORT_STOP, model, deaths=0, is_silent=True)
        has_struck = _send(process, signal.SIGSTOP)
        await asyncio.sleep(SHORT_STOP_S)  # the fault itself, which lasts
        _send(process, signal.SIGCONT)
        if time.monotonic() - entry.begun_s > HARMLESS_STOP_S:
            entry.deaths = 1  # this process itself was held up
            self.look_out(process, entry)
        else:
            entry.end()
        return has_struck

    def look_out(self, process: psutil.Process, entry: Provocation) -> None:
        """Ends an entry once the process is gone."""
        kind = f"the end of a process ({entry.kind})"
        self._start(self._wait_for_end(process, entry), kind, entry.model)

    @staticmethod
    async def _wait_for_end(process: psutil.Process, entry: Provocation) -> bool:
        while is_alive(process):  # noqa: ASYNC110 - it is no child of this process
            await asyncio.sleep(INTERVAL_S)
        entry.end()
        return True


def _send(process: psutil.Process, number: int) -> bool:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True
