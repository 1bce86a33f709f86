"""The changes of the models' states, as they are heard of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxsup.client import Client


def state_changes(client: Client) -> Iterator[dict[str, Any]]:
    """The changes of state from the return of this call on, each with the time it was heard of."""
    events = client.events()
    # The daemon answers in order: once this is answered, no change is missed.
    client.ping()
    return (
        {"at": time.time(), **change} for change in events if change.get("from") != change.get("to")
    )
