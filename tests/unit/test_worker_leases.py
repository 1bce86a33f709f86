"""The step loop while leases are needed: when it asks, what it does meanwhile, what it returns."""

from __future__ import annotations

import pytest

from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import CancelRow, Exit, Lease, Leases, PauseRow, RowDelta, Step
from mlxsup.worker.link import LinkBrokenError

from support.worker.turn_bench import A, B, Bench

NEEDED, NOT_NEEDED = Leases(are_needed=True), Leases(are_needed=False)


@pytest.fixture
def bench() -> Bench:
    """A worker that reads a long prompt, and knows of no leases."""
    bench = Bench()
    bench.engine.is_long, bench.engine.is_decoding = True, False
    bench.start(A)
    bench.engine.made.clear()
    return bench


def hear(bench: Bench, *messages: Leases | Lease | CancelRow | PauseRow | Exit) -> bool:
    """One turn that begins with these messages; returns whether it made a step."""
    bench.around.inbox += messages
    return bench.loop.turn()


def phase_after_a_wait(bench: Bench) -> WorkerPhase:
    """What the heartbeat says once the loop has found nothing to do."""

    def wait(timeout_s: float | None) -> None:
        said.append(bench.board.current.phase)
        bench.around.inbox.append(Exit())

    said: list[WorkerPhase] = []
    bench.around.wait = wait  # type: ignore[method-assign]
    bench.loop.run(lambda: False)
    return said[0]


def test_nothing_is_asked_while_no_lease_is_needed(bench: Bench) -> None:
    for _ in range(3):
        assert bench.loop.turn()
    assert bench.engine.made == ["step"] * 3
    assert bench.sent() == [Step(step=2 + n, reads_on=True) for n in range(3)]


def test_every_step_says_whether_a_long_prompt_is_left(bench: Bench) -> None:
    bench.engine.is_long = False
    bench.loop.turn()
    assert bench.sent() == [Step(step=2)]


def test_it_asks_once_and_reads_nothing_until_the_lease_comes(bench: Bench) -> None:
    assert not hear(bench, NEEDED)
    assert bench.sent() == [Step(step=1, reads_on=True, wants_lease=True, only_waits=True)]
    assert not bench.loop.turn()
    assert (bench.engine.made, bench.sent()) == ([], [])
    assert hear(bench, Lease())
    assert bench.engine.made == ["step"]
    both = Step(step=2, reads_on=True, returns_lease=True, wants_lease=True, only_waits=True)
    assert bench.sent() == [both], "one lease is for one chunk"
    assert not bench.loop.turn()
    assert bench.sent() == []


def test_rows_that_decode_go_on_while_it_waits(bench: Bench) -> None:
    bench.engine.is_decoding = True
    for _ in range(3):
        assert bench.loop.turn() if bench.engine.made else hear(bench, NEEDED)
    assert bench.engine.made == ["decode"] * 3
    asked = [True, False, False]
    said = [Step(step=2 + n, reads_on=True, wants_lease=wants) for n, wants in enumerate(asked)]
    assert bench.sent() == said
    hear(bench, Lease())
    assert bench.engine.made[3:] == ["step"]
    assert bench.sent() == [Step(step=5, reads_on=True, returns_lease=True, wants_lease=True)]


def test_when_its_last_answer_ends_it_says_that_it_only_waits(bench: Bench) -> None:
    bench.engine.is_decoding = True
    assert hear(bench, NEEDED)
    bench.dispatch(B)
    bench.prepare(B)
    assert bench.loop.turn()
    bench.sent()
    bench.engine.is_decoding = False
    hear(bench, CancelRow(key=B))
    [said] = bench.sent()
    assert isinstance(said, Step)
    assert (said.wants_lease, said.only_waits) == (False, True)


def test_short_prompts_take_no_lease(bench: Bench) -> None:
    bench.engine.is_long = False
    assert hear(bench, NEEDED)
    assert (bench.engine.made, bench.sent()) == (["step"], [Step(step=2)])


def test_while_it_waits_it_says_so_and_not_that_it_is_idle(bench: Bench) -> None:
    hear(bench, NEEDED)
    assert phase_after_a_wait(bench) is WorkerPhase.WAITING


def test_a_cancel_needs_no_lease_and_a_lease_that_comes_too_late_goes_back_at_once(
    bench: Bench,
) -> None:
    hear(bench, NEEDED)
    bench.sent()
    bench.engine.is_long = False
    hear(bench, CancelRow(key=A))
    ended = RowDelta(key=A, finish=FinishReason.CANCELLED)
    assert bench.sent() == [Step(step=1, rows=[ended], between_steps=1)]
    assert not hear(bench, Lease())
    assert bench.sent() == [Step(step=1, returns_lease=True)]
    bench.loop.turn()
    assert bench.sent() == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_pause_needs_no_lease(bench: Bench, keep: bool) -> None:
    hear(bench, NEEDED)
    bench.sent()
    bench.engine.is_long = False
    hear(bench, PauseRow(key=A, keep=keep))
    (step,) = bench.sent()
    assert isinstance(step, Step)
    (left,) = step.rows
    assert (left.key, left.paused is not None) == (A, True)
    assert A not in bench.engine.rows


def test_requests_are_taken_in_while_it_waits_and_an_exit_ends_the_wait(bench: Bench) -> None:
    hear(bench, NEEDED)
    bench.dispatch(B)
    bench.prepare(B)
    assert not bench.loop.turn()
    assert set(bench.engine.rows) == {A, B}
    assert not hear(bench, Exit())
    assert bench.loop.is_exit_asked
    assert bench.engine.made == []


def test_a_lease_that_was_asked_for_is_waited_for_though_none_is_needed_any_longer(
    bench: Bench,
) -> None:
    hear(bench, NEEDED)
    assert not hear(bench, NOT_NEEDED)
    bench.sent()
    assert hear(bench, Lease())
    assert bench.sent() == [Step(step=2, reads_on=True, returns_lease=True)]
    assert bench.loop.turn()
    assert bench.sent() == [Step(step=3, reads_on=True)]


def test_an_unasked_lease_breaks_the_rules(bench: Bench) -> None:
    with pytest.raises(LinkBrokenError, match=r"^a lease came that was not asked for$"):
        hear(bench, Lease())


def test_a_second_lease_breaks_the_rules(bench: Bench) -> None:
    hear(bench, NEEDED)
    with pytest.raises(LinkBrokenError, match="not asked for"):
        hear(bench, Lease(), Lease())
