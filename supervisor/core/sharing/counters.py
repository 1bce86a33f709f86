"""What each account has received from one model: engine seconds over its weight.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), who count tokens: the
account with the smallest counter is next, and idleness earns no credit, because an account joins
the line at its floor.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from .accounts import Account, Terms

MAX_ACCOUNTS = 4096
"""At most this many absent accounts are remembered; the least debt is forgotten first."""

COST_WEIGHT = 0.2
"""The weight of a new measurement in the running estimate of what a request costs."""

UNKNOWN_COST_S = 1.0
"""Engine seconds that a request is expected to cost before any has been measured."""


class Counters:
    """The counters of one model. A counter never falls while its account waits or runs.

    Args:
        terms: the weights of the accounts.

    Attributes:
        terms: the weights of the accounts.
        cost_s: engine seconds of a whole request, estimated from earlier ones; None before any
            has ended.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.cost_s: float | None = None
        # Bounded: MAX_ACCOUNTS, and those that wait or run.
        self._of: dict[Account, float] = {}
        self._latest: Account | None = None

    def __len__(self) -> int:
        return len(self._of)

    def of(self, account: Account) -> float:
        """An account's counter, in engine seconds over its weight."""
        return self._of.get(account, 0.0)

    def expected(self, account: Account) -> float:
        """By how much one more request is expected to raise an account's counter."""
        cost_s = UNKNOWN_COST_S if self.cost_s is None else self.cost_s
        return cost_s / self.terms.of(account).weight

    def join(self, account: Account, present: Collection[Account]) -> None:
        """An account comes that neither waits nor runs: idleness has earned it no credit.

        Args:
            account: who comes.
            present: the accounts that wait or run.
        """
        floor = self._floor(present)
        self._of[account] = max(self._of.get(account, floor), floor)
        if len(self._of) > MAX_ACCOUNTS + len(present) + 1:
            self._forget({*present, account, self._latest})

    def dispatched(self, account: Account) -> None:
        """A request of this account was dispatched."""
        self._latest = account

    def charge(self, account: Account, engine_s: float) -> None:
        """An account has received this much of the engine's time."""
        self._of[account] = self.of(account) + engine_s / self.terms.of(account).weight

    def learn(self, engine_s: float) -> None:
        """A request has run to its end, and this is what it cost."""
        before_s = engine_s if self.cost_s is None else self.cost_s
        self.cost_s = before_s + COST_WEIGHT * (engine_s - before_s)

    def _floor(self, present: Collection[Account]) -> float:
        if present:
            return min(map(self.of, present))
        return 0.0 if self._latest is None else self.of(self._latest)

    def _forget(self, kept: Collection[Account | None]) -> None:
        """Forgets the smallest counters, an eighth at once, so that it is rarely looked for."""
        absent = [account for account in self._of if account not in kept]
        excess = len(absent) - MAX_ACCOUNTS + MAX_ACCOUNTS // 8
        for account in heapq.nsmallest(excess, absent, key=self.of):
            del self._of[account]
