"""What a reload changes, before it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxsup.protocol.states import Wanted

from .model import Model
from .settings import ModelSettings


def differences(models: Iterable[Model], entries: Sequence[ModelSettings]) -> dict[str, list[str]]:
    """The names of the models that a reload adds, changes and removes.

    Args:
        models: those that there are.
        entries: of the configuration that was read.
    """
    old = {m.name: m.life.settings for m in models if m.life.wanted is not Wanted.GONE}
    new = {entry.name: entry for entry in entries}
    return {
        "added": [name for name in new if name not in old],
        "changed": [name for name in new if name in old and new[name] != old[name]],
        "removed": [name for name in old if name not in new],
    }
