"""Changes of the models' states, as they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxsup.client import Client


def state_changes(client: Client) -> Iterator[dict[str, Any]]:
    """The changes of state from the return of this call on, each with the time it arrived."""
    events = client.events()
    # The daemon answers in order: once it has answered this, no change is missed.
    client.ping()
    return (
        {"at": time.time(), **change} for change in events if change.get("from") != change.get("to")
    )
