"""Asks workers for the memory that they keep for reuse."""

from __future__ import annotations

from collections.abc import Iterable

from mlxsup.protocol.worker_messages import GiveBack

from .model import Model
from .outbox import Outbox


def ask_back(models: Iterable[Model], outbox: Outbox, now: float) -> None:
    """Asks the workers of these models, which are READY; the models remember when that was."""
    for model in models:
        model.asked_back_at = now
        outbox.tell(model.life, GiveBack())
