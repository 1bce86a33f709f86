"""The rules for a model that lacks files: it waits until they are downloaded."""

from __future__ import annotations

from dataclasses import replace

from ..errors import load_failed
from .effects import Changed, QueueEnds, UpWaitersEnd
from .life import Life
from .restart_policy import GiveUp
from .states import Backoff, Failed, Pending
from .triggers import HasFiles, LacksFiles, NoFiles


def lacks(life: Life, phase: Pending, trigger: LacksFiles, now: float) -> None:
    """It waits without a turn and without memory: others load meanwhile."""
    cause = "" if trigger.fetching.total_bytes else phase.download_cause  # the hub has answered
    life.phase = replace(phase, lack=None, fetching=trigger.fetching, download_cause=cause)
    life.reserved_bytes = 0
    life.keep_books()
    life.do(Changed(note=""))


def has(life: Life, phase: Pending, trigger: HasFiles, now: float) -> None:
    """It waits for its turn from now on, behind those that could have had theirs."""
    if trigger.folder is not None:
        launch = replace(life.settings.launch, path=trigger.folder)
        life.settings = replace(life.settings, launch=launch, download=None)
    life.restarts.outage_ended()
    life.phase = replace(phase, since=now, fetching=None, download_cause="")
    life.do(Changed(note="" if trigger.folder is None else "downloaded"))


def failed(life: Life, phase: Pending, trigger: NoFiles, now: float) -> None:
    """What ends by itself is waited for, however long it takes; what else another attempt may fix
    counts as a crash. Those who wait for the load itself are answered, and requests keep waiting.
    Everything else is for a person to fix."""
    if trigger.waits_for:
        cause = f"waits for {trigger.waits_for}: {trigger.cause}"
        _try_again(life, trigger, life.restarts.after_outage(), cause, now)
        return
    cause = f"not downloaded: {trigger.cause}"
    verdict = life.restarts.after_crash(now) if trigger.is_passing else None
    if isinstance(verdict, float):
        _try_again(life, trigger, verdict, cause, now)
        return
    if isinstance(verdict, GiveUp):
        cause = f"its download {verdict.reason}, the last time: {cause}"
    error = load_failed(life.name, cause, is_retryable=False)
    life.enter(Failed(since=now, cause=cause), cause)
    life.do(QueueEnds(error=error), UpWaitersEnd(error=error))


def _try_again(life: Life, trigger: NoFiles, delay_s: float, cause: str, now: float) -> None:
    said = f"it {cause}" if trigger.waits_for else cause
    life.do(UpWaitersEnd(error=load_failed(life.name, said, is_retryable=True)))
    retry_at = now + max(delay_s, trigger.retry_after_s)
    life.enter(Backoff(since=now, retry_at=retry_at, download_cause=cause), cause)
