"""What a reload changes, before it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State, Wanted

from .errors import unknown_model
from .lifecycle.transitions import apply
from .lifecycle.triggers import Erased, Reconfigured, Removed
from .model import Model
from .settings import CoreSettings, ModelSettings


def changed_settings(old: CoreSettings, new: CoreSettings) -> list[str]:
    """The settings, by their keys, that a reload changes at once and that are about no model."""
    names = [
        one.name for one in fields(CoreSettings) if one.name not in ("budget", "prewarmed_bytes")
    ]
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


def reload_trigger(
    model: Model, entries: Mapping[ModelName, ModelSettings], drain_s: float
) -> Reconfigured | Removed:
    """Return what a reload puts to the life of a model that there is.

    Args:
        model: which.
        entries: of the configuration that was read, by name.
        drain_s: how long running requests may take if the process must end.
    """
    entry = entries.get(model.name)
    if entry is None:
        return Removed(drain_s=drain_s, error=unknown_model(model.name, entries))
    return Reconfigured(settings=entry, drain_s=drain_s)


def ends_process(models: Iterable[Model], entries: Sequence[ModelSettings]) -> bool:
    """True if a reload would end, now or once it is idle, the process of a model.

    Args:
        models: those that there are.
        entries: of the configuration that was read.
    """
    by_name = {entry.name: entry for entry in entries}
    return any(
        model.life.has_process
        and (
            (entry := by_name.get(model.name)) is None or entry.launch != model.life.settings.launch
        )
        for model in models
        if model.life.wanted is not Wanted.GONE
    )


def foreseen(
    models: Iterable[Model], entries: Sequence[ModelSettings], drain_s: float, now: float
) -> list[dict[str, Any]]:
    """Return what a reload would do to each model that it concerns, for `reload --dry-run`.

    The table of transitions is asked with copies of the lives, so it cannot differ from a reload.

    Returns:
        For each: `model`, `change` (`added`, `changed` or `removed`), `state` (None if it is new),
        `becomes` (None if nothing is left of it at once) and how many requests are `running`.
    """
    by_name = {entry.name: entry for entry in entries}
    there = {m.name: m for m in models if m.life.wanted is not Wanted.GONE}
    found: list[dict[str, Any]] = []
    for model in there.values():
        trigger = reload_trigger(model, by_name, drain_s)
        is_removed = isinstance(trigger, Removed)
        if isinstance(trigger, Reconfigured) and trigger.settings == model.life.settings:
            continue
        life = deepcopy(model.life)
        outcomes = apply(life, trigger, now)
        is_erased = any(isinstance(outcome, Erased) for outcome in outcomes)
        found.append(
            {
                "model": model.name,
                "change": "removed" if is_removed else "changed",
                "state": model.life.state.value,
                "becomes": None if is_erased else life.state.value,
                "running": len(model.batch.running),
            }
        )
    for entry in entries:
        if entry.name not in there:
            state = State.PENDING if entry.preload else State.STOPPED
            found.append(
                {
                    "model": entry.name,
                    "change": "added",
                    "state": None,
                    "becomes": state.value,
                    "running": 0,
                }
            )
    return found
