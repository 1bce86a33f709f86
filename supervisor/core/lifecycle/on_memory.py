"""The rules for memory: a model waits for it, does without it, or goes to make room."""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.states import PauseReason, Wanted, Why

from .effects import Changed, QueueEnds, RowsLeave, UpWaitersEnd
from .life import Life
from .states import Lack, Pending, Ready, Stopped
from .triggers import Evicted, HasMemory, LacksMemory, NoMemory, RowsGiveWay

# ---------------------------------------------------------------- before a load


def lacks(life: Life, phase: Pending, trigger: LacksMemory, now: float) -> None:
    """It waits, and holds nothing meanwhile: two that wait for each other would wait for ever."""
    before = phase.lack
    asked_since = before.asked_since if before else None
    if asked_since is None or not trigger.is_asked_for:
        asked_since = now if trigger.is_asked_for else None
    lack = Lack(
        since=before.since if before else now,
        reason=trigger.reason,
        looks_again_at=trigger.looks_again_at,
        asked_since=asked_since,
        is_promised=trigger.is_promised,
        takes_spare=trigger.takes_spare,
    )
    life.phase = replace(phase, lack=lack)
    life.reserved_bytes = 0
    life.keep_books()
    if phase.lack is None:
        life.do(Changed(note=f"waiting for memory: {trigger.reason}"))


def lacks_no_longer(life: Life, phase: Pending, trigger: HasMemory, now: float) -> None:
    life.phase = replace(phase, lack=None)


def refused(life: Life, phase: Pending, trigger: NoMemory, now: float) -> None:
    """Everybody who waits is answered. What came up for the configuration stays wanted, because a
    reload may make room; what came up for those who are answered is not wanted any longer."""
    life.do(QueueEnds(error=trigger.error), UpWaitersEnd(error=trigger.error))
    if life.settings.preload and life.why in (Why.PRELOAD, Why.RELOAD):
        lacks(life, phase, LacksMemory(reason=trigger.reason, looks_again_at=None), now)
    else:
        life.want(Wanted.DOWN, Why.MEMORY)
        life.enter(Stopped(since=now), trigger.error.message)


# ---------------------------------------------------------------- making room


def evicted(life: Life, phase: Ready, trigger: Evicted, now: float) -> None:
    """It is idle, and its memory is needed; the next request loads it again."""
    life.want(Wanted.DOWN, Why.EVICT)
    life.drain(phase, 0.0, now, trigger.reason)


def rows_give_way(life: Life, phase: Ready, trigger: RowsGiveWay, now: float) -> None:
    """It serves on with fewer rows."""
    life.do(RowsLeave(reason=PauseReason.MEMORY, keys=trigger.keys), Changed(note=trigger.reason))
