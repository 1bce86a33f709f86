"""Which models of a configuration fit into the budget together, with how much context, and the one
change that makes them fit: the answer of `mlxsup plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import size_text

from .budget import Budget
from .need import Need
from .planner import Fits, FitsWithout, find_room, listed


def pins_problem(pinned: Mapping[ModelName, int], budget_bytes: int) -> str:
    """Return what is wrong with a configuration whose pinned models exceed the budget; empty if
    nothing.

    Args:
        pinned: what each of them needs in bytes, by name.
        budget_bytes: what all models may take together.
    """
    total = sum(pinned.values())
    if total <= budget_bytes:
        return ""
    names = listed(f"{name} ({size_text(size)})" for name, size in pinned.items())
    return (
        f"the pinned models {names} need {size_text(total)} together, but the memory budget is "
        f"{size_text(budget_bytes)}; unpin one, or raise supervisor.memory_budget"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model that is to be served.

    Attributes:
        model: its name.
        need: what it needs.
        is_resident: whether it is to be loaded all the time; otherwise on request, when others may
            go for it.
        is_pinned: whether it never goes for others, and its memory is kept even while it is not
            loaded.
    """

    model: ModelName
    need: Need
    is_resident: bool
    is_pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What becomes of a model.

    Attributes:
        model: its name.
        is_placed: whether it is loaded next to those before it.
        goes: who has to go for it, if it is not; empty if that does not help.
        missing_bytes: what it lacks even if all others have gone; 0: it can be loaded.
        context_tokens: the longest row that it has memory for; 0: not even one of a token.
        rows: how many rows of that length it has memory for at the same time.
        memory_bytes: what it may take: at least what it needs, and its part of what is left.
    """

    model: ModelName
    is_placed: bool
    goes: tuple[ModelName, ...] = ()
    missing_bytes: int = 0
    context_tokens: int
    rows: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What fits.

    Attributes:
        placements: of all candidates, in their order.
        reserved_bytes: what those that are loaded need together, and the pinned ones.
        fits: whether all that are to be resident are, and each of the others can be loaded.
    """

    placements: tuple[Placement, ...]
    reserved_bytes: int
    fits: bool


def make_plan(candidates: Sequence[Candidate], budget_bytes: int) -> Plan:
    """Load models in their order as long as they fit, the pinned ones first, and look what the
    others would displace.

    What is left goes to the caches of those that are loaded: first until a row of each can have
    its whole context, then for more rows, in equal parts. Who has to go for another model goes in
    the order of the candidates, as those do that nobody has used yet.

    Args:
        candidates: the models.
        budget_bytes: what all of them may take together.
    """
    needs = {one.model: one.need for one in candidates}
    reserved: dict[ModelName, int] = {}
    pinned = [one for one in candidates if one.is_pinned]
    for one in (*pinned, *(one for one in candidates if not one.is_pinned)):
        if one.is_resident or one.is_pinned:
            size = one.need.needed_bytes
            room = find_room(size, budget_bytes=budget_bytes, reserved=reserved, may_go=())
            if isinstance(room, Fits):
                reserved[one.model] = size
    loaded = {one.model: one.need for one in candidates if one.is_resident}
    taken = {name: size for name, size in reserved.items() if name in loaded}
    kept_bytes = sum(reserved.values()) - sum(taken.values())
    granted = _share_out({name: needs[name] for name in taken}, taken, budget_bytes - kept_bytes)
    may_go = [one.model for one in candidates if one.model in taken and not one.is_pinned]
    placements = tuple(
        _placed(one, granted[one.model])
        if one.model in granted
        else _displacing(one, reserved, may_go, budget_bytes)
        for one in candidates
    )
    fits = all(
        place.is_placed or (not one.is_resident and not place.missing_bytes)
        for one, place in zip(candidates, placements, strict=True)
    )
    return Plan(placements=placements, reserved_bytes=sum(reserved.values()), fits=fits)


def _placed(candidate: Candidate, memory_bytes: int) -> Placement:
    need = candidate.need
    tokens = need.tokens_in(memory_bytes)
    return Placement(
        model=candidate.model,
        is_placed=True,
        context_tokens=tokens,
        rows=need.rows_in(memory_bytes, longest=tokens),
        memory_bytes=memory_bytes,
    )


def _displacing(
    candidate: Candidate,
    reserved: Mapping[ModelName, int],
    may_go: Sequence[ModelName],
    budget_bytes: int,
) -> Placement:
    """One that is not loaded: who would have to go for it, and what it could have then."""
    need = candidate.need
    size = need.needed_bytes
    others = {name: held for name, held in reserved.items() if name != candidate.model}
    room = find_room(size, budget_bytes=budget_bytes, reserved=others, may_go=may_go)
    if not isinstance(room, Fits | FitsWithout):
        tokens = need.tokens_in(min(size, budget_bytes))
        return Placement(
            model=candidate.model,
            is_placed=False,
            missing_bytes=room.missing_bytes,
            context_tokens=tokens,
            rows=1 if tokens else 0,
            memory_bytes=0,
        )
    memory_bytes = min(size + room.spare_bytes, max(size, need.wanted_bytes))
    tokens = need.tokens_in(memory_bytes)
    return Placement(
        model=candidate.model,
        is_placed=False,
        goes=room.models if isinstance(room, FitsWithout) else (),
        context_tokens=tokens,
        rows=need.rows_in(memory_bytes, longest=tokens),
        memory_bytes=memory_bytes,
    )


def _share_out(
    needs: Mapping[ModelName, Need], reserved: Mapping[ModelName, int], budget_bytes: int
) -> dict[ModelName, int]:
    """Return what each may take; together no more than the budget."""
    granted = dict(reserved)
    for wanted in (
        {name: need.whole_row_bytes for name, need in needs.items()},
        {name: need.wanted_bytes for name, need in needs.items()},
    ):
        spare = budget_bytes - sum(granted.values())
        # Whoever lacks least comes first: what it leaves of its part is for the others.
        waiting = sorted(granted, key=lambda name: wanted[name] - granted[name])
        for place, name in enumerate(waiting):
            part = spare // (len(waiting) - place)
            more = max(0, min(part, wanted[name] - granted[name]))
            granted[name] += more
            spare -= more
    return granted


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
    """Yield changes to try, the cheapest first."""
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
