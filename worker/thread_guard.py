"""An engine that refuses every thread but its owner (A1).

MLX streams belong to the thread that made them: a call from another thread raises later and
elsewhere, or corrupts a batch. The check costs less than a microsecond, so it is always on.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable
from typing import Any

from .engine import Engine, StepResult

WEDGE_FACTOR = 10.0


class WrongThreadError(Exception):
    """An engine method was called from a thread that does not own the engine."""


class OwnedEngine:
    """Passes on everything of an `Engine`, after checking the calling thread.

    Where PDEATHSIG does not exist, a step that holds the GIL under a dead supervisor would live
    forever, because the parent watch cannot run: there, each step is under a timer that needs no
    GIL. On Linux it is not needed, and its cost (28-61 µs a step) is saved.

    Args:
        engine: made on the thread that calls this.
        step_timeout_s: the limit of one step, beyond its prediction.
    """

    def __init__(self, engine: Engine, step_timeout_s: float) -> None:
        self._engine = engine
        self._owner = threading.get_ident()
        self._step_timeout_s = step_timeout_s
        self._has_wedge_timer = sys.platform != "linux"

    def __getattr__(self, name: str) -> Any:
        # The step loop takes a method anew for each call, so looking it up is calling it.
        self._check()
        return getattr(self._engine, name)

    def _check(self) -> None:
        if threading.get_ident() != self._owner:
            raise WrongThreadError(
                f"the engine belongs to thread {self._owner}, not to {threading.get_ident()}"
            )

    def step(self) -> StepResult:
        """See `Engine.step`."""
        return self._within_limit(self._engine.step)

    def decode(self) -> StepResult:
        """See `Engine.decode`."""
        return self._within_limit(self._engine.decode)

    def _within_limit(self, step: Callable[[], StepResult]) -> StepResult:
        self._check()
        if not self._has_wedge_timer:
            return step()
        limit_s = self._step_timeout_s + 4 * self._engine.predict_step_s()
        faulthandler.dump_traceback_later(WEDGE_FACTOR * limit_s, exit=True)
        try:
            return step()
        finally:
            faulthandler.cancel_dump_traceback_later()
