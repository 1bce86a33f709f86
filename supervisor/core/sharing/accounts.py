"""Accounts: on whose behalf a request is, and what the configuration grants them.

Names can be invented and connections multiplied, so a name counts only if `[clients]` lists it;
otherwise the process behind the connection is the account, or its terminal session for requests
that name `terminal`.
"""

from __future__ import annotations

from typing import NewType

from ..events import ConnectionId
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
    """What each account is granted, when a waiting request moves up, and when a running one may be
    paused for it: `[clients]`, `aging_s` and `min_run_s` as they were last read.

    Args:
        settings: the configuration.

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
        """The configuration was read again."""
        self.aging_s = settings.aging_s
        self.min_run_s = settings.min_run_s
        self._clients = settings.clients
        self._others = settings.clients.get(ANYONE, _UNLISTED)

    def of(self, account: Account) -> ClientSettings:
        """What the account is granted: its own table, or else that of everybody else."""
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
            client: the name that the request gives.
            process: the process behind its connection, as the shell names it; empty if it could
                not be found, in which case the connection is the account.
            connection: who asks.
        """
        if client is not None and client != ANYONE and client in self._clients:
            return Account(client)
        return Account(process or f"connection {connection.hex()}")

    def table_of(self, account: Account) -> str:
        """The table of the configuration that grants an account what it has: `clients.NAME`."""
        return f"clients.{account}" if account in self._clients else f'clients."{ANYONE}"'
