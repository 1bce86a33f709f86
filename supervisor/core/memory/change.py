"""The one change of a configuration that makes its models fit: found by trying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import size_text

from .budget import Budget
from .need import Need
from .plan import Candidate, make_plan

LEAST_CONTEXT_TOKENS = 512
"""A context shorter than this is not suggested: hardly a prompt fits."""

STEP_TOKENS = 256
"""Suggested contexts are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseBudget:
    """Allow more; the machine has it.

    Attributes:
        size_bytes: the least budget that is enough.
    """

    size_bytes: int

    def __str__(self) -> str:
        return f'set memory_budget to at least "{size_text(self.size_bytes)}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerContext:
    """Give models a shorter context.

    Attributes:
        models: each of them gets it.
        tokens: the longest that is enough.
        saved_bytes: what these models need less.
    """

    models: tuple[ModelName, ...]
    tokens: int
    saved_bytes: int

    def __str__(self) -> str:
        saves = f"which saves {size_text(self.saved_bytes)}"
        return f"set context_length = {self.tokens} for {_names(self.models)}, {saves}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetMemory:
    """Leave out a model's `memory`, which allows it more than it needs.

    Attributes:
        model: the model.
        needed_bytes: what it needs.
    """

    model: ModelName
    needed_bytes: int

    def __str__(self) -> str:
        needs = f"it needs {size_text(self.needed_bytes)}"
        return f'set memory = "auto" for {self.model}: {needs}'


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOnRequest:
    """Load models only when somebody asks for them, in place of others.

    Attributes:
        models: the fewest that are enough.
    """

    models: tuple[ModelName, ...]

    def __str__(self) -> str:
        takes = "takes its turn" if len(self.models) == 1 else "take their turns"
        return f"set preload = false for {_names(self.models)}, which then {takes} with the others"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """Nothing in the configuration helps.

    Attributes:
        size_bytes: the least budget that is enough.
        budget_bytes: what there is.
        largest: the model that needs the most.
        largest_bytes: what it needs.
    """

    size_bytes: int
    budget_bytes: int
    largest: ModelName
    largest_bytes: int

    def __str__(self) -> str:
        return (
            f"no single setting is enough: these models need {size_text(self.size_bytes)}, but "
            f"the budget is {size_text(self.budget_bytes)}; the largest is {self.largest} with "
            f"{size_text(self.largest_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut:
    """Do without a model that does not even fit alone.

    Attributes:
        model: the model.
        needed_bytes: what it needs.
        budget_bytes: what there is.
    """

    model: ModelName
    needed_bytes: int
    budget_bytes: int

    def __str__(self) -> str:
        return (
            f"remove {self.model}: it alone needs {size_text(self.needed_bytes)}, but the "
            f"budget is {size_text(self.budget_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin:
    """Let models go for others though they are pinned.

    Attributes:
        models: the fewest that are enough.
    """

    models: tuple[ModelName, ...]

    def __str__(self) -> str:
        return f"set pinned = false for {_names(self.models)}"


Change = RaiseBudget | LowerContext | ForgetMemory | Unpin | LoadOnRequest | LeaveOut | MoreMemory


def find_change(candidates: Sequence[Candidate], budget: Budget) -> Change | None:
    """The change that costs least and makes everything fit; None if everything does.

    Tried in this order: a larger budget, if the configuration sets it lower than it may be; a
    shorter context for one model, then for all; an automatic `memory`; models no longer pinned;
    models loaded on request only; one model less. If none of them is enough, how much memory is.
    """
    if make_plan(candidates, budget.size_bytes).fits:
        return None
    required = required_bytes(candidates)
    if budget.automatic_bytes is not None and required <= budget.automatic_bytes:
        return RaiseBudget(size_bytes=required)
    for change in _settings(candidates, budget.size_bytes):
        changed, size_bytes = apply_change(change, candidates, budget.size_bytes)
        if make_plan(changed, size_bytes).fits:
            return change
    largest = max(candidates, key=lambda one: one.need.needed_bytes)
    return MoreMemory(
        size_bytes=required,
        budget_bytes=budget.size_bytes,
        largest=largest.model,
        largest_bytes=largest.need.needed_bytes,
    )


def required_bytes(candidates: Sequence[Candidate]) -> int:
    """The least budget in which everything fits: those that stay together, each other one next to
    the pinned ones alone."""
    pinned = sum(one.need.needed_bytes for one in candidates if one.is_pinned)
    staying = (one for one in candidates if one.is_resident or one.is_pinned)
    together = sum(one.need.needed_bytes for one in staying)
    others = (one.need.needed_bytes for one in candidates if not one.is_pinned)
    return max(together, pinned + max(others, default=0))


def apply_change(
    change: Change, candidates: Sequence[Candidate], budget_bytes: int
) -> tuple[list[Candidate], int]:
    """The models and the budget once somebody has followed the advice."""
    match change:
        case RaiseBudget(size_bytes=size) | MoreMemory(size_bytes=size):
            return list(candidates), size
        case LowerContext(models=models, tokens=tokens):
            lowered = [
                replace(one, need=_with_context(one.need, tokens)) if one.model in models else one
                for one in candidates
            ]
            return lowered, budget_bytes
        case ForgetMemory(model=model):
            automatic = [
                replace(one, need=replace(one.need, given_bytes=None))
                if one.model == model
                else one
                for one in candidates
            ]
            return automatic, budget_bytes
        case Unpin(models=models):
            loose = [
                replace(one, is_pinned=one.is_pinned and one.model not in models)
                for one in candidates
            ]
            return loose, budget_bytes
        case LoadOnRequest(models=models):
            waiting = [
                replace(one, is_resident=one.is_resident and one.model not in models)
                for one in candidates
            ]
            return waiting, budget_bytes
        case LeaveOut(model=model):
            return [one for one in candidates if one.model != model], budget_bytes


def _settings(candidates: Sequence[Candidate], budget_bytes: int) -> Iterator[Change]:
    """Changes to try, whoever costs less first."""
    each = [_lower_context([one], candidates, budget_bytes) for one in candidates]
    found = [change for change in each if change is not None]
    yield from sorted(found, key=lambda change: -change.tokens)
    together = _lower_context(list(candidates), candidates, budget_bytes)
    if together is not None:
        yield together
    for one in candidates:
        needed = replace(one.need, given_bytes=None).needed_bytes
        if one.need.given_bytes is not None and needed < one.need.given_bytes:
            yield ForgetMemory(model=one.model, needed_bytes=needed)
    pinned = [one.model for one in candidates if one.is_pinned]
    for count in range(1, len(pinned) + 1):
        yield Unpin(models=tuple(pinned[-count:]))
    residents = [one.model for one in candidates if one.is_resident and not one.is_pinned]
    # The last ones first: the order of the file is that of importance.
    for count in range(1, len(residents) + bool(pinned)):
        yield LoadOnRequest(models=tuple(residents[-count:]))
    for one in candidates:
        needed = one.need.needed_bytes
        if len(candidates) > 1 and needed > budget_bytes:
            yield LeaveOut(model=one.model, needed_bytes=needed, budget_bytes=budget_bytes)


def _lower_context(
    chosen: Sequence[Candidate], candidates: Sequence[Candidate], budget_bytes: int
) -> LowerContext | None:
    """The longest context of the chosen models with which everything fits; None if there is none
    or they would not need less."""
    automatic = [one for one in chosen if one.need.given_bytes is None]
    most = max((one.need.least_tokens for one in automatic), default=0)

    def change_to(tokens: int) -> LowerContext:
        shortened = [one for one in automatic if one.need.least_tokens > tokens]
        saved = sum(
            one.need.needed_bytes - _with_context(one.need, tokens).needed_bytes
            for one in shortened
        )
        models = tuple(one.model for one in shortened)
        return LowerContext(models=models, tokens=tokens, saved_bytes=saved)

    def is_enough(steps: int) -> bool:
        changed, size_bytes = apply_change(change_to(steps * STEP_TOKENS), candidates, budget_bytes)
        return make_plan(changed, size_bytes).fits

    fits, too_long = LEAST_CONTEXT_TOKENS // STEP_TOKENS, most // STEP_TOKENS + 1
    if fits >= too_long or not is_enough(fits):
        return None
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if is_enough(middle):
            fits = middle
        else:
            too_long = middle
    return change_to(fits * STEP_TOKENS)


def _with_context(need: Need, tokens: int) -> Need:
    """As the appraiser would say if the entry set this `context_length`."""
    context = min(tokens, need.context_tokens)
    return replace(need, context_tokens=context, least_tokens=context)


def _names(models: Sequence[ModelName]) -> str:
    if len(models) < 2:
        return "".join(models)
    return f"{', '.join(models[:-1])} and {models[-1]}"
