"""Plans for `mlxsup plan` which models of a configuration fit together, which go for others, and
with how much context each can run. The verdict on each is the daemon's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxsup.protocol.ids import ModelName

from ..core.budget import Budget, Need, equal_shares
from ..core.memory_plan import Admit, Evict, verdict_on
from ..core.memory_view import LoadedModel, LoadRequest, MemoryView, Standing, Urgency


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model that is to be served.

    Attributes:
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
        is_placed: whether it is loaded next to those before it.
        goes: who has to go for it, if it is not; empty if that does not help.
        missing_bytes: what it lacks even if all others have gone; 0: it can be loaded.
        context_tokens: the longest row that it has memory for; 0: not even one of a token.
        rows: how many rows of that length it has memory for at the same time.
        memory_bytes: what it may take: at least what it needs, and its part of what is left; 0 if
            it cannot be loaded.
    """

    model: ModelName
    is_placed: bool
    goes: tuple[ModelName, ...] = ()
    missing_bytes: int = 0
    context_tokens: int
    rows: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What fits.

    Attributes:
        placements: of all candidates, in their order.
        reserved_bytes: what those that are loaded need together, and the pinned ones.
        is_complete: whether all that are to be resident are, and each of the others can be loaded.
    """

    placements: tuple[Placement, ...]
    reserved_bytes: int
    is_complete: bool


def fit(candidates: Sequence[Candidate], budget: Budget) -> Fit:
    """Load models in their order as long as they fit, the pinned ones first, and look what the
    others would displace: those that stand first, as the daemon evicts the least recently used.

    What is left goes to the rows of those that are loaded, in equal shares.
    """
    loaded: dict[ModelName, LoadedModel] = {}
    for one in sorted(candidates, key=lambda one: not one.is_pinned):
        if (one.is_resident or one.is_pinned) and _displaced(one, loaded, budget) == ():
            size_bytes = one.need.needed_bytes
            loaded[one.model] = LoadedModel(
                name=one.model,
                reserved_bytes=size_bytes,
                standing=Standing.PINNED if one.is_pinned else Standing.IDLE,
                never_bytes=size_bytes if one.is_pinned else 0,
                used_at=candidates.index(one),
            )
    reserved_bytes = sum(one.reserved_bytes for one in loaded.values())
    taken = {one.model: one.need for one in candidates if one.is_resident and one.model in loaded}
    shares = equal_shares(
        budget.size_bytes - reserved_bytes,
        {name: need.wanted_bytes - need.needed_bytes for name, need in taken.items()},
    )
    placements = tuple(
        _with_memory(one, one.need.needed_bytes + shares[one.model], is_placed=True)
        if one.model in taken
        else _on_request(one, loaded, budget)
        for one in candidates
    )
    is_complete = all(
        place.is_placed or (not one.is_resident and not place.missing_bytes)
        for one, place in zip(candidates, placements, strict=True)
    )
    return Fit(placements=placements, reserved_bytes=reserved_bytes, is_complete=is_complete)


def _displaced(
    one: Candidate, loaded: dict[ModelName, LoadedModel], budget: Budget
) -> tuple[ModelName, ...] | None:
    """Return which models a load of this one evicts; None if it has no room even so."""
    request = LoadRequest(
        name=one.model, needed_bytes=one.need.needed_bytes, urgency=Urgency.COMMAND
    )
    match verdict_on(request, MemoryView(budget=budget, now=0.0, loaded=loaded)):
        case Admit():
            return ()
        case Evict(models=names):
            return names
        case _:
            return None


def _on_request(one: Candidate, loaded: dict[ModelName, LoadedModel], budget: Budget) -> Placement:
    """Return what becomes of a model that is not loaded before a request."""
    need, goes = one.need, _displaced(one, loaded, budget)
    others = [other for other in loaded.values() if other.name != one.model]
    if goes is None:
        tokens = need.tokens_in(min(need.needed_bytes, budget.size_bytes))
        staying_bytes = sum(other.never_bytes for other in others)
        return Placement(
            model=one.model,
            is_placed=False,
            missing_bytes=staying_bytes + need.needed_bytes - budget.size_bytes,
            context_tokens=tokens,
            rows=1 if tokens else 0,
            memory_bytes=0,
        )
    staying_bytes = sum(other.reserved_bytes for other in others if other.name not in goes)
    most_bytes = max(need.needed_bytes, need.wanted_bytes)
    memory_bytes = min(budget.size_bytes - staying_bytes, most_bytes)
    return _with_memory(one, memory_bytes, is_placed=False, goes=goes)


def _with_memory(
    one: Candidate, memory_bytes: int, *, is_placed: bool, goes: tuple[ModelName, ...] = ()
) -> Placement:
    tokens = one.need.tokens_in(memory_bytes)
    return Placement(
        model=one.model,
        is_placed=is_placed,
        goes=goes,
        context_tokens=tokens,
        rows=one.need.rows_in(memory_bytes, longest=tokens),
        memory_bytes=memory_bytes,
    )


def required_bytes(candidates: Sequence[Candidate]) -> int:
    """Return the least budget in which everything fits: those that stay together, each other one
    next to the pinned ones alone."""
    pinned = sum(one.need.needed_bytes for one in candidates if one.is_pinned)
    staying = (one for one in candidates if one.is_resident or one.is_pinned)
    together = sum(one.need.needed_bytes for one in staying)
    others = (one.need.needed_bytes for one in candidates if not one.is_pinned)
    return max(together, pinned + max(others, default=0))
