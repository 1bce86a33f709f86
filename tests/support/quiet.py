"""A moment at which nobody holds a request."""

from __future__ import annotations

from mlxsup.client import Client


def is_quiet(client: Client, model: str = "m") -> bool:
    """Whether neither the supervisor nor the worker holds any request of the model."""
    status = client.status()
    [found] = [r for r in status["models"] if r["name"] == model]
    return bool(
        (status["queue"]["waiting"], status["queue"]["clients"]) == (0, {})
        and found["running"] == []
        and found["queued"] == 0
        and found["held_by_worker"] == 0
    )
