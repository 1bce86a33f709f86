"""Accounts: on whose behalf a request is, what that is granted, and what it has received.

Names can be invented and connections multiplied, so a name counts only if `[clients]` lists it;
otherwise the process behind the connection is the account, or its terminal session for requests
that name `terminal`.

The share of an account of one model is engine seconds over its weight. After Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 2024), who count tokens: the account with the
smallest counter is next, and idleness earns no credit, because an account joins the line at its
floor.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import NewType

from mlxsup.protocol.ids import ConnectionId

from ..settings import ANYONE, ClientSettings, CoreSettings

Account = NewType("Account", str)
"""A name that `[clients]` lists, or else the process behind a connection."""

_UNLISTED = ClientSettings()


def process_name(pid: int, start: str | int) -> str:
    """Return the name of the process behind a connection, whose pid another one may get later."""
    return f"{_beginning(pid)}{start}"


def _beginning(pid: int) -> str:
    return f"process {pid}@"


class Terms:
    """The terms of each account, when a waiting request moves up, and when a running one may be
    paused for it: `[clients]`, `aging_s` and `min_run_s` as they were last read.

    Attributes:
        gateway_pid: the process through which HTTP requests come; None: there is none. Without
            keys it is one account on behalf of many clients.
        aging_s: after each wait of this length a request moves up one class; 0 for never.
        min_run_s: for how long a request must have gained tokens before it is paused for another.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self.gateway_pid: int | None = None
        self.change(settings)

    def change(self, settings: CoreSettings) -> None:
        """Take the configuration that was read again."""
        self.aging_s = settings.aging_s
        self.min_run_s = settings.min_run_s
        self._clients = settings.clients
        self._others = settings.clients.get(ANYONE, _UNLISTED)

    def of(self, account: Account) -> ClientSettings:
        """Return what the account is granted: its own table, or else that of all others."""
        return self._clients.get(account, self._others)

    def most_waiting(self, account: Account, settings: CoreSettings) -> int:
        """Return how many requests of an account may wait; those of HTTP without a key leave room
        for one more client."""
        if own := self.of(account).max_queue:
            return own
        most = settings.max_queue_per_client
        if self.gateway_pid is not None and account.startswith(_beginning(self.gateway_pid)):
            most = max(most, settings.max_queue - most)
        return most

    def account(self, client: str | None, process: str, connection: ConnectionId) -> Account:
        """On whose behalf a request is.

        Names are only believed if the configuration lists them: with invented ones, or with
        many connections, a process would otherwise get the places and the share of many.

        Args:
            process: the process behind its connection, as the shell names it; empty if it could
                not be found, in which case the connection is the account.
        """
        if client is not None and client != ANYONE and client in self._clients:
            return Account(client)
        return Account(process or f"connection {connection.hex()}")

    def table_of(self, account: Account) -> str:
        """Return the table of the configuration that grants an account what it has:
        `clients.NAME`."""
        return f"clients.{account}" if account in self._clients else f'clients."{ANYONE}"'


MAX_ACCOUNTS = 4096
"""At most this many absent accounts are remembered; the least debt is forgotten first."""

COST_WEIGHT = 0.2
"""The weight of a new measurement in the running estimate of what a request costs."""

UNKNOWN_COST_S = 1.0
"""Engine seconds that a request is expected to cost before any has been measured."""


class Counters:
    """The counters of one model. A counter never falls while its account waits or runs.

    Attributes:
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
        """Return an account's counter, in engine seconds over its weight."""
        return self._of.get(account, 0.0)

    def expected(self, account: Account) -> float:
        """Return by how much one more request is expected to raise an account's counter."""
        cost_s = UNKNOWN_COST_S if self.cost_s is None else self.cost_s
        return cost_s / self.terms.of(account).weight

    def join(self, account: Account, present: Collection[Account]) -> None:
        """Let an account come that neither waits nor runs: idleness has earned it no credit.

        Args:
            present: the accounts that wait or run.
        """
        floor = self._floor(present)
        self._of[account] = max(self._of.get(account, floor), floor)
        if len(self._of) > MAX_ACCOUNTS + len(present) + 1:
            self._forget({*present, account, self._latest})

    def dispatched(self, account: Account) -> None:
        """Note that a request of this account was dispatched."""
        self._latest = account

    def charge(self, account: Account, engine_s: float) -> None:
        """Charge an account so much of the engine's time."""
        self._of[account] = self.of(account) + engine_s / self.terms.of(account).weight

    def learn(self, engine_s: float) -> None:
        """Learn what a request cost that has run to its end."""
        before_s = engine_s if self.cost_s is None else self.cost_s
        self.cost_s = before_s + COST_WEIGHT * (engine_s - before_s)

    def _floor(self, present: Collection[Account]) -> float:
        if present:
            return min(map(self.of, present))
        return 0.0 if self._latest is None else self.of(self._latest)

    def _forget(self, kept: Collection[Account | None]) -> None:
        """Forget the smallest counters, an eighth at once, so that it is rarely looked for."""
        absent = [account for account in self._of if account not in kept]
        excess = len(absent) - MAX_ACCOUNTS + MAX_ACCOUNTS // 8
        for account in heapq.nsmallest(excess, absent, key=self.of):
            del self._of[account]
