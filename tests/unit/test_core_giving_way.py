"""Which rows leave while other programs need memory, before any busy model does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.cache_cost import GROWTH_TOKENS
from mlxsup.protocol.client_messages import Notice, Subscribe
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Priority, State, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.memory.pressure import CALM_S

from support.core_memory import SUBSCRIPTION, limited, notes
from support.core_rows import ROWS, bytes_for, need_of, served
from support.core_shortage import STEP, WHOLE, ShortageDriver, holds, needs

TURN_S = 10.0
LONG = 2001
"""Tokens of each row here, unless a test says otherwise."""


def room_for(*lengths: int) -> int:
    """A budget in which a model has room for these rows and a little more, but not for another."""
    least = needs(lengths, [LONG])
    return -(-least // STEP) * STEP


def three(**more: Any) -> tuple[ShortageDriver, list[RequestKey]]:
    """A model with one row of each class; the first two are normal and interactive."""
    driver = ShortageDriver(**more)
    classes = (Priority.NORMAL, Priority.INTERACTIVE, Priority.BATCH)
    return driver, [driver.start("a", f"r{n}", priority=one) for n, one in enumerate(classes)]


# ---------------------------------------------------------------- there and back


def test_batch_rows_leave_while_others_need_memory_and_continue_later() -> None:
    driver = ShortageDriver()
    driver.say(Subscribe(id=SUBSCRIPTION))
    first, second = driver.batch("a", "r1"), driver.batch("a", "r2")
    third = driver.batch("a", "r3", notices=True)
    room = room_for(LONG, LONG)
    assert driver.has_room(room) == [third]
    assert driver.budget("a") == bytes_for(2, LONG + GROWTH_TOKENS), "no other takes its place"
    [note] = [note for note in notes(driver) if "batch" in note]
    assert note.startswith("1 batch row leaves because other programs need memory: ")
    assert note.endswith("is available on this machine, and 1.0 MiB must stay free")
    driver.rows_leave("a", third)
    assert "request r3 is paused: its model has too little memory for its row now" in notes(driver)
    told = [(one.kind, one.detail["reason"]) for one in driver.sent(Notice)]
    assert told == [("paused", "memory"), ("queued", "memory")]
    assert driver.row("a")["yielded"] == ["r3"]
    driver.confirm("a")
    assert driver.has_room(room) == []
    assert driver.core.status(driver.now)["memory"]["over_bytes"] == 0
    for key in (first, second):
        driver.gain("a", key, 1)
        assert driver.dispatched() == []
    for _ in range(int(CALM_S)):
        driver.has_room(WHOLE)
        assert driver.dispatched() == [], "memory has not been calm for long enough"
    driver.has_room(WHOLE)
    assert driver.dispatched() == [third]
    driver.gain("a", third, 1)
    assert [one.kind for one in driver.sent(Notice)] == ["resumed"]


def test_one_that_was_not_accepted_waits_as_new() -> None:
    driver = ShortageDriver()
    driver.batch("a", "r1")
    [key] = driver.serve("r2", model="a", priority=Priority.BATCH)
    driver.lengths["a"][key] = LONG - 1
    assert driver.has_room(room_for(LONG)) == [key]
    driver.rows_leave("a", key)
    assert (driver.row("a")["queued"], driver.row("a")["yielded"]) == (1, [])
    driver.token(*driver.lengths["a"], model="a")
    assert driver.dispatched() == []


def test_a_crash_before_it_has_left_loses_nothing() -> None:
    driver = ShortageDriver()
    keys = [driver.batch("a", f"r{n}") for n in range(2)]
    assert driver.has_room(room_for(LONG)) == keys[1:]
    driver.lengths["a"].clear()
    driver.exit("a")
    driver.come_up("a")
    assert driver.dispatched() == keys


# ---------------------------------------------------------------- who leaves


def test_no_row_of_another_class_leaves() -> None:
    driver, keys = three()
    assert driver.has_room(STEP) == keys[2:]
    driver.rows_leave("a", keys[2])
    for _ in range(3):
        assert driver.has_room(STEP) == []


def test_classes_are_those_that_were_asked_for() -> None:
    driver = ShortageDriver(aging_s=1.0)
    rows = [driver.start("a", f"r{n}") for n in range(4)]
    driver.ask("r4", "a", priority=Priority.BATCH)
    driver.pass_time(5.0)
    driver.lengths["a"].pop(rows[0])
    driver.end("a", rows[0])
    [aged] = driver.dispatched()
    driver.accept_long("a", aged, LONG)
    driver.gain("a", aged, 1)
    driver.lengths["a"][aged] = LONG
    assert driver.has_room(room_for(LONG, LONG, LONG)) == [aged]


@pytest.mark.parametrize("count", [1, 2])
def test_those_served_last_leave_and_no_more_than_needed(count: int) -> None:
    driver = ShortageDriver()
    driver.say(Subscribe(id=SUBSCRIPTION))
    keys = [driver.batch("a", f"r{n}") for n in range(4)]
    asked = driver.has_room(room_for(*[LONG] * (4 - count)))
    assert asked == keys[4 - count :]
    [note] = [note for note in notes(driver) if "batch" in note]
    said = {1: "1 batch row leaves because ", 2: "2 batch rows leave because "}
    assert note.startswith(said[count])
    assert driver.has_room(room_for(*[LONG] * (4 - count))) == [], "they are on their way"


def test_a_short_row_stays_if_a_longer_one_is_enough() -> None:
    """All rows are padded to the longest."""
    driver = ShortageDriver()
    driver.batch("a", "r1", 500)
    long = driver.batch("a", "r2", 3000)
    driver.batch("a", "r3", 500)
    room = -(-needs([501, 501], [3001]) // STEP) * STEP
    assert room < needs([501, 3001])
    assert driver.has_room(room) == [long]


def test_a_row_whose_leaving_frees_nothing_stays() -> None:
    """A model has memory for one row of its least length, whatever runs."""
    driver = ShortageDriver()
    for number in range(2):
        driver.batch("a", f"r{number}", 10)
    assert needs([11, 11]) == needs([11])
    assert driver.has_room(STEP) == []


def test_room_to_grow_that_rows_do_not_have_is_not_freed_by_them() -> None:
    """They need more than is reserved for them; only what is reserved can be given back."""
    driver = ShortageDriver()
    keys = [driver.batch("a", f"r{n}") for n in range(4)]
    assert driver.has_room(15 * STEP) == []
    driver.confirm("a")
    for key in keys:
        driver.grow("a", key, 239)
    missing = 2 * STEP
    assert 15 * STEP - needs([2240] * 3) < missing < needs([2240] * 4) - needs([2240] * 3)
    assert driver.has_room(13 * STEP) == keys[2:]


def test_one_row_of_each_model_stays() -> None:
    driver = ShortageDriver("ab")
    rows = {name: [driver.batch(name, f"{name}{n}") for n in range(2)] for name in "ab"}
    assert set(driver.has_room(STEP)) == {rows["a"][1], rows["b"][1]}
    for name in "ab":
        driver.rows_leave(name, rows[name][1])
    for _ in range(3):
        assert driver.has_room(STEP) == []


def test_one_that_leaves_does_not_count_as_the_one_that_stays() -> None:
    driver = ShortageDriver()
    driver.start("a", "r1")
    driver.batch("a", "r2")
    driver.pause("r1")
    assert driver.has_room(STEP) == []


def test_nobody_leaves_for_what_a_row_frees_that_leaves_anyway() -> None:
    """All rows are padded to the longest, and that one has been paused by hand."""
    driver = ShortageDriver()
    driver.start("a", "r0")
    for number in (1, 2):
        driver.batch("a", f"r{number}", 10)
    assert needs([11, 11], [LONG]) == needs([11], [LONG])
    driver.pause("r0")
    assert driver.has_room(STEP) == []


def test_one_that_must_not_be_interrupted_stays() -> None:
    driver = ShortageDriver()
    first = driver.batch("a", "r1")
    driver.batch("a", "r2", resume=False)
    assert driver.has_room(STEP) == [first]


def test_rows_of_a_worker_that_cannot_be_reached_stay() -> None:
    driver = ShortageDriver()
    for number in range(3):
        driver.batch("a", f"r{number}")
    driver.unlinked("a")
    assert driver.has_room(STEP) == []


def test_rows_of_a_model_with_a_limit_of_its_own_stay() -> None:
    """Its memory is reserved, whatever runs."""
    driver = ShortageDriver("a", {"a": need_of(given=30 * STEP)})
    for number in range(3):
        driver.batch("a", f"r{number}")
    assert driver.has_room(STEP) == []


# ---------------------------------------------------------------- in which order


def test_batch_rows_leave_before_a_busy_model_is_swapped_out() -> None:
    driver = ShortageDriver("ab")
    driver.start("a", "r1")
    rows = [driver.batch("b", f"b{n}") for n in range(3)]
    driver.now += TURN_S
    room = -(-(needs([LONG]) + needs([LONG, LONG], [LONG])) // STEP) * STEP
    assert driver.has_room(room) == rows[2:]
    assert driver.has_room(room) == []
    driver.rows_leave("b", rows[2])
    driver.confirm("b")
    for _ in range(3):
        assert driver.has_room(room) == []
        assert [driver.state(name) for name in "ab"] == [State.READY] * 2


def test_a_busy_model_goes_if_that_was_not_enough() -> None:
    driver = ShortageDriver("ab")
    driver.start("a", "r1")
    rows = [driver.batch("b", f"b{n}") for n in range(2)]
    driver.now += TURN_S
    assert driver.has_room(holds([LONG])) == rows[1:]
    assert driver.state("b") is State.READY
    driver.has_room(holds([LONG]))
    assert driver.state("b") is State.READY, "a row is on its way"
    driver.rows_leave("b", rows[1])
    assert driver.asked() == rows[:1]
    assert driver.state("b") is State.DRAINING


def test_idle_models_go_first_and_no_row_if_they_are_enough() -> None:
    driver = ShortageDriver("ab")
    for number in range(3):
        driver.batch("b", f"b{number}")
    assert driver.has_room(room_for(LONG, LONG, LONG)) == []
    assert driver.state("a") is State.STOPPING


def test_nobody_leaves_while_workers_may_still_give_back() -> None:
    driver = ShortageDriver()
    rows = [driver.batch("a", f"r{n}") for n in range(3)]
    driver.worker(Heartbeat(step=1, phase=WorkerPhase.IDLE, phase_s=0.0, cache_bytes=STEP), "a")
    assert driver.has_room(room_for(LONG)) == []
    assert driver.has_room(room_for(LONG)) == rows[1:]


def test_nobody_leaves_while_memory_is_not_short() -> None:
    """A budget that is lowered limits what else may be loaded."""
    driver = ShortageDriver()
    for number in range(3):
        driver.batch("a", f"r{number}")
    held = holds([LONG] * 3)
    assert driver.has_room(-(-held // STEP) * STEP) == []


def test_nobody_leaves_for_a_budget_that_a_reload_has_lowered() -> None:
    driver = ShortageDriver("ab")
    for number in range(2):
        driver.batch("a", f"a{number}")
        driver.batch("b", f"b{number}")
    models, settings = (served("a"), served("b")), limited(needs([LONG]))
    known = driver.core.fleet.needs
    driver.do(Reloaded(now=driver.now, settings=settings, models=models, needs=known))
    assert driver.asked() == []


# ---------------------------------------------------------------- in general


@dataclass(frozen=True)
class Row:
    """A row: of which model, in which class, of how many tokens, and whether it may leave."""

    model: str
    priority: Priority
    tokens: int
    may_leave: bool


rows_of_two = st.lists(
    st.builds(
        Row,
        st.sampled_from("ab"),
        st.sampled_from([Priority.BATCH, Priority.BATCH, Priority.NORMAL]),
        st.integers(1, 5) | st.integers(800, 3000),
        st.sampled_from([True, True, True, False]),
    ),
    max_size=8,
)


@given(rows_of_two, st.integers(0, 60))
def test_as_many_as_needed_leave_of_those_who_may(rows: list[Row], room_steps: int) -> None:
    """Judged by what the rows that stay take, with one step of growth."""
    driver = ShortageDriver("ab")
    placed: dict[RequestKey, Row] = {}
    for number, one in enumerate(rows):
        is_full = len(driver.lengths[one.model]) == ROWS
        if not is_full:
            key = driver.start(
                one.model, f"r{number}", one.tokens - 1, priority=one.priority,
                resume=one.may_leave,
            )  # fmt: skip
            placed[key] = one
    room = room_steps * STEP
    is_short = room < sum(holds(lengths.values()) for lengths in driver.lengths.values())
    left = set(driver.has_room(room))
    staying = placed.keys() - left
    may_go = {key for key in placed if _may_go(placed[key])}
    for name in "ab":
        if driver.state(name) is not State.READY:
            assert not any(placed[key].model == name for key in staying), (
                "nobody stays in one that goes"
            )
            return
        runs = [key for key in placed if placed[key].model == name]
        assert not runs or any(key in staying for key in runs), "one of each stays"
    assert left <= may_go
    needed = _needed(placed, staying)
    assert is_short or not left
    for key in left:
        more = _needed(placed, staying | {key})
        assert more > max(room, needed), "nobody leaves for nothing"
    for key in may_go & staying if is_short and needed > room else ():
        is_last = not [one for one in staying - {key} if placed[one].model == placed[key].model]
        assert is_last or _needed(placed, staying - {key}) == needed, "whoever helps leaves"
    for key in left:
        for other in may_go & staying:
            is_alike = placed[other] == placed[key]
            assert not (is_alike and other > key), "the one served last leaves"


def _may_go(row: Row) -> bool:
    return row.priority is Priority.BATCH and row.may_leave


def _needed(placed: dict[RequestKey, Row], staying: Iterable[RequestKey]) -> int:
    return sum(
        needs(
            [placed[key].tokens for key in staying if placed[key].model == name],
            [one.tokens for one in placed.values() if one.model == name],
        )
        for name in "ab"
    )
