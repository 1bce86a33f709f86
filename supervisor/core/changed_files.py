"""Models whose files have changed since they were loaded: they are not swapped out while answers
are open, because no other process could continue those.

Nobody looks at files until a swap depends on it.
"""

from __future__ import annotations

from itertools import chain

from .lifecycle.states import Ready
from .model import Model


def why_it_stays(model: Model) -> str:
    """What has changed, if the model must stay for that; empty if it need not."""
    change = model.life.files.change
    return change if change and _has_begun(model) else ""


def must_be_compared(model: Model, now: float) -> bool:
    """Whether its files must be looked at before it may be swapped out."""
    return _has_begun(model) and not model.life.files.is_fresh(now)


def may_have_been_restored(model: Model, now: float) -> bool:
    """Whether it is time to look again at files that have kept a model from being swapped out."""
    is_ready = isinstance(model.life.phase, Ready)
    return is_ready and bool(why_it_stays(model)) and model.life.files.may_be_asked(now)


def _has_begun(model: Model) -> bool:
    """Whether it has open answers that a worker has accepted, or is about to."""
    if model.running:
        return True
    waiting = chain(model.queue.again, model.paused.values())
    return any(request.acceptance is not None for request in waiting)
