"""Faults that strike a daemon again and again, each kind as often as any other."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from mlxsup.client import AsyncClient, ConnectionLost

from .commands import Commands
from .crowding import EVICTION, Crowding
from .inside import Inside
from .ledger import Ledger
from .neighbours import Neighbours
from .pauses import Pauses
from .setting import CLIENTS, COMMANDS, INSIDE, PAUSES, SIGNALS, Setting
from .signals import Signals
from support.daemon import Daemon
from support.eventually import INTERVAL_S

BETWEEN = 4
"""As many requests finish between two faults, however slow the machine is: faults that come faster
than models load would only show models that load."""


class Faults:
    """Strikes one model after the other until the requests are over.

    Args:
        daemon: whose workers are struck.
        setting: which faults there are, and how often they come.
        seed: of their order and times.
        ledger: where each is entered before it strikes.
        new_number: gives the numbers of the requests that are faults themselves.

    Attributes:
        counts: how many there were of each kind.
        recovery_s: from each signal to READY, by kind.
        is_up: by model; clear while it is unloaded on purpose.
    """

    def __init__(
        self,
        daemon: Daemon,
        setting: Setting,
        seed: int,
        ledger: Ledger,
        new_number: Callable[[], int],
    ) -> None:
        self._daemon, self._setting, self._ledger = daemon, setting, ledger
        self._dice = random.Random(seed)
        self._new_number = new_number
        self._under_way: set[asyncio.Task[None]] = set()
        self._crowding = Crowding(ledger, setting.models, setting.supervisor.get("memory_budget"))
        counted = (*setting.kinds, *setting.follows)
        self.counts: Counter[str] = Counter(dict.fromkeys(counted, 0))
        self.recovery_s: defaultdict[str, list[float]] = defaultdict(list)
        self.is_up = {model: asyncio.Event() for model in setting.models}
        for event in self.is_up.values():
            event.set()

    async def run(self, ended: asyncio.Event) -> None:
        """Strikes until the event is set, and until the effect of each fault has been seen."""
        async with AsyncClient(self._daemon.endpoint) as client:
            watcher = asyncio.create_task(self._watch(client))
            sampler = asyncio.create_task(self._crowding.sample(client))
            signals = Signals(client, self._daemon, self._ledger, self._start)
            commands = Commands(client, self._daemon, self._setting, self._ledger, self.is_up,
                                signals)  # fmt: skip
            neighbours = Neighbours(self._daemon.endpoint, self._dice)
            inside = Inside(self._daemon.endpoint, self._setting, self._ledger, signals, commands,
                            self._new_number, self._start)  # fmt: skip
            pauses = Pauses(client, self._ledger, self._dice, self._start)
            order: list[str] = []
            try:
                while not ended.is_set():
                    if not order:  # each kind once before any comes again
                        order = self._dice.sample(self._setting.kinds, len(self._setting.kinds))
                    kind = order.pop()
                    models = self._dice.sample([*self._setting.models], len(self._setting.models))
                    doer = self._doer(kind, signals, commands, neighbours, inside, pauses)
                    if kind in COMMANDS:  # they wait until the model is READY
                        self._command(commands, kind, models)
                    elif doer is signals:
                        self.counts[kind] += await self._strike_any(signals, kind, models)
                    else:
                        strike = doer.strike(kind, models[0])
                        self.counts[kind] += await self._within_limit(strike, kind, models[0])
                    await self._pause(ended)
                while self._under_way:
                    await asyncio.wait(self._under_way)
                await client.ping()
                await asyncio.sleep(0)  # what came before the answer is read first
            except ConnectionLost as error:
                self._ledger.violate("connection", f"of the faults: {error.message}")
            finally:
                for task in (watcher, sampler, *self._under_way):
                    task.cancel()
                inside.close()

    async def _pause(self, ended: asyncio.Event) -> None:
        """Until the next fault is due, or the requests are over."""
        least = self._ledger.ends["finished"] + BETWEEN
        pause_s = self._dice.uniform(0.5, 1.5) * self._setting.pause_s
        while True:
            try:
                await asyncio.wait_for(ended.wait(), pause_s)
                return
            except TimeoutError:
                pause_s = INTERVAL_S
            if self._ledger.ends["finished"] >= least:
                return

    def _command(self, commands: Commands, kind: str, models: list[str]) -> None:
        """Gives a command to the first of these models that has none under way: on a busy machine
        they would pile up, and their models do nothing but load."""
        model = next((model for model in models if not commands.has_one(model)), None)
        if model is not None:
            self._start(commands.strike(kind, model), kind, model)

    async def _strike_any(self, signals: Signals, kind: str, models: list[str]) -> bool:
        """Strikes the first of these models that has a process which may be struck."""
        for model in models:
            if await self._within_limit(signals.strike(kind, model), kind, model):
                return True
        return False

    @staticmethod
    def _doer(
        kind: str,
        signals: Signals,
        commands: Commands,
        neighbours: Neighbours,
        inside: Inside,
        pauses: Pauses,
    ) -> Signals | Commands | Neighbours | Inside | Pauses:
        if kind in COMMANDS:
            return commands
        if kind in CLIENTS:
            return neighbours
        if kind in INSIDE:
            return inside
        if kind in PAUSES:
            return pauses
        return signals

    async def _within_limit(self, strike: Coroutine[Any, Any, bool], kind: str, model: str) -> bool:
        """Whether it struck; one that does not end is a violation."""
        try:
            async with asyncio.timeout(self._setting.end_limit_s):
                return await strike
        except TimeoutError:
            limit_s = self._setting.end_limit_s
            self._ledger.violate("liveness", f"{kind} of {model} did not end within {limit_s:g} s")
            return False

    def _start(self, work: Coroutine[Any, Any, bool], kind: str, model: str) -> None:
        """Lets what a fault leads to be seen while others strike; counts it if it struck."""

        async def run() -> None:
            if await self._within_limit(work, kind, model) and kind in (
                *INSIDE,
                *COMMANDS,
                *PAUSES,
            ):
                self.counts[kind] += 1

        task = asyncio.create_task(run())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _watch(self, client: AsyncClient) -> None:
        """Takes the time from each signal until the next life is READY, and counts evictions."""
        async for change in client.events():
            if self._crowding.is_eviction(change):
                self.counts[EVICTION] += 1
            if change.get("to") == "READY" and change["from"] == "LOADING":
                model, now = change["model"], time.monotonic()
                for entry in self._ledger.provocations.take_unrecovered(model, SIGNALS):
                    self.recovery_s[entry.kind].append(now - entry.begun_s)
