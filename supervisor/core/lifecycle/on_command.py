"""The rules for what is wanted of a worker: up, down, restarted, removed, reconfigured."""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.states import Wanted, Why

from ..errors import cut_off, load_failed, model_failed
from .effects import Changed, DownWaitersEnd, Erased, QueueEnds, UpWaitersEnd
from .life import Life
from .states import (
    Abandoned,
    Backoff,
    Draining,
    Failed,
    Loading,
    Pending,
    Phase,
    Ready,
    StopCause,
    Stopped,
    Stopping,
    StopStage,
)
from .triggers import (
    Reconfigured,
    Removed,
    WantDown,
    WantRestart,
    WantUp,
)

# ---------------------------------------------------------------- what is wanted


def up_from_rest(life: Life, phase: Phase, trigger: WantUp, now: float) -> None:
    life.want(Wanted.UP, trigger.why)
    if trigger.why is not Why.REQUEST:
        life.restarts.clean()
    life.enter(Pending(since=now))


def up_joins(life: Life, phase: Phase, trigger: WantUp, now: float) -> None:
    life.want(Wanted.UP, life.why if life.wanted is Wanted.UP else trigger.why)


def up_when_ready(life: Life, phase: Phase, trigger: WantUp, now: float) -> None:
    life.do(UpWaitersEnd(error=None))


def up_ends_drain(life: Life, phase: Draining, trigger: WantUp, now: float) -> None:
    if life.wanted is Wanted.UP:
        return  # draining for a restart: it comes up again anyway
    life.want(Wanted.UP, trigger.why)
    if life.is_outdated:
        return  # a reload has changed its entry: it drains, then comes up with the new launch
    life.enter(Ready(since=phase.ready_since))
    life.do(UpWaitersEnd(error=None))


def down_without_process(life: Life, phase: Phase, trigger: WantDown, now: float) -> None:
    life.want(Wanted.DOWN, trigger.why)
    life.do(QueueEnds(error=cut_off(life.name, trigger.why)))
    life.enter(Stopped(since=now))
    life.do(DownWaitersEnd(error=None))


def down_when_stopped(life: Life, phase: Phase, trigger: WantDown, now: float) -> None:
    life.want(Wanted.DOWN, trigger.why)
    life.do(DownWaitersEnd(error=None))


def down_while_loading(life: Life, phase: Phase, trigger: WantDown, now: float) -> None:
    life.want(Wanted.DOWN, trigger.why)
    life.do(QueueEnds(error=cut_off(life.name, trigger.why)))
    life.stop(StopCause.ASKED, now, stage=StopStage.TERM)


def down_when_ready(life: Life, phase: Ready, trigger: WantDown, now: float) -> None:
    life.want(Wanted.DOWN, trigger.why)
    life.do(QueueEnds(error=cut_off(life.name, trigger.why)))
    life.drain(phase, trigger.drain_s, now, str(trigger.why))


def down_while_draining(life: Life, phase: Draining, trigger: WantDown, now: float) -> None:
    life.want(Wanted.DOWN, trigger.why)
    life.do(QueueEnds(error=cut_off(life.name, trigger.why)))
    ends_at = min(phase.ends_at, now + trigger.drain_s)
    life.phase = replace(phase, ends_at=ends_at)


def down_while_stopping(life: Life, phase: Phase, trigger: WantDown, now: float) -> None:
    life.want(Wanted.DOWN, trigger.why)
    life.do(QueueEnds(error=cut_off(life.name, trigger.why)))


def restart_from_rest(life: Life, phase: Phase, trigger: WantRestart, now: float) -> None:
    life.want(Wanted.UP, Why.RESTART)
    life.restarts.clean()
    life.enter(Pending(since=now))


def restart_joins(life: Life, phase: Phase, trigger: WantRestart, now: float) -> None:
    life.want(Wanted.UP, Why.RESTART)


def restart_while_loading(life: Life, phase: Loading, trigger: WantRestart, now: float) -> None:
    is_joined = phase.is_restart or not trigger.is_immediate
    life.want(Wanted.UP, Why.RESTART)
    if not is_joined:
        life.stop(StopCause.ASKED, now, stage=StopStage.TERM, is_restart=True)


def restart_when_ready(life: Life, phase: Ready, trigger: WantRestart, now: float) -> None:
    life.want(Wanted.UP, Why.RESTART)
    if trigger.is_immediate:
        life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=True)
    else:
        life.drain(phase, trigger.drain_s, now, "restart")


def restart_while_draining(life: Life, phase: Phase, trigger: WantRestart, now: float) -> None:
    life.want(Wanted.UP, Why.RESTART)
    if trigger.is_immediate:
        life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=True)


def restart_while_stopping(life: Life, phase: Stopping, trigger: WantRestart, now: float) -> None:
    life.want(Wanted.UP, Why.RESTART)
    life.phase = replace(phase, is_restart=True)


# ---------------------------------------------------------------- a process that cannot be ended


def up_beside_abandoned(
    life: Life, phase: Phase, trigger: WantUp | WantRestart, now: float
) -> None:
    """Refused: never two processes of one model."""
    life.do(UpWaitersEnd(error=load_failed(life.name, life.failure, is_retryable=False)))


def down_beside_abandoned(life: Life, phase: Abandoned, trigger: WantDown, now: float) -> None:
    life.want(Wanted.DOWN, trigger.why)
    life.do(DownWaitersEnd(error=model_failed(life.name, life.failure)))


def removed_beside_abandoned(life: Life, phase: Abandoned, trigger: Removed, now: float) -> None:
    remove(life, trigger)


def reconfigured_beside_abandoned(
    life: Life, phase: Phase, trigger: Reconfigured, now: float
) -> None:
    if adopt_entry(life, trigger) and life.wanted is not Wanted.DOWN:
        life.want(Wanted.UP, Why.RELOAD)


# ---------------------------------------------------------------- a reload


def remove(life: Life, trigger: Removed) -> None:
    life.want(Wanted.GONE, Why.RELOAD)
    life.removal = trigger.error
    life.do(QueueEnds(error=trigger.error))


def removed_without_process(life: Life, phase: Phase, trigger: Removed, now: float) -> None:
    life.want(Wanted.GONE, Why.RELOAD)
    life.do(
        QueueEnds(error=trigger.error),
        DownWaitersEnd(error=None),
        Changed(note="removed"),
        Erased(),
    )


def removed_while_loading(life: Life, phase: Phase, trigger: Removed, now: float) -> None:
    remove(life, trigger)
    life.stop(StopCause.ASKED, now, stage=StopStage.TERM)


def removed_when_ready(life: Life, phase: Ready, trigger: Removed, now: float) -> None:
    remove(life, trigger)
    life.drain(phase, trigger.drain_s, now, "removed")


def removed_while_ending(life: Life, phase: Phase, trigger: Removed, now: float) -> None:
    remove(life, trigger)


def adopt_entry(life: Life, trigger: Reconfigured) -> bool:
    """Adopts the entry; returns whether a live process must be replaced by a new one."""
    is_other_launch = trigger.settings.launch != life.settings.launch
    if trigger.settings != life.settings:
        life.restarts.clean()  # the old entry crashed; an unchanged one keeps its crashes
    if life.settings.pinned and not life.has_process:
        life.reserved_bytes = 0  # it was reserved for the pin
    life.settings = trigger.settings
    life.restarts.settings = trigger.settings.restart
    life.removal = None
    life.keep_books()
    return is_other_launch or life.wanted is Wanted.GONE


def reconfigured_at_rest(life: Life, phase: Phase, trigger: Reconfigured, now: float) -> None:
    adopt_entry(life, trigger)


def reconfigured_after_crash(
    life: Life, phase: Backoff | Failed, trigger: Reconfigured, now: float
) -> None:
    if adopt_entry(life, trigger):
        life.want(Wanted.UP, Why.RELOAD)
        life.enter(Pending(since=now))


def reconfigured_when_ready(life: Life, phase: Ready, trigger: Reconfigured, now: float) -> None:
    if adopt_entry(life, trigger):
        life.want(Wanted.UP, Why.RELOAD)
        life.drain(phase, trigger.drain_s, now, "reload")


def reconfigured_while_loading(life: Life, phase: Phase, trigger: Reconfigured, now: float) -> None:
    if adopt_entry(life, trigger):
        life.want(Wanted.UP, Why.RELOAD)
        life.stop(StopCause.ASKED, now, stage=StopStage.TERM)


def reconfigured_while_draining(
    life: Life, phase: Phase, trigger: Reconfigured, now: float
) -> None:
    # Idle or evicted, it keeps going down: a request would otherwise bring the old launch back.
    if adopt_entry(life, trigger) and not (
        life.wanted is Wanted.DOWN and life.why in (Why.USER, Why.SHUTDOWN)
    ):
        if life.wanted is Wanted.DOWN:
            life.stop(StopCause.ASKED, now, stage=StopStage.ASK)
        else:
            life.want(Wanted.UP, Why.RELOAD)


def reconfigured_while_stopping(
    life: Life, phase: Stopping, trigger: Reconfigured, now: float
) -> None:
    if adopt_entry(life, trigger) and life.wanted is not Wanted.DOWN:
        life.want(Wanted.UP, Why.RELOAD)
        life.phase = replace(phase, is_restart=True)
