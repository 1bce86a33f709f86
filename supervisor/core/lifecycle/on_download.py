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
    life.phase = replace(phase, lack=None, fetching=trigger.fetching)
    life.do(Changed(note=""))


def has(life: Life, phase: Pending, trigger: HasFiles, now: float) -> None:
    """It waits for its turn from now on, behind those that could have had theirs."""
    if trigger.folder is not None:
        launch = replace(life.settings.launch, path=trigger.folder)
        life.settings = replace(life.settings, launch=launch, download=None)
    life.phase = replace(phase, since=now, fetching=None)
    life.do(Changed(note="" if trigger.folder is None else "downloaded"))


def failed(life: Life, phase: Pending, trigger: NoFiles, now: float) -> None:
    """What another attempt may fix counts as a crash; those who wait for the load itself are
    answered, and requests keep waiting. Everything else is for a person to fix."""
    cause = f"not downloaded: {trigger.cause}"
    verdict = life.restarts.after_crash(now) if trigger.is_passing else None
    if isinstance(verdict, float):
        life.do(UpWaitersEnd(error=load_failed(life.name, cause, is_retryable=True)))
        retry_at = now + max(verdict, trigger.retry_after_s)
        life.enter(Backoff(since=now, retry_at=retry_at, download_cause=cause), cause)
        return
    if isinstance(verdict, GiveUp):
        cause = f"{verdict.reason}, the last time: {cause}"
    error = load_failed(life.name, cause, is_retryable=False)
    life.enter(Failed(since=now, cause=cause), cause)
    life.do(QueueEnds(error=error), UpWaitersEnd(error=error))
