"""Faults that strike a daemon again and again, each kind as often as any other."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from fuzz.frames import hostile_frames
from mlxsup.client import AsyncClient, RequestError
from support.daemon import Daemon
from support.raw_client import RawClient

from .ledger import Ledger
from .setting import POISON, SIGNALS, Setting

ABANDONED = 5
GARBAGE = 20
Strike = Callable[[str], Awaitable[bool]]


class Faults:
    """Strikes one model after the other until it is cancelled.

    Args:
        daemon: whose workers are struck.
        setting: which faults there are, and how often they come.
        seed: of their order and times.
        ledger: where the poisoned requests are entered.

    Attributes:
        counts: how many there were of each kind.
        recovery_s: from each signal to READY, by kind.
    """

    def __init__(self, daemon: Daemon, setting: Setting, seed: int, ledger: Ledger) -> None:
        self._daemon, self._setting, self._ledger = daemon, setting, ledger
        self._dice = random.Random(seed)
        self._poisons = 0
        self._poisoned: set[asyncio.Task[None]] = set()
        self._struck: dict[tuple[str, int], tuple[str, float]] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(setting.kinds, 0))
        self.recovery_s: defaultdict[str, list[float]] = defaultdict(list)

    async def run(self, ended: asyncio.Event) -> None:
        """Strikes until told to end, and until those who were poisoned have been answered."""
        async with AsyncClient(self._daemon.endpoint) as client:
            watcher = asyncio.create_task(self._watch(client))
            order: list[str] = []
            while not ended.is_set():
                if not order:  # each kind once before any comes again
                    order = self._dice.sample(self._setting.kinds, len(self._setting.kinds))
                kind = order.pop()
                if await self._strike(client, kind, self._dice.choice([*self._setting.models])):
                    self.counts[kind] += 1
                pause_s = self._dice.uniform(0.5, 1.5) * self._setting.pause_s
                try:
                    await asyncio.wait_for(ended.wait(), pause_s)
                except TimeoutError:
                    pass
            await asyncio.gather(*self._poisoned)
            watcher.cancel()

    async def _strike(self, client: AsyncClient, kind: str, model: str) -> bool:
        """Returns whether there was something to strike."""
        if kind in SIGNALS:
            return await self._signal(client, model, kind)
        match kind:
            case "restart" | "restart --now":
                await self._restart(client, model, now=kind == "restart --now")
            case "reload":
                assert self._daemon.process is not None
                self._daemon.process.send_signal(signal.SIGHUP)
            case "client gone":
                await self._leave(model)
            case "garbage":
                await asyncio.to_thread(self._send_garbage)
            case _:
                assert kind == POISON
                self._poison(client, model)
        return True

    async def _signal(self, client: AsyncClient, model: str, name: str) -> bool:
        rows = (await client.status())["models"]
        row: dict[str, Any] = next(r for r in rows if r["name"] == model)
        if row["pid"] is None:
            return False
        # Known before the blow: the news of its end may come before this task goes on.
        self._struck.setdefault((model, row["generation"]), (name, time.monotonic()))
        try:
            os.kill(row["pid"], getattr(signal, name))
        except ProcessLookupError:
            return False
        return True

    async def _watch(self, client: AsyncClient) -> None:
        """Takes the time from each signal until the next life is READY."""
        async for change in client.events():
            if change.get("to") == "READY" and change["from"] == "LOADING":
                struck = self._struck.pop((change["model"], change["generation"] - 1), None)
                if struck is not None:
                    kind, at = struck
                    self.recovery_s[kind].append(time.monotonic() - at)

    @staticmethod
    async def _restart(client: AsyncClient, model: str, *, now: bool) -> None:
        try:
            await client.restart(model, now=now)
        except RequestError as error:
            if error.code != "load_failed":  # another fault struck the new life
                raise

    async def _leave(self, model: str) -> None:
        """A client that asks, and is gone in the middle of its answers."""
        async with AsyncClient(self._daemon.endpoint) as client:
            streams = [
                client.generate(model, prompt=f"left {n}", max_tokens=self._setting.tokens)
                for n in range(ABANDONED)
            ]
            await client.ping()
            del streams

    def _send_garbage(self) -> None:
        with RawClient(self._daemon.endpoint) as client:
            for _ in range(GARBAGE):
                client.say(hostile_frames(self._dice))
            client.hear_any()

    def _poison(self, client: AsyncClient, model: str) -> None:
        self._poisons += 1
        prompt = f"[[fault crash=SIGSEGV at=3]] {self._poisons}"
        task = asyncio.create_task(self._ask_poisoned(client, model, prompt))
        self._poisoned.add(task)
        task.add_done_callback(self._poisoned.discard)

    async def _ask_poisoned(self, client: AsyncClient, model: str, prompt: str) -> None:
        try:
            await client.complete(model, prompt=prompt, max_tokens=9)
        except RequestError as error:
            self._ledger.poisoned(str(error.code.value))
        else:
            self._ledger.poisoned("finished")
