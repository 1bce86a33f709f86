"""The supervisor needs memory: what is kept for reuse is freed, and nothing else changes."""

from __future__ import annotations

from mlxsup.protocol.worker_messages import GiveBack, Step
from mlxsup.worker.engine import RowToken, StepResult

from support.turn_bench import A, Bench


def test_what_is_kept_is_freed_before_the_next_step_and_no_row_leaves() -> None:
    bench = Bench()
    bench.start(A)
    bench.around.inbox.append(GiveBack())
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=5)])]
    bench.engine.made.clear()
    assert bench.loop.turn()
    assert (bench.engine.returned, bench.engine.made) == (1, ["step"])
    assert list(bench.engine.rows) == [A]
    [step] = bench.sent()
    assert isinstance(step, Step)
    assert [row.key for row in step.rows] == [A]


def test_an_idle_worker_frees_it_too_and_says_nothing() -> None:
    bench = Bench()
    bench.around.inbox.append(GiveBack())
    assert not bench.loop.turn()
    assert (bench.engine.returned, bench.sent()) == (1, [])
