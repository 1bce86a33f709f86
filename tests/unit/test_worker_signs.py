"""When a worker looks at its memory anew, and what it says of it meanwhile."""

from __future__ import annotations

import pytest

from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import SetBudget
from mlxsup.worker.engine import EngineBytes, RowToken, StepResult
from mlxsup.worker.engines.fake.text import encode_text
from mlxsup.worker.signs import LOOK_EVERY_S

from support.turn_bench import A, Bench

X = encode_text("x")[0]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the engine of the next bench holds, in bytes."""
    sizes = [10]
    monkeypatch.setattr(
        "support.turn_bench.Engine.bytes_held", lambda self: EngineBytes(active=sizes[0])
    )
    return sizes


def step(bench: Bench, finish: FinishReason | None = None) -> tuple[int, int]:
    """What the board says during a step: of the memory, and of the messages."""
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=X, finish=finish)])]
    bench.loop.turn()
    bench.loop.drain()
    current = bench.board.current
    return current.held.active, current.books.sent


def test_memory_is_looked_at_once_in_many_steps_and_the_books_in_each(held: list[int]) -> None:
    bench = Bench()
    bench.start(A)
    held[0] = 20
    assert step(bench) == (10, 2)
    bench.now += LOOK_EVERY_S / 2
    assert step(bench) == (10, 3)
    bench.now += LOOK_EVERY_S / 2
    assert step(bench) == (20, 4)
    held[0] = 30
    bench.now += 0.99 * LOOK_EVERY_S
    assert step(bench) == (20, 5)


def test_the_memory_of_another_budget_is_that_after_it_came(held: list[int]) -> None:
    """What was given back for it must show as soon as it is said that the rows keep to it."""
    bench = Bench()
    bench.start(A)
    held[0] = 20
    bench.around.inbox.append(SetBudget(number=1, rows_bytes=100))
    assert step(bench) == (20, 2)
    assert bench.board.current.budget == 1


def test_a_wait_begins_with_a_look(held: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.start(A)
    held[0] = 20
    assert step(bench, FinishReason.LENGTH) == (10, 2)
    waits: list[int] = []

    def wait(timeout_s: float | None) -> None:
        waits.append(bench.board.current.held.active)

    monkeypatch.setattr(bench.around, "wait", wait)
    bench.loop.run(lambda: bool(waits))
    assert waits == [20]
