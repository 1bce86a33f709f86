"""What a reload changes, before it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from mlxsup.protocol.states import Wanted

from .model import Model
from .settings import CoreSettings, ModelSettings


def changed_settings(old: CoreSettings, new: CoreSettings) -> list[str]:
    """The settings, by their keys, that a reload changes at once and that are about no model."""
    names = [one.name for one in fields(CoreSettings) if one.name not in ("budget", "spare_bytes")]
    changed = [name for name in names if getattr(old, name) != getattr(new, name)]
    is_other_budget = _size_of(old) != _size_of(new)
    return [*changed, "memory_budget"] if is_other_budget else changed


def _size_of(settings: CoreSettings) -> int | None:
    return None if settings.budget is None else settings.budget.whole_bytes


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
