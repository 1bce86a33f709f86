"""Models that do not fit together: who is there at once, and who goes for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mlxsup.client import AsyncClient
from mlxsup.protocol.states import HAS_PROCESS
from mlxsup.supervisor.config.values import parse_size

from .ledger import Ledger
from support.eventually import INTERVAL_S

EVICTION = "eviction"


class Crowding:
    """Watches a daemon, which may have a memory budget.

    Args:
        ledger: where evictions are entered.
        models: the entries by name; with a budget, each says how much it takes.
        budget: as in the configuration; None: there is none.
    """

    def __init__(
        self, ledger: Ledger, models: Mapping[str, Mapping[str, Any]], budget: str | None
    ) -> None:
        self._ledger, self._models = ledger, models
        self._budget_bytes = None if budget is None else parse_size(budget)

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
        """Looks again and again at which models have processes, and adds up what those take."""
        while self._budget_bytes is not None:
            rows = (await client.status())["models"]
            there = [row["name"] for row in rows if row["state"] in HAS_PROCESS]
            needed_bytes = sum(parse_size(self._models[name]["memory"]) for name in there)
            if needed_bytes > self._budget_bytes:
                self._ledger.violate("memory", f"{there} are there at once")
            await asyncio.sleep(INTERVAL_S)
