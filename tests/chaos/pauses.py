"""Pauses by hand: whatever runs is paused, is held for a while, and must continue."""

from __future__ import annotations

import asyncio
import random

from mlxsup.client import AsyncClient, RequestError

from .asks import Open
from .ledger import Ledger
from .signals import Start
from support.eventually import INTERVAL_S

LONGEST_S = 1.5
"""So long a pause lasts at most, from when it was seen."""


class Pauses:
    """Pauses requests of others, one at a time for each request.

    Args:
        client: that gives the commands.
        ledger: where each is entered before it is given.
        dice: which request, and for how long.
        start: lets a pause last beside the next faults.
    """

    def __init__(
        self, client: AsyncClient, ledger: Ledger, dice: random.Random, start: Start
    ) -> None:
        self._client, self._ledger, self._dice, self._start = client, ledger, dice, start

    async def strike(self, kind: str, model: str) -> bool:
        """Starts one beside the next faults, of this model if it runs any; it counts once seen."""
        rows = (await self._client.status())["models"]
        running = {row["name"]: {*row["running"]} for row in rows}
        for name in (model, *running):
            found = [one for one in self._ledger.open_of(name) if one.may_pause]
            found = [one for one in found if one.id in running[name]]
            if found:
                self._start(self._pause(self._dice.choice(found)), kind, name)
                break
        return False

    async def _pause(self, one: Open) -> bool:
        """Whether it was seen to be paused; it may end before, or be refused because of that."""
        model, has_begun = one.ask.model, bool(one.tokens)
        one.pauses += 1
        one.is_being_paused = True
        try:
            await self._client.pause(one.id)
        except RequestError as error:
            one.is_being_paused = False
            self._check_refusal(error, f"pause of {one.id}")
            return False
        while one.id not in await self._listed(model, "paused"):
            if not self._ledger.is_open(one):
                return False
            await asyncio.sleep(INTERVAL_S)
        one.is_held = True
        one.seen_paused += has_begun
        await asyncio.sleep(self._dice.uniform(0.0, LONGEST_S))  # the pause itself, which lasts
        one.is_held = False
        await self._resume(one)
        one.is_being_paused = False
        return True

    async def _resume(self, one: Open) -> None:
        try:
            await self._client.resume(one.id)
        except RequestError as error:
            self._check_refusal(error, f"resume of {one.id}")
        if one.id in await self._listed(one.ask.model, "paused"):
            self._ledger.violate("pause", f"{one.id} is still paused after its resume")

    def _check_refusal(self, error: RequestError, what: str) -> None:
        if error.code != "invalid_request":
            self._ledger.violate("pause", f"{what}: {error.code.value}: {error.message}")

    async def _listed(self, model: str, where: str) -> list[str]:
        rows = (await self._client.status())["models"]
        ids: list[str] = next(row[where] for row in rows if row["name"] == model)
        return ids
