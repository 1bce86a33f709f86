"""What a reload would do to memory: the answer to `reload --dry-run`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Wanted

from .lifecycle.life import Life
from .lifecycle.transitions import apply
from .lifecycle.triggers import Erased
from .memory.need import Need
from .memory.planner import Refuse, Resident, Standing, Urgency, Wish, give_back, plan
from .memory.raising import bounded
from .model import Model
from .reload import reload_trigger
from .residents import residents_of
from .rows_memory import longest_stream
from .settings import CoreSettings, ModelSettings


def foreseen_memory(
    models: Iterable[Model],
    settings: CoreSettings,
    entries: Sequence[ModelSettings],
    needs: Mapping[ModelName, Need],
    now: float,
) -> dict[str, Any]:
    """How much more than the budget would be reserved, and what follows for whom; nothing changes.

    The table of transitions and the planner are asked with copies of the lives.

    Args:
        models: those that there are.
        settings: of the configuration that was read, with its budget.
        entries: of that configuration.
        needs: what its models were appraised at.
        now: monotonic seconds.

    Returns:
        `over_budget_bytes`; `evicts`, the names of the idle models that would be evicted at once;
        `still_over_bytes`, what only busy models could free; and `refuses`: a `model` and a
        `reason`, a phrase, for each that could not be loaded, whoever goes.
    """
    budget = settings.budget
    if budget is None:
        return {"over_budget_bytes": 0, "evicts": [], "still_over_bytes": 0, "refuses": []}
    pinned = {entry.name for entry in entries if entry.pinned}
    known = bounded(needs, pinned, budget.whole_bytes)
    there = list(_after(models, settings, entries, known, now))
    added = list(_added(there, entries, known))
    residents = [*residents_of(there, settings, now), *_pinned(added)]
    staying = [one for one in residents if one.standing is not Standing.LEAVING]
    evicts = give_back(residents, budget_bytes=budget.kept_bytes)
    reserved_bytes = sum(one.reserved_bytes for one in staying)
    busy = [one for one in staying if one.name not in evicts]
    least_bytes = sum(one.reserved_bytes - one.spare_bytes for one in busy)
    lives = [model.life for model in there if model.life.wanted is not Wanted.GONE] + added
    return {
        "over_budget_bytes": max(0, reserved_bytes - budget.kept_bytes),
        "evicts": list(evicts),
        "still_over_bytes": max(0, least_bytes - budget.kept_bytes),
        "refuses": list(_refused(lives, residents, budget.whole_bytes, now)),
    }


# ---------------------------------------------------------------- inside


def _after(
    models: Iterable[Model],
    settings: CoreSettings,
    entries: Sequence[ModelSettings],
    needs: Mapping[ModelName, Need],
    now: float,
) -> Iterator[Model]:
    """The models that there are, as they would be right after the reload."""
    by_name = {entry.name: entry for entry in entries}
    for model in models:
        life = deepcopy(model.life)
        life.stream_tokens = longest_stream(model)
        if life.name in by_name or life.wanted is not Wanted.GONE:
            outcomes = apply(life, reload_trigger(model, by_name, settings.drain_timeout_s), now)
            if any(isinstance(outcome, Erased) for outcome in outcomes):
                continue
        life.appraise(needs.get(life.name))
        yield replace(model, life=life)


def _added(
    there: Iterable[Model], entries: Sequence[ModelSettings], needs: Mapping[ModelName, Need]
) -> Iterator[Life]:
    old = {model.name for model in there}
    for entry in entries:
        if entry.name not in old:
            life = Life.new(entry, exit_grace_s=0.0, random=random.Random(0))
            life.appraise(needs.get(entry.name))
            yield life


def _pinned(added: Iterable[Life]) -> list[Resident]:
    return [
        Resident(
            name=one.name,
            reserved_bytes=one.reserved_bytes,
            standing=Standing.PINNED,
            never_bytes=one.pinned_bytes,
        )
        for one in added
        if one.reserved_bytes
    ]


def _refused(
    lives: Iterable[Life], residents: Sequence[Resident], whole_bytes: int, now: float
) -> Iterator[dict[str, str]]:
    """Whom no load could make room for: only what never goes is in the way."""
    for life in lives:
        wish = Wish(name=life.name, needed_bytes=life.needed_bytes, urgency=Urgency.COMMAND)
        others = [one for one in residents if one.name != life.name]
        verdict = plan(wish, others, budget_bytes=whole_bytes, now=now)
        if isinstance(verdict, Refuse):
            yield {"model": life.name, "reason": verdict.reason}
