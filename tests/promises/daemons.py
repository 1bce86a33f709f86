"""Daemons that a round begins with: without one that serves, nothing can be judged."""

from __future__ import annotations

from typing import Any

from mlxsup.client import Client

from support import daemon
from support.daemon import wait_for_state
from support.verdict import NotShown


class Daemon(daemon.Daemon):
    """See `support.daemon.Daemon`; one that does not start judges nothing."""

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """Starts it and returns when it answers.

        Raises:
            NotShown: it does not.
        """
        try:
            super().start(environment=environment)
        except AssertionError as error:
            raise NotShown(f"the daemon did not start: {error}") from error


def ready(client: Client, model: str, timeout_s: float = 120.0) -> dict[str, Any]:
    """Waits until a model is READY for the first time; returns its row.

    Raises:
        NotShown: it is not in time.
    """
    try:
        return wait_for_state(client, model, "READY", timeout_s)
    except AssertionError as error:
        raise NotShown(f"{model} was not READY to begin with: {error}") from error
