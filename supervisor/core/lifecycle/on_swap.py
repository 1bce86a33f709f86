"""The rules for a model that makes room although it is busy, and stays wanted: a swap.

Its rows leave the batch first. Until its process is asked to exit, the swap can be called off.
"""

from __future__ import annotations

from mlxsup.protocol.states import PauseReason, Wanted, Why

from ..errors import cut_off
from .effects import Changed, QueueEnds, RowsLeave, UpWaitersEnd
from .life import Life
from .on_command import adopt_entry, remove
from .states import Draining, Ready, Shortage, StopCause, StopStage, Swapping
from .triggers import (
    Drained,
    Due,
    Reconfigured,
    Removed,
    SwapCalledOff,
    SwappedOut,
    WantDown,
    WantRestart,
)


def swapped_out(life: Life, phase: Ready, trigger: SwappedOut, now: float) -> None:
    """Its requests wait; it loads again when it is its turn."""
    life.want(Wanted.UP, Why.SWAP)
    life.enter(
        Swapping(
            since=now,
            ends_at=now + trigger.leave_s,
            ready_since=phase.since,
            cause=trigger.cause,
            ran=trigger.ran,
        ),
        trigger.reason,
    )
    life.do(RowsLeave(reason=PauseReason.SWAP))


def called_off(life: Life, phase: Swapping, trigger: SwapCalledOff, now: float) -> None:
    """It serves on, and rows that have left return."""
    is_short = isinstance(phase.cause, Shortage)
    over = "memory is no longer short" if is_short else f"{phase.cause} no longer needs its memory"
    _stay(life, phase, f"stays: {over}")


def rows_have_left(life: Life, phase: Swapping, trigger: Drained | Due, now: float) -> None:
    """Nothing runs any longer, or the limit is reached: what still runs continues as after a crash,
    which nobody is accused of."""
    cause = phase.cause
    why = cause.reason if isinstance(cause, Shortage) else f"for {cause}"
    life.stop(StopCause.SWAP, now, stage=StopStage.ASK, detail=f"swapped out {why}")


# ---------------------------------------------------------------- commands and reloads


def down(life: Life, phase: Swapping, trigger: WantDown, now: float) -> None:
    """An unload or a shutdown: answers that have begun are brought to their end first."""
    life.want(Wanted.DOWN, trigger.why)
    _drain(life, phase, trigger.drain_s, now)
    life.do(QueueEnds(error=cut_off(life.name, trigger.why)))


def restart(life: Life, phase: Swapping, trigger: WantRestart, now: float) -> None:
    """It comes up again at once: whoever needed its memory waits for its next turn to end."""
    life.want(Wanted.UP, Why.RESTART)
    if trigger.is_immediate:
        life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=True)
    else:
        _drain(life, phase, trigger.drain_s, now)


def removed(life: Life, phase: Swapping, trigger: Removed, now: float) -> None:
    remove(life, trigger)
    _drain(life, phase, trigger.drain_s, now)


def reconfigured(life: Life, phase: Swapping, trigger: Reconfigured, now: float) -> None:
    if adopt_entry(life, trigger):
        life.want(Wanted.UP, Why.RELOAD)
        _drain(life, phase, trigger.drain_s, now)
    elif life.settings.pinned:
        _stay(life, phase, "stays: it is pinned now")


# ---------------------------------------------------------------- inside


def _stay(life: Life, phase: Swapping, note: str) -> None:
    life.why = Why.REQUEST
    life.enter(Ready(since=phase.ready_since), note)
    life.do(UpWaitersEnd(error=None))


def _drain(life: Life, phase: Swapping, drain_s: float, now: float) -> None:
    """From now on it is DRAINING for another reason, which people are notified of."""
    life.phase = Draining(since=now, ends_at=now + drain_s, ready_since=phase.ready_since)
    life.do(Changed(note=str(life.why)))
