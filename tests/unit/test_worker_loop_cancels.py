"""The step loop and cancels: whenever one comes, there is one end, and nothing is left."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason

from support.loop_bench import BUDGETS, Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_cancelled_row_ends_at_once_and_frees_its_slot_D3_D11(bench: Bench) -> None:
    bench.start(1, 2, 3, 4, 5)
    bench.loop.turn()
    bench.cancel(2)
    bench.loop.turn()
    assert "remove 2" in bench.story
    assert bench.finishes() == {2: FinishReason.CANCELLED}
    assert bench.story.index("remove 2") < bench.story.index("insert 5")
    bench.loop.turn()
    assert 2 not in {row.key for row in bench.steps()[-1].rows}


def test_the_cancels_of_a_turn_change_the_batch_once_D3(bench: Bench) -> None:
    """Each change costs a read for every layer."""
    bench.start(1, 2, 3, 4, 5)
    bench.loop.turn()
    for key in (3, 1, 99, 3, 4, 5):
        bench.cancel(key)
    bench.loop.turn()
    assert [said for said in bench.story if said.startswith("remove")] == ["remove 3 1 4"]
    assert bench.finishes() == dict.fromkeys((1, 3, 4, 5), FinishReason.CANCELLED)
    assert bench.engine.row_count() == 1
    assert bench.loop.open_keys == {2}


def test_a_cancel_while_nothing_steps_is_answered_at_once(bench: Bench) -> None:
    bench.start(1)
    bench.loop.turn()
    bench.cancel(1)
    assert not bench.loop.turn()
    assert bench.finishes() == {1: FinishReason.CANCELLED}
    assert bench.steps()[-1].step == 1, "no step was made for it"


def test_a_cancel_while_tokenising_drops_the_late_result_G5_D2(bench: Bench) -> None:
    bench.dispatch(1)
    bench.loop.turn()
    bench.cancel(1)
    bench.loop.turn()
    assert bench.finishes() == {1: FinishReason.CANCELLED}
    bench.text.prepare()
    bench.loop.turn()
    assert not any(s.startswith("insert") for s in bench.story)
    assert bench.loop.open_keys == frozenset()


def test_double_and_unknown_cancels_are_harmless_D6(bench: Bench) -> None:
    bench.start(1)
    bench.loop.turn()
    for key in (1, 1, 99):
        bench.cancel(key)
    bench.loop.turn()
    assert bench.story.count("remove 1") == 1
    assert sum(len(step.rows) for step in bench.steps()) == 2


def test_a_cancel_that_overtakes_its_request_is_remembered_D5(bench: Bench) -> None:
    bench.start(2)
    bench.cancel(1)
    bench.loop.turn()
    bench.dispatch(1)
    bench.loop.turn()
    assert 1 not in bench.text.pending, "nobody prepares it"
    bench.dispatch(3)
    bench.loop.turn()
    assert bench.finishes() == {1: FinishReason.CANCELLED}
    assert [row.key for step in bench.steps() for row in step.rows].count(RequestKey(1)) == 1
    assert bench.loop.open_keys == {2, 3}
    bench.loop.turn()
    assert bench.board.current.books.requests == 2


def test_a_request_that_was_cancelled_early_is_answered_with_nothing_else_to_do_D5(
    bench: Bench,
) -> None:
    bench.cancel(1)
    bench.dispatch(1)
    bench.run()
    assert bench.finishes() == {1: FinishReason.CANCELLED}


def test_of_cancels_that_came_early_as_many_are_remembered_as_there_are_places_D5_D9(
    bench: Bench,
) -> None:
    for key in range(1, 1001):
        bench.cancel(key)
    bench.loop.turn()
    assert bench.loop.open_keys == frozenset()
    for key in range(996, 1001):
        bench.dispatch(key)
    bench.loop.turn()
    assert bench.finishes() == dict.fromkeys((997, 998, 999, 1000), FinishReason.CANCELLED)
    assert bench.loop.open_keys == {996}


class Churn(RuleBasedStateMachine):
    """Dispatches, preparations, turns and cancels in any order: one end each, nothing left."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.next_key = 1

    @rule(count=st.integers(1, 3))
    def dispatch(self, count: int) -> None:
        for _ in range(count):
            BUDGETS[self.next_key] = self.next_key % 7 + 1
            self.bench.dispatch(self.next_key)
            self.next_key += 1

    @rule()
    def prepare(self) -> None:
        self.bench.text.prepare()

    @rule()
    def turn(self) -> None:
        self.bench.loop.turn()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.cancel(data.draw(st.integers(1, self.next_key)))

    @rule(is_blocked=st.booleans())
    def block(self, is_blocked: bool) -> None:
        self.bench.link.is_blocked = is_blocked

    @invariant()
    def one_end_each_and_nothing_after_it(self) -> None:
        ended: set[int] = set()
        for step in self.bench.steps():
            for row in step.rows:
                assert row.key not in ended
                if row.finish is not None:
                    ended.add(row.key)

    def teardown(self) -> None:
        self.bench.link.is_blocked = False
        while self.bench.link.inbox or self.bench.text.pending or self.bench.loop.open_keys:
            self.bench.loop.drain()
            self.bench.text.prepare()
            self.bench.loop.turn()
        self.bench.loop.turn()
        # Each request has its end, and the engine is empty (D9). A cancel can come before its
        # request only for a key that was not dispatched yet: it is ignored.
        assert set(self.bench.finishes()) == set(range(1, self.next_key))
        assert not self.bench.engine.has_rows()
        super().teardown()


TestChurnD2D9 = Churn.TestCase


TestChurnD2D9.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
