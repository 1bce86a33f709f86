"""Whether a model fits beside those that are there, and who must go if it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxsup.protocol.ids import ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """There is room.

    Attributes:
        spare_bytes: what is left afterwards.
    """

    spare_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitsWithout:
    """There is room once these have gone.

    Attributes:
        models: who must go; leaving out any one of them is not enough.
        spare_bytes: what is left afterwards.
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
    """Whether a model fits.

    Args:
        needed_bytes: what it needs.
        budget_bytes: what all models may take together.
        reserved: what is reserved for each model that is there; not for the one that asks.
        may_go: those of them that may go, whoever should go first at the beginning.
    """
    free = budget_bytes - sum(reserved.values())
    if needed_bytes <= free:
        return Fits(spare_bytes=free - needed_bytes)
    going: list[ModelName] = []
    for model in may_go:
        going.append(model)
        free += reserved[model]
        if needed_bytes <= free:
            break
    else:
        return NoRoom(missing_bytes=needed_bytes - free)
    # A large one that goes late may have made an earlier one's going needless.
    for model in reversed(going[:-1]):
        if needed_bytes <= free - reserved[model]:
            going.remove(model)
            free -= reserved[model]
    return FitsWithout(models=tuple(going), spare_bytes=free - needed_bytes)
