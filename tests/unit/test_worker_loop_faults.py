"""The step loop beside what is stuck, lost or slow, and what its beats say meanwhile."""

from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Resume,
)
from mlxsup.worker.engine import Prompt, StepResult, WorkerFaultError
from mlxsup.worker.idle_time import FREE_AFTER_S, GIVE_BACK_AFTER_S
from mlxsup.worker.preparing import StuckPreprocessingError
from mlxsup.worker.text_threads import Tokenised

from support.loop_bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_exception_out_of_a_step_leaves_the_loop_F3(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode() -> StepResult:
        raise ValueError("broken")

    monkeypatch.setattr(bench.engine, "step", explode)
    bench.start(1)
    with pytest.raises(ValueError, match="broken"):
        bench.loop.run(lambda: False)


def test_a_preparation_without_end_ends_the_worker(bench: Bench) -> None:
    bench.text.busy_since = 0.0
    bench.now = 299.0
    bench.loop.turn()
    bench.now = 301.0
    with pytest.raises(StuckPreprocessingError, match="request 1"):
        bench.loop.turn()


def test_a_preparation_that_nobody_begins_ends_the_worker_P23(bench: Bench) -> None:
    bench.now = 1000.0
    bench.dispatch(1)
    bench.loop.turn()
    bench.now += 299.0
    bench.loop.turn()
    bench.now += 2.0
    with pytest.raises(WorkerFaultError, match="does not begin"):
        bench.loop.turn()


def test_a_preparation_that_ended_in_a_long_step_was_begun(bench: Bench) -> None:
    bench.now = 1000.0
    bench.dispatch(1)
    bench.loop.turn()
    bench.text.prepare()
    bench.now += 301.0
    bench.loop.turn()
    assert bench.loop.open_keys == {1}


def test_the_preparation_of_a_cancelled_request_has_its_limit_too(bench: Bench) -> None:
    bench.dispatch(1)
    bench.loop.drain()
    bench.cancel(1)
    bench.now = 99.0
    bench.run()
    # The first wait comes after the engine has freed what it keeps for reuse, the second after it
    # has given back all that it kept.
    for now in (99.0 + FREE_AFTER_S, 99.0 + GIVE_BACK_AFTER_S):
        bench.now, bench.text.busy_since = now, now - 10.0
        bench.run()
        assert bench.link.waited_s == 290.0
    assert "give back" in bench.story


def test_what_is_done_between_steps_is_a_phase_of_its_own_P23(bench: Bench) -> None:
    """Whatever blocks there, the beats say so."""
    seen: dict[str, WorkerPhase] = {}

    def note(name: str) -> None:
        method = getattr(bench.engine, name)

        def call(*arguments: Any, **named: Any) -> Any:
            seen[name] = bench.board.current.phase
            return method(*arguments, **named)

        setattr(bench.engine, name, call)

    for name in ("insert", "remove", "bytes_held", "give_back", "step"):
        note(name)
    bench.start(1)
    bench.loop.turn()
    bench.cancel(1)
    bench.loop.turn()
    bench.run()
    bench.now = 2 * GIVE_BACK_AFTER_S
    bench.run()
    assert seen.pop("step") is WorkerPhase.PREFILL
    assert seen == dict.fromkeys(seen, WorkerPhase.ROWS)
    assert len(seen) == 4


def test_a_long_replay_says_that_it_advances_P7(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the answer was, its pieces are far below the limit of a step."""
    bench.dispatch(1)
    bench.loop.drain()
    begun: list[WorkerPhase] = []
    publish = bench.board.publish

    def publish_noted(phase: WorkerPhase, **facts: Any) -> None:
        begun.append(phase)
        publish(phase, **facts)

    monkeypatch.setattr(bench.board, "publish", publish_noted)
    prompt = Prompt(tokens=[5])
    body = RequestBody(prompt="p", max_tokens=4000)
    acceptance = Acceptance(
        prompt_tokens=pack_tokens([5]), opening=prompt.opening, parameters={}, seed=1,
        fingerprint="f",
    )  # fmt: skip
    resume = Resume(acceptance=acceptance, delivered=pack_tokens([100] * 3000))
    ready = Tokenised(key=RequestKey(1), body=body, prompt=prompt, tokenize_s=0.0, resume=resume)
    bench.text.results.append(ready)
    bench.loop.turn()
    said = "one for what came, the row, each 1,024 tokens, and the place in the engine"
    assert begun.count(WorkerPhase.ROWS) == 1 + 1 + 3 + 1, said


def test_beats_count_what_is_held_and_what_was_exchanged_P23(bench: Bench) -> None:
    def books() -> tuple[int, int, int, int]:
        held = bench.board.current.books
        return held.requests, held.preparing, held.sent, held.received

    counts = []
    bench.link.on_wait = lambda: counts.append(books())
    bench.dispatch(1)
    bench.dispatch(2)
    bench.run()
    assert counts == [(2, 2, 0, 2)]
    bench.text.prepare()
    bench.loop.turn()
    assert books() == (2, 0, 2, 2), "both accepted"
    bench.cancel(1)
    bench.loop.turn()
    assert books() == (2, 0, 3, 3), "the end of a row that was cancelled has yet to be reported"
    bench.loop.turn()
    assert books() == (1, 0, 4, 3)


def test_a_row_that_the_engine_has_lost_ends_the_worker_P23(bench: Bench) -> None:
    bench.start(1, 2)
    bench.loop.turn()
    bench.engine.remove(RequestKey(1))
    with pytest.raises(WorkerFaultError, match="1 rows, and not 2"):
        bench.loop.turn()


def test_a_text_thread_that_has_ended_ends_the_worker_P23(bench: Bench) -> None:
    bench.text.has_threads = False
    bench.loop.turn()
    bench.dispatch(1)
    with pytest.raises(WorkerFaultError, match="prepares prompts"):
        bench.loop.turn()


def test_the_board_names_the_phase_and_counts_ended_steps_F5(bench: Bench) -> None:
    bench.start(1)
    bench.loop.turn()
    assert (bench.board.current.phase, bench.board.current.step) == (WorkerPhase.PREFILL, 0)
    bench.loop.turn()
    assert (bench.board.current.phase, bench.board.current.step) == (WorkerPhase.DECODE, 1)
