"""Which models of a configuration fit together, which of them must go for the others, and with how
much context each can run: what `mlxsup plan` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxsup.protocol.ids import ModelName

from ..core.need import Need
from ..core.room import equal_shares, find_room


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

    What is left goes to the rows of those that are loaded, in equal shares as in the daemon. Who
    has to go for another model goes in the order of the candidates, as those do that were not used
    yet.
    """
    reserved: dict[ModelName, int] = {}
    pinned = [one for one in candidates if one.is_pinned]
    for one in (*pinned, *(one for one in candidates if not one.is_pinned)):
        if one.is_resident or one.is_pinned:
            size = one.need.needed_bytes
            room = find_room(size, budget_bytes=budget_bytes, reserved=reserved, may_go=())
            if room is not None:
                reserved[one.model] = size
    taken = [one for one in candidates if one.is_resident and one.model in reserved]
    shares = equal_shares(
        budget_bytes - sum(reserved.values()),
        {one.model: one.need.wanted_bytes - one.need.needed_bytes for one in taken},
    )
    granted = {one.model: one.need.needed_bytes + shares[one.model] for one in taken}
    may_go = [one.model for one in candidates if one.model in granted and not one.is_pinned]
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
    if room is None:
        staying_bytes = sum(held for name, held in others.items() if name not in may_go)
        tokens = need.tokens_in(min(size, budget_bytes))
        return Placement(
            model=candidate.model,
            is_placed=False,
            missing_bytes=staying_bytes + size - budget_bytes,
            context_tokens=tokens,
            rows=1 if tokens else 0,
            memory_bytes=0,
        )
    memory_bytes = min(size + room.spare_bytes, max(size, need.wanted_bytes))
    tokens = need.tokens_in(memory_bytes)
    return Placement(
        model=candidate.model,
        is_placed=False,
        goes=room.models,
        context_tokens=tokens,
        rows=need.rows_in(memory_bytes, longest=tokens),
        memory_bytes=memory_bytes,
    )


def required_bytes(candidates: Sequence[Candidate]) -> int:
    """The least budget in which everything fits: those that stay together, each other one next to
    the pinned ones alone."""
    pinned = sum(one.need.needed_bytes for one in candidates if one.is_pinned)
    staying = (one for one in candidates if one.is_resident or one.is_pinned)
    together = sum(one.need.needed_bytes for one in staying)
    others = (one.need.needed_bytes for one in candidates if not one.is_pinned)
    return max(together, pinned + max(others, default=0))
