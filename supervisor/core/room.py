"""Room for models next to each other: what fits, what must go for it, and shares of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from mlxsup.protocol.ids import ModelName

T = TypeVar("T")


def listed(names: Iterable[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last


class Room(NamedTuple):
    """There is room.

    Attributes:
        models: must go for it, and leaving out any one of them is not enough; empty: there is room
            as things are.
        spare_bytes: what is left then.
    """

    models: tuple[ModelName, ...]
    spare_bytes: int


def find_room(
    needed_bytes: int,
    *,
    budget_bytes: int,
    reserved: Mapping[ModelName, int],
    may_go: Sequence[ModelName],
) -> Room | None:
    """Return which models must go so that a model fits; None if it does not even if all go that
    may.

    Args:
        budget_bytes: what all models may take together.
        reserved: what is reserved for each model that is there; not for the one that asks.
        may_go: those of them that may go, the one that should go first at the beginning.
    """
    free_bytes = budget_bytes - sum(reserved.values())

    def left_bytes(going: Sequence[ModelName]) -> int:
        return free_bytes + sum(reserved[model] for model in going) - needed_bytes

    if left_bytes(()) >= 0:
        return Room((), left_bytes(()))
    enough = (count for count in range(1, len(may_go) + 1) if left_bytes(may_go[:count]) >= 0)
    count = next(enough, None)
    if count is None:
        return None
    # A large one that goes late may have made an earlier one's going needless.
    latest_first = fewest(list(may_go[:count])[::-1], lambda going: left_bytes(going) >= 0)
    going = tuple(latest_first[::-1])
    return Room(going, left_bytes(going))


def fewest(going: list[T], is_enough: Callable[[list[T]], bool]) -> list[T]:
    """Return those of `going`, which are enough together, without any that may as well stay: the
    first ones stay first."""
    for one in list(going):
        others = [other for other in going if other is not one]
        if is_enough(others):
            going = others
    return going


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
