"""Models that wait for a load: their order, and what they wait for."""

from __future__ import annotations

from mlxsup.protocol.states import Why

from .lifecycle.states import Lack, Pending
from .lifecycle.triggers import LacksMemory
from .memory.planner import GiveBack, Urgency, Wait
from .model import Model


def pending(model: Model) -> Pending:
    """The phase of a model that waits for a load."""
    phase = model.life.phase
    assert isinstance(phase, Pending)
    return phase


def waits_for_load(model: Model) -> bool:
    """Whether it waits for a turn or for memory, and not for its files."""
    return isinstance(model.life.phase, Pending) and model.life.settings.download is None


def is_unwanted(model: Model) -> bool:
    """Whether it only waits because it has made room, and nobody waits for it any longer: like an
    evicted one, it loads with its next request."""
    is_for_nobody = model.urgency is Urgency.NOBODY and not model.paused
    return model.life.why is Why.SWAP and is_for_nobody


def turn_order(model: Model) -> tuple[bool, bool, bool, float, bool]:
    """Models that crashed first, then the one that others are swapped out for, then those that
    somebody waits for, the longest wait first; of two that came at the same moment, the one that
    has been found to lack memory."""
    phase = pending(model)
    is_promised = phase.lack is not None and phase.lack.is_promised
    is_for_nobody = model.urgency is Urgency.NOBODY
    return not phase.is_after_crash, not is_promised, is_for_nobody, phase.since, phase.lack is None


def wait_for(verdict: GiveBack) -> Wait:
    """What a model waits for if others give back enough without going."""
    return Wait(reason=verdict.reason, is_under_way=True, takes_spare=True)


def as_trigger(lack: Lack) -> LacksMemory:
    """What a model was last told that it lacks."""
    return LacksMemory(
        reason=lack.reason,
        looks_again_at=lack.looks_again_at,
        is_asked_for=lack.asked_since is not None,
        is_promised=lack.is_promised,
        takes_spare=lack.takes_spare,
    )
