"""Which models fit into so much memory, which must go for others, and with how much context: what
`mlxsup plan` prints, and what the memory plan of the daemon rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import size_text

from .need import Need

T = TypeVar("T")


def listed(names: Iterable[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """There is room."""

    spare_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitsWithout:
    """There is room once these have gone.

    Attributes:
        models: who must go; leaving out any one of them is not enough.
    """

    models: tuple[ModelName, ...]
    spare_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """There is no room even if everyone goes who may.

    Attributes:
        missing_bytes: what is missing then.
    """

    missing_bytes: int


Room = Fits | FitsWithout | NoRoom


def find_room(
    needed_bytes: int,
    *,
    budget_bytes: int,
    reserved: Mapping[ModelName, int],
    may_go: Sequence[ModelName],
) -> Room:
    """Return whether a model fits, and which models must go if it does not.

    Args:
        budget_bytes: what all models may take together.
        reserved: what is reserved for each model that is there; not for the one that asks.
        may_go: those of them that may go, the one that should go first at the beginning.
    """
    free_bytes = budget_bytes - sum(reserved.values())

    def left_bytes(going: Sequence[ModelName]) -> int:
        return free_bytes + sum(reserved[model] for model in going) - needed_bytes

    if left_bytes(()) >= 0:
        return Fits(spare_bytes=left_bytes(()))
    enough = (count for count in range(1, len(may_go) + 1) if left_bytes(may_go[:count]) >= 0)
    count = next(enough, None)
    if count is None:
        return NoRoom(missing_bytes=-left_bytes(may_go))
    # A large one that goes late may have made an earlier one's going needless.
    latest_first = fewest(list(may_go[:count])[::-1], lambda going: left_bytes(going) >= 0)
    going = tuple(latest_first[::-1])
    return FitsWithout(models=going, spare_bytes=left_bytes(going))


def fewest(going: list[T], is_enough: Callable[[list[T]], bool]) -> list[T]:
    """Return those of `going`, which are enough together, without any that may as well stay: the
    first ones stay first."""
    for one in list(going):
        others = [other for other in going if other is not one]
        if is_enough(others):
            going = others
    return going


def pins_problem(pinned: Mapping[ModelName, int], budget_bytes: int) -> str:
    """Return what is wrong with a configuration whose pinned models exceed the budget; empty if
    nothing.
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

    What is left goes to the caches of those that are loaded: first until a row of each can have
    its whole context, then for more rows, in equal parts. Who has to go for another model goes in
    the order of the candidates, as those do that were not used yet.
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
        lacking = {name: wanted[name] - size for name, size in granted.items()}
        shares = equal_shares(budget_bytes - sum(granted.values()), lacking)
        granted = {name: size + shares[name] for name, size in granted.items()}
    return granted


def equal_shares(free_bytes: int, wanted: Mapping[ModelName, int]) -> dict[ModelName, int]:
    """Return what each model gets of what is free: equal shares, and none more than it can use."""
    left_bytes, shares = max(0, free_bytes), {}
    # The one that can use least comes first: what it leaves of its share is for the others.
    order = sorted(wanted, key=lambda name: (wanted[name], name))
    for place, name in enumerate(order):
        part_bytes = left_bytes // (len(order) - place)
        shares[name] = max(0, min(wanted[name], part_bytes))
        left_bytes -= shares[name]
    return shares


def required_bytes(candidates: Sequence[Candidate]) -> int:
    """The least budget in which everything fits: those that stay together, each other one next to
    the pinned ones alone."""
    pinned = sum(one.need.needed_bytes for one in candidates if one.is_pinned)
    staying = (one for one in candidates if one.is_resident or one.is_pinned)
    together = sum(one.need.needed_bytes for one in staying)
    others = (one.need.needed_bytes for one in candidates if not one.is_pinned)
    return max(together, pinned + max(others, default=0))
