"""Who joins a batch and who leaves it: any rows, any budget."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Priority
from mlxsup.protocol.worker_messages import GiveBack, SetBudget
from mlxsup.worker.row_memory import RowMemory, who_leaves

from support.turn_bench import Engine

LAYERS = (CacheLayers(layers=1, token_bytes=1),)
"""A row takes two bytes for each token and each of a step of growth."""


@dataclass(frozen=True, kw_only=True)
class Row:
    key: RequestKey
    tokens: int
    priority: Priority = Priority.NORMAL
    may_leave: bool = True


def rows_of(*tokens: int, **more: object) -> list[Row]:
    return [Row(key=RequestKey(n), tokens=count) for n, count in enumerate(tokens, start=1)]


def bytes_of(rows: int, longest: int) -> int:
    return cache_bytes(LAYERS, rows=rows, longest=longest)


lists_of_rows = st.lists(
    st.tuples(st.integers(1, 2000), st.sampled_from(list(Priority)), st.booleans()), max_size=8
).map(
    lambda each: [
        Row(key=RequestKey(n), tokens=tokens, priority=priority, may_leave=may_leave)
        for n, (tokens, priority, may_leave) in enumerate(each, start=1)
    ]
)
budgets = st.integers(0, 20_000)


def size(rows: list[Row]) -> int:
    return bytes_of(len(rows), max((row.tokens for row in rows), default=0))


def without(rows: list[Row], *keys: RequestKey) -> list[Row]:
    return [row for row in rows if row.key not in keys]


@given(lists_of_rows, budgets)
def test_whoever_stays_fits_and_nobody_leaves_without_need(rows: list[Row], budget: int) -> None:
    leaving = who_leaves(rows, LAYERS, budget)
    staying = without(rows, *leaving)
    assert size(staying) <= budget
    assert len(set(leaving)) == len(leaving)
    for count in range(len(leaving)):
        assert size(without(rows, *leaving[:count])) > budget, "it fitted already"


@given(lists_of_rows, budgets)
def test_a_row_that_fits_alone_is_never_left_without_company(rows: list[Row], budget: int) -> None:
    """No livelock: while any row fits alone, one stays and runs."""
    leaving = who_leaves(rows, LAYERS, budget)
    staying = without(rows, *leaving)
    last = rows and not staying and next(row for row in rows if row.key == leaving[-1])
    assert not last or size([last]) > budget


@given(lists_of_rows, budgets)
def test_the_one_that_leaves_is_the_last_served_of_the_lowest_class(
    rows: list[Row], budget: int
) -> None:
    for key in who_leaves(rows, LAYERS, budget)[:1]:
        enough = [row for row in rows if size(without(rows, row.key)) <= budget]
        among = [row for row in enough or rows if row.may_leave] or enough or rows
        lowest = max(list(Priority).index(row.priority) for row in among)
        equals = [row for row in among if list(Priority).index(row.priority) == lowest]
        if any(row.may_leave for row in enough or rows):
            assert key == equals[-1].key


def test_the_longest_row_leaves_if_that_alone_is_enough() -> None:
    rows = rows_of(900, 100, 100)
    assert who_leaves(rows, LAYERS, bytes_of(2, 100)) == [1]
    assert who_leaves(rows, LAYERS, bytes_of(2, 900)) == [3]


def memory(budget: int) -> tuple[RowMemory, Engine]:
    engine = Engine()
    made = RowMemory(engine, LAYERS)
    made.heard(SetBudget(number=1, rows_bytes=budget))
    return made, engine


def test_without_a_budget_there_is_room_for_everything() -> None:
    made = RowMemory(Engine(), LAYERS)
    assert made.leaving(rows_of(10**9)) == []
    assert made.has_room(rows_of(10**9)[0], rows_of(10**9))
    assert made.budget == 0


def test_a_row_joins_others_only_with_a_step_of_growth_to_spare() -> None:
    one, other = rows_of(100, 90)
    exactly = bytes_of(2, 100 + GROWTH_TOKENS)
    assert memory(exactly)[0].has_room(other, [one])
    assert not memory(exactly - 1)[0].has_room(other, [one])


def test_a_row_alone_needs_no_step_to_spare() -> None:
    (one,) = rows_of(100)
    assert memory(bytes_of(1, 100))[0].has_room(one, [])
    assert not memory(bytes_of(1, 100) - 1)[0].has_room(one, [])


def test_what_is_kept_of_paused_rows_goes_before_a_row_does() -> None:
    rows = rows_of(100, 100)
    made, engine = memory(bytes_of(2, 100) + 9)
    engine.kept = {RequestKey(7): 9}
    assert made.leaving(rows) == []
    assert engine.kept, "it still fits"
    engine.kept = {RequestKey(7): 10}
    assert made.leaving(rows) == []
    assert engine.kept == {}


def test_what_is_kept_of_others_goes_for_a_row_that_joins() -> None:
    """Its own state becomes its row, so it is not there twice."""
    one, other = rows_of(100, 90)
    made, engine = memory(bytes_of(2, 100 + GROWTH_TOKENS))
    engine.kept = {RequestKey(2): 5, RequestKey(7): 5}
    assert made.has_room(other, [one])
    assert engine.kept == {RequestKey(2): 5}


def test_nothing_is_freed_for_a_row_that_cannot_join() -> None:
    one, other = rows_of(100, 900)
    made, engine = memory(bytes_of(2, 100 + GROWTH_TOKENS))
    engine.kept = {RequestKey(7): 5}
    assert not made.has_room(other, [one])
    assert engine.kept


def test_the_number_is_that_of_the_budget_that_the_rows_keep_to() -> None:
    """Not before they have been looked at: until then some may take more."""
    made, _ = memory(100)
    assert made.budget == 0
    made.leaving([])
    assert made.budget == 1
    for number, budget in pairwise((1, 2, 3)):
        made.heard(SetBudget(number=budget, rows_bytes=5))
        assert made.budget == number
        made.leaving([])


def test_it_gives_back_once_when_it_is_told_to() -> None:
    made, engine = memory(100)
    made.leaving([])
    assert engine.returned == 0
    made.heard(SetBudget(number=2, rows_bytes=50, gives_back=True))
    for _ in range(2):
        made.leaving([])
        assert engine.returned == 1


def test_a_row_that_has_grown_too_long_is_found_at_any_step() -> None:
    made, _ = memory(bytes_of(2, 100))
    assert made.leaving(rows_of(99, 100)) == []
    assert made.leaving(rows_of(99, 101)) == [2]
    made.heard(SetBudget(number=2, rows_bytes=bytes_of(2, 101)))
    assert made.leaving(rows_of(99, 101)) == []


def test_the_engine_is_told_what_its_rows_may_take() -> None:
    made, engine = memory(300)
    assert engine.bounds == [300]
    made.heard(SetBudget(number=2, rows_bytes=200))
    made.heard(GiveBack())
    assert engine.bounds == [300, 200]
