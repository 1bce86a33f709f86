"""Commands that replace, unload and reload models while requests run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Mapping

from mlxsup.client import AsyncClient, RequestError

from .ledger import Ledger
from .provocations import Provocation
from .setting import Setting
from .signals import Signals
from support.daemon import Daemon


class Commands:
    """Gives one command at a time to each model.

    Args:
        client: that gives them.
        daemon: whose configuration is rewritten.
        setting: with the models' entries.
        ledger: where each command is entered before it is given.
        is_up: by model; cleared while it is unloaded.
        signals: whose look-out sees processes end.
    """

    def __init__(
        self,
        client: AsyncClient,
        daemon: Daemon,
        setting: Setting,
        ledger: Ledger,
        is_up: Mapping[str, asyncio.Event],
        signals: Signals,
    ) -> None:
        self._client, self._daemon, self._ledger = client, daemon, ledger
        self._entries = {name: dict(entry) for name, entry in setting.models.items()}
        self._supervisor = dict(setting.supervisor)
        self._most = {name: entry["max_concurrency"] for name, entry in setting.models.items()}
        self._is_up, self._signals = is_up, signals
        self._supervisor = dict(setting.supervisor)
        self._turns = {name: asyncio.Lock() for name in setting.models}  # or one ends another

    def has_one(self, model: str) -> bool:
        """Whether a command for this model is under way."""
        return self._turns[model].locked()

    async def strike(self, kind: str, model: str) -> bool:
        """Always strikes."""
        async with self._turns[model]:
            match kind:
                case "restart" | "restart --now":
                    await self._restart(model, now=kind == "restart --now")
                case "reload":
                    assert self._daemon.process is not None
                    self._daemon.process.send_signal(signal.SIGHUP)
                case "other launch":
                    await self._change_launch(model)
                case "unload":
                    await self._unload(model)
        return True

    async def _restart(self, model: str, *, now: bool) -> None:
        """A healthy end of a process, which loses nothing unless it is immediate."""
        kind = "restart --now" if now else "restart"
        entry = self._ledger.provocations.begin(kind, model, loses_rows=now)
        self._ledger.provocations.lift(model)
        if now:
            self._ledger.kill(model)
        await self._call(self._client.restart(model, now=now), entry)
        entry.end()

    async def _change_launch(self, model: str) -> None:
        """A reload that changes what the model's process is started with."""
        found = await self._signals.find(model)
        row_limit, most = self._entries[model]["max_concurrency"], self._most[model]
        self._entries[model]["max_concurrency"] = most - 1 if row_limit == most else most
        entry = self._ledger.provocations.begin("other launch", model, loses_rows=False)
        self._ledger.provocations.lift(model)
        self._daemon.write_config(
            self._entries, self._supervisor
        )  # any reload may read it from now on
        await self._client.reload()
        if found is None:
            entry.end()
        else:
            self._signals.look_out(found[0], entry)

    async def _unload(self, model: str) -> None:
        """What runs is finished; what waits, or comes now, ends with `unloaded`."""
        self._is_up[model].clear()
        entry = self._ledger.provocations.begin("unload", model, loses_rows=False, unloads=True)
        await self._call(self._client.unload(model), entry)
        await self._call(self._client.load(model), entry)
        entry.end()
        self._is_up[model].set()

    async def _call(self, call: Awaitable[object], entry: Provocation) -> None:
        """A command may fail only because another fault struck the load that it waits for."""
        try:
            await call
        except RequestError as error:
            others = self._ledger.provocations.deaths_beside(entry)
            if error.code != "load_failed" or not others:
                what = f"{entry.kind} of {entry.model}: {error.code.value}: {error.message}"
                self._ledger.violate("command", what)
