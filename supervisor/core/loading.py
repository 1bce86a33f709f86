"""Decides which model may load: one load at a time, from the spawn to READY or the exit."""

from __future__ import annotations

from collections.abc import Iterable

from .lifecycle.states import Pending
from .model import Model


def next_loads(models: Iterable[Model]) -> list[Model]:
    """The models that may be spawned now: at most one normally and one after a crash.

    A load after a crash only waits for others of its kind, so that a model that was serving comes
    back without waiting for one that never was; every other load waits for all.
    """
    waiting: list[tuple[float, Model, bool]] = []
    is_crash_lane_busy = is_any_loading = False
    for model in models:
        if isinstance(model.life.phase, Pending):
            waiting.append((model.life.phase.since, model, model.life.phase.is_after_crash))
        elif model.life.is_loading:
            is_any_loading = True
            is_crash_lane_busy = is_crash_lane_busy or model.life.is_after_crash
    waiting.sort(key=lambda entry: entry[0])
    turns: list[Model] = []
    if not is_crash_lane_busy:
        turns += [model for _, model, is_after_crash in waiting if is_after_crash][:1]
    if not is_any_loading and not turns:
        turns += [model for _, model, is_after_crash in waiting if not is_after_crash][:1]
    return turns
