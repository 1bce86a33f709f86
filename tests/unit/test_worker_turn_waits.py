"""How long the step loop waits for prompts, for idleness and for room, and what it gives up."""

from __future__ import annotations

import pytest

from mlxsup.protocol.launch import TEXT_LIMIT_STEPS
from mlxsup.protocol.worker_messages import (
    Exit,
)
from mlxsup.worker.engine import (
    WorkerFaultError,
)
from mlxsup.worker.idle_time import FREE_AFTER_S, GIVE_BACK_AFTER_S, LOOK_AGAIN_AFTER_S
from mlxsup.worker.preparing import StuckPreprocessingError

from support.turn_bench import STEP_TIMEOUT_S, A, B, Bench

TEXT_LIMIT_S = TEXT_LIMIT_STEPS * STEP_TIMEOUT_S


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_row_begins_only_while_what_was_accepted_can_leave(bench: Bench) -> None:
    bench.dispatch(A)
    bench.prepare(A)
    bench.around.flushes = [True, False]
    assert not bench.loop.turn()
    assert list(bench.engine.rows) == [A], "in its place, and not read yet"
    assert [message.TYPE for message in bench.sent()] == ["accepted"]
    assert bench.loop.turn()


def test_a_preparation_has_the_time_of_some_steps(bench: Bench) -> None:
    bench.dispatch(A)
    bench.around.busy_with = (A, bench.now - TEXT_LIMIT_S + 0.25)
    assert bench.loop.text_time_left_s() == 0.25
    bench.now += 0.25
    with pytest.raises(StuckPreprocessingError) as caught:
        bench.loop.turn()
    said = f"preparing the prompt of request 1 took more than {TEXT_LIMIT_S:g} s"
    assert str(caught.value) == said


def test_the_wait_for_a_beginning_counts_from_the_first_that_waits(bench: Bench) -> None:
    assert bench.loop.text_time_left_s() is None
    bench.dispatch(A)
    bench.now += 1.0
    bench.dispatch(B)
    assert bench.loop.text_time_left_s() == TEXT_LIMIT_S - 1.0
    bench.prepare(A)
    bench.loop.turn()
    assert bench.loop.text_time_left_s() == TEXT_LIMIT_S, "one was prepared: it works"
    bench.now += TEXT_LIMIT_S
    with pytest.raises(WorkerFaultError, match=r"^a thread that prepares prompts does not begin$"):
        bench.loop.turn()
    bench.around.is_there = False
    with pytest.raises(WorkerFaultError, match=r"^a thread that prepares prompts has ended$"):
        bench.loop.turn()


def test_a_prompt_that_was_ready_in_time_takes_the_whole_limit_anew(bench: Bench) -> None:
    bench.dispatch(A, B)
    bench.now += TEXT_LIMIT_S
    bench.prepare(A)
    assert bench.loop.text_time_left_s() == TEXT_LIMIT_S
    assert bench.loop.open_keys == {A, B}


def test_an_idle_engine_is_waited_with_until_it_gives_back(bench: Bench) -> None:
    assert (LOOK_AGAIN_AFTER_S, FREE_AFTER_S, GIVE_BACK_AFTER_S) == (0.5, 3.0, 300.0)
    assert bench.loop.wait_s() == 0.5
    bench.now += 0.5
    assert bench.loop.wait_s() == 2.5
    bench.now += 2.5
    assert (bench.loop.wait_s(), bench.engine.freed, bench.engine.returned) == (297.0, 1, 0)
    bench.now += 296.0
    assert bench.loop.wait_s() == 1.0
    bench.around.busy_with = (A, bench.now)
    assert bench.loop.wait_s() == 1.0, "the nearer of the two"
    bench.now += 1.0
    assert bench.loop.wait_s() == TEXT_LIMIT_S - 1.0
    bench.around.busy_with = None
    assert (bench.loop.wait_s(), bench.engine.returned) == (None, 1)
    bench.now += 1000.0
    assert (bench.loop.wait_s(), bench.engine.returned) == (None, 1)
    bench.dispatch(A)
    assert bench.loop.wait_s() == TEXT_LIMIT_S
    bench.around.inbox.append(Exit())
