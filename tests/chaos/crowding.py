"""Models that do not fit together: what is reserved, and who goes for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mlxsup.client import AsyncClient

from .ledger import Ledger
from support.eventually import INTERVAL_S

EVICTION = "eviction"


class Crowding:
    """Watches a daemon with a memory budget.

    Args:
        ledger: where evictions are entered.
        models: the entries by name.
    """

    def __init__(self, ledger: Ledger, models: Mapping[str, Mapping[str, Any]]) -> None:
        self._ledger, self._models = ledger, models

    def is_eviction(self, change: Mapping[str, Any]) -> bool:
        """Whether a change of a model's state is one; it must not hit anybody who is in use."""
        if (change["to"], change["why"]) != ("DRAINING", "evict") or change["from"] != "READY":
            return False
        model = change["model"]
        entry = self._ledger.provocations.begin(EVICTION, model, loses_rows=False)
        entry.end()
        if self._models[model].get("pinned"):
            self._ledger.violate("pinned", f"{model} was evicted: {change['note']}")
        held = [one.id for one in self._ledger.open_of(model) if one.is_held]
        if held:
            self._ledger.violate("evicted", f"{model} with {held} paused: {change['note']}")
        return True

    async def sample(self, client: AsyncClient) -> None:
        """Looks again and again at what is reserved."""
        while True:
            memory = (await client.status())["memory"]
            reserved, budget = memory["reserved_bytes"], memory["budget_bytes"]
            if budget is not None and reserved > budget:
                self._ledger.violate("memory", f"{reserved} bytes of {budget} are reserved")
            await asyncio.sleep(INTERVAL_S)
