"""Changes of the models' states, and of how far their loads are, as they arrive."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxsup.client import Client

MAX_CHANGES = 200
"""How many wait for a reader that is held up: the latest."""


def state_changes(client: Client) -> Iterator[dict[str, Any]]:
    """Return the changes of state from the return of this call on, each with its time."""
    return (change for change in _changes(client) if is_step(change))


def is_step(change: dict[str, Any]) -> bool:
    """True if the state has changed, and not only how far a load is."""
    return bool(change.get("from") != change.get("to"))


class Changes:
    """All changes from now on, which can be waited for up to a time.

    The thread that hears them ends with the client.

    Args:
        client: where to hear them; this takes its one subscription.
    """

    def __init__(self, client: Client) -> None:
        self._arrived = threading.Condition()
        self._heard: deque[dict[str, Any]] = deque(maxlen=MAX_CHANGES)
        self._error: Exception | None = None
        changes = _changes(client)
        hearing = threading.Thread(
            target=self._hear, args=(changes,), name="mlxsup-changes", daemon=True
        )
        hearing.start()

    def wait(self, limit_s: float | None = None) -> list[dict[str, Any]]:
        """Wait for a change, and return it and all that have arrived with it.

        Args:
            limit_s: for how long to wait at most; None: however long it takes.

        Returns:
            None of them if the time is over.

        Raises:
            RequestError, ConnectionLost: there will be none any more.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._heard or self._error, limit_s)
            heard = list(self._heard)
            self._heard.clear()
            if self._error is not None and not heard:
                raise self._error
        return heard

    def _hear(self, changes: Iterator[dict[str, Any]]) -> None:
        from mlxsup.client import ConnectionLost, RequestError

        try:
            for change in changes:
                with self._arrived:
                    self._heard.append(change)
                    self._arrived.notify_all()
        except (ConnectionLost, RequestError) as error:
            with self._arrived:
                self._error = error
                self._arrived.notify_all()


def _changes(client: Client) -> Iterator[dict[str, Any]]:
    events = client.events()
    # The daemon answers in order: once it has answered this, no change is missed.
    client.ping()
    return ({"at": time.time(), **change} for change in events)
