"""An engine that refuses every thread but its owner (A1).

MLX streams belong to the thread that made them: a call from another thread raises later and
elsewhere, or corrupts a batch. The check costs less than a microsecond, so it is always on.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable

from mlxsup.protocol.ids import RequestKey

from .engine import (
    Engine,
    EngineBytes,
    EngineFacts,
    ReportProgress,
    Row,
    RowSetAside,
    StepResult,
    TextCodec,
)

WEDGE_FACTOR = 10.0


class WrongThreadError(Exception):
    """An engine method was called from a thread that does not own the engine."""


class OwnedEngine:
    """Passes on every call, after checking the calling thread.

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

    def _check(self) -> None:
        if threading.get_ident() != self._owner:
            raise WrongThreadError(
                f"the engine belongs to thread {self._owner}, not to {threading.get_ident()}"
            )

    def load(self, report: ReportProgress) -> EngineFacts:
        """See `Engine.load`."""
        self._check()
        return self._engine.load(report)

    @property
    def text(self) -> TextCodec:
        """See `Engine.text`."""
        self._check()
        return self._engine.text

    def insert(self, row: Row) -> int:
        """See `Engine.insert`."""
        self._check()
        return self._engine.insert(row)

    def remove(self, *keys: RequestKey) -> None:
        """See `Engine.remove`."""
        self._check()
        self._engine.remove(*keys)

    def set_aside(self, *keys: RequestKey, keep: bool) -> list[RowSetAside]:
        """See `Engine.set_aside`."""
        self._check()
        return self._engine.set_aside(*keys, keep=keep)

    def drop_kept(self, *keys: RequestKey) -> None:
        """See `Engine.drop_kept`."""
        self._check()
        self._engine.drop_kept(*keys)

    def free_kept(self, *, spared: RequestKey | None = None) -> None:
        """See `Engine.free_kept`."""
        self._check()
        self._engine.free_kept(spared=spared)

    def has_rows(self) -> bool:
        """See `Engine.has_rows`."""
        self._check()
        return self._engine.has_rows()

    def row_count(self) -> int:
        """See `Engine.row_count`."""
        self._check()
        return self._engine.row_count()

    def predict_step_s(self) -> float:
        """See `Engine.predict_step_s`."""
        self._check()
        return self._engine.predict_step_s()

    def prefill_chunk(self) -> int:
        """See `Engine.prefill_chunk`."""
        self._check()
        return self._engine.prefill_chunk()

    def has_long_prompt(self) -> bool:
        """See `Engine.has_long_prompt`."""
        self._check()
        return self._engine.has_long_prompt()

    def has_decoding(self) -> bool:
        """See `Engine.has_decoding`."""
        self._check()
        return self._engine.has_decoding()

    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""
        self._check()
        return self._engine.shared_pass_s(tokens)

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

    def prepare(self) -> bool:
        """See `Engine.prepare`."""
        self._check()
        return self._engine.prepare()

    def settle(self) -> None:
        """See `Engine.settle`."""
        self._check()
        self._engine.settle()

    def give_back(self, *, keeps_prefixes: bool = False) -> None:
        """See `Engine.give_back`."""
        self._check()
        self._engine.give_back(keeps_prefixes=keeps_prefixes)

    def bound_rows(self, rows_bytes: int) -> None:
        """See `Engine.bound_rows`."""
        self._check()
        self._engine.bound_rows(rows_bytes)

    def bytes_held(self) -> EngineBytes:
        """See `Engine.bytes_held`."""
        self._check()
        return self._engine.bytes_held()

    def close(self) -> None:
        """See `Engine.close`."""
        self._check()
        self._engine.close()
