"""Whole lives of a worker's engine: what each of them runs before READY."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import Generation
from mlxsup.protocol.states import LoadPhase
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx import load as mlx_load
from mlxsup.worker.engines.mlx import passes as mlx_passes
from mlxsup.worker.engines.mlx import warm_up as mlx_warm_up
from mlxsup.worker.engines.mlx.batch import MlxBatch
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.prefill import PrefillPacer

from support.worker.mlx_rows import make_spec

PLENTY = 1 << 40

SIZES = (33, 129, 513, 1025, 2049)
"""Prompts whose passes are compiled alone."""


def burst(count: int, tokens: int = 32) -> list[int]:
    """Prompt lengths of a burst from which one pass reads `tokens` tokens; if there are several
    prompts, the last one is a token shorter and is padded."""
    return [tokens + 1] * (count - 1) + [tokens + (count == 1)]


class Lives:
    """Loads and notes what each load runs.

    Attributes:
        rows: the lengths of the prompts, in order.
        read: the tokens of each pass over a prompt; 0: what was learned until then is forgotten.
        passes: the same with the number of prompts that the pass read, forgetting left out.
        decoded: how many rows decoded in a step without prompts.
        reports: the reports of the warm-up.
        steps: of the batch.
        clock: of the batch, and of its passes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.read: list[int] = []
        self.passes: list[tuple[int, int]] = []
        self.decoded: list[int] = []
        self.reports = self.steps = 0
        self.clock: Callable[[], float] = lambda: 0.0
        passes_clock = SimpleNamespace(perf_counter=lambda: self.clock())
        monkeypatch.setattr(mlx_passes, "time", passes_clock)
        insert, step, saw_chunk = MlxBatch.insert, MlxBatch.step, PrefillPacer.saw_chunk

        def noted_insert(batch: MlxBatch, row: Row) -> int:
            self.rows.append(len(row.tokens))
            return insert(batch, row)

        def noted_step(batch: MlxBatch) -> Any:
            self.steps += 1
            result = step(batch)
            self.decoded.append(len({token.key for token in result.tokens}))
            return result

        def noted_chunk(
            pacer: PrefillPacer, *, prefill_rows: int, longest: int, **others: Any
        ) -> None:
            if longest:
                self.read.append(longest)
                self.passes.append((prefill_rows, longest))
            saw_chunk(pacer, prefill_rows=prefill_rows, longest=longest, **others)

        forget = PrefillPacer.forget

        def noted_forget(pacer: PrefillPacer) -> None:
            self.read.append(0)
            forget(pacer)

        monkeypatch.setattr(PrefillPacer, "forget", noted_forget)
        monkeypatch.setattr(MlxBatch, "insert", noted_insert)
        monkeypatch.setattr(MlxBatch, "step", noted_step)
        monkeypatch.setattr(PrefillPacer, "saw_chunk", noted_chunk)

    def begin(
        self, folder: Path, clock: Callable[[], float] = lambda: 0.0, **changes: Any
    ) -> MlxEngine:
        """A loaded engine; by the clock, unless another is given, no step takes any time."""
        self.rows, self.read, self.passes, self.decoded = [], [], [], []
        self.reports = self.steps = 0
        self.clock = clock
        engine = MlxEngine(make_spec(folder, **({"max_concurrency": 1} | changes)), clock)

        def report(phase: LoadPhase, share: float) -> None:
            self.reports += phase is LoadPhase.WARMUP and share < 1.0

        engine.load(report)
        return engine

    def load(self, folder: Path, clock: Callable[[], float] = lambda: 0.0, **changes: Any) -> None:
        """A whole life."""
        self.begin(folder, clock, **changes).close()


def play_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that this is a GPU with plenty of memory; it computes on the CPU."""
    monkeypatch.setattr(mlx_load, "open_stream", lambda: ("cuda", mx.new_stream(mx.cpu)))
    monkeypatch.setattr(mlx_warm_up, "free_memory_bytes", lambda *_: PLENTY)


def learned_in(folder: Path, generation: int) -> dict[str, Any]:
    """Return the changes of a spec for a life with this number and folder of what is learned."""
    return {"learned_dir": str(folder), "generation": Generation(generation)}
