"""What the machine around the daemon wants to know of it, in one look."""

from __future__ import annotations

from dataclasses import dataclass

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State

from .fleet import Fleet
from .lifecycle.states import Pending, Phase
from .requests.ledger import Ledger, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The daemon at one moment.

    Attributes:
        states: each model's state, in the order of the configuration.
        is_busy: whether there is an answer that nobody has paused, a load or a download, all of
            which would stand still if the machine fell asleep.
        is_ending: whether the daemon was asked to end.
    """

    states: tuple[tuple[ModelName, State], ...]
    is_busy: bool
    is_ending: bool


def outline_of(fleet: Fleet, ledger: Ledger) -> Outline:
    """The daemon now."""
    return Outline(
        states=tuple((model.name, model.life.state) for model in fleet),
        is_busy=any(request.stage is not Stage.PAUSED for request in ledger)
        or any(_is_coming_up(model.life.phase) for model in fleet),
        is_ending=fleet.is_shutting_down,
    )


def _is_coming_up(phase: Phase) -> bool:
    """Whether its process loads, or its files arrive; it may wait for memory for ever."""
    if isinstance(phase, Pending):
        return phase.fetching is not None
    return phase.STATE is State.LOADING
