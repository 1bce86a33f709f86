"""What is free of the budget is shared out among the models that serve, and given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.events import Tick
from mlxsup.supervisor.core.memory.head_room import Claim, divide

from support.core_rows import ALL_ROWS, CONTEXT, FIXED, ONE_ROW, RowsDriver, bytes_for, need_of

MODEL = FIXED + ONE_ROW
"""What is reserved before a load."""

claims = st.dictionaries(
    st.sampled_from([ModelName(name) for name in "abcdef"]),
    st.builds(
        lambda least, more: Claim(least_bytes=least, wanted_bytes=least + more),
        st.integers(0, 100),
        st.integers(0, 1000),
    ),
    min_size=1,
)


@given(st.integers(-100, 3000), claims)
def test_nobody_gets_more_than_it_can_use_and_nothing_is_left_that_somebody_can(
    free: int, wanted: dict[ModelName, Claim]
) -> None:
    shares = divide(free, wanted)
    extras = {name: one.wanted_bytes - one.least_bytes for name, one in wanted.items()}
    assert shares.keys() == wanted.keys()
    assert all(0 <= shares[name] <= extras[name] for name in shares)
    assert sum(shares.values()) == min(max(free, 0), sum(extras.values()))
    short = [name for name in shares if shares[name] < extras[name]]
    least = min((shares[name] for name in short), default=10**9)
    assert all(shares[name] <= least + 1 for name in shares), "who could use more has the most"


def test_a_model_alone_gets_all_that_it_can_use() -> None:
    driver = RowsDriver("a", 10**9)
    driver.bring_up("a")
    assert driver.budget("a") == ALL_ROWS
    assert driver.reserved() == FIXED + ALL_ROWS


def test_what_is_free_is_shared_equally() -> None:
    driver = RowsDriver("ab", 2 * MODEL + 1000)
    driver.bring_up("a")
    assert driver.budget("a") == ONE_ROW + MODEL + 1000
    driver.load("b")
    driver.confirm("a")
    driver.now += 1
    driver.measure()
    assert driver.budget("a") == ONE_ROW + 1000, "what is free, until b can use it, too"
    driver.come_up("b")
    assert (driver.budget("a"), driver.budget("b")) == (ONE_ROW + 500, ONE_ROW)
    driver.confirm("a")
    assert (driver.budget("a"), driver.budget("b")) == (ONE_ROW + 500, ONE_ROW + 500)
    assert driver.reserved() == 2 * MODEL + 1000


def test_a_load_takes_head_room_back_before_anybody_goes() -> None:
    """And waits until the worker keeps to the lower budget."""
    driver = RowsDriver("ab", 2 * MODEL)
    driver.bring_up("a")
    assert driver.reserved() == 2 * MODEL
    driver.load("b")
    message = driver.budgets["a"][-1]
    assert (message.rows_bytes, message.gives_back) == (ONE_ROW, True)
    assert driver.state("a") is State.READY
    assert driver.state("b") is State.PENDING
    assert driver.reserved() == 2 * MODEL, "it may still take it"
    driver.confirm("a", number=message.number - 1)
    assert driver.reserved() == 2 * MODEL, "that was the one before"
    driver.confirm("a")
    assert driver.reserved() == 2 * MODEL
    assert driver.state("b") is State.LOADING


def test_rows_keep_what_they_hold() -> None:
    driver = RowsDriver("ab", 3 * MODEL)
    driver.bring_up("a")
    for id in ("r1", "r2"):
        driver.begin("a", id, prompt=500)
    driver.load("b")
    assert driver.budget("a") == bytes_for(2, 500 + 256)


def test_what_is_kept_for_speed_shows_when_the_process_is_measured_again() -> None:
    """Until then nobody is evicted for it."""
    driver = RowsDriver("ab", 2 * MODEL)
    driver.bring_up("a")
    driver.measure(a=2 * MODEL - 5)
    driver.now += 1000
    driver.load("b")
    driver.confirm("a")
    assert (driver.state("a"), driver.state("b")) == (State.READY, State.PENDING)
    driver.measure(a=MODEL)
    assert (driver.state("a"), driver.state("b")) == (State.READY, State.LOADING)


def test_a_model_that_cannot_give_back_is_evicted() -> None:
    driver = RowsDriver("ab", 2 * MODEL)
    driver.bring_up("a")
    driver.measure(a=2 * MODEL - 5)
    driver.now += 1000
    driver.load("b")
    driver.confirm("a")
    driver.measure(a=2 * MODEL - 5)
    assert driver.state("a") is State.STOPPING


def test_a_process_that_takes_more_than_was_reserved_takes_the_head_room_of_others() -> None:
    """Nobody is evicted for a little more than was expected."""
    driver = RowsDriver("ab", 3 * MODEL)
    driver.bring_up("a")
    driver.load("b")
    driver.confirm("a")
    driver.measure()
    driver.come_up("b")
    for name in "ab":
        driver.confirm(name)
    driver.measure()
    assert driver.reserved() == 3 * MODEL
    driver.now += 20.0
    driver.measure(a=2 * MODEL + 100)
    assert driver.reserved() > 3 * MODEL
    assert {driver.state("a"), driver.state("b")} == {State.READY}
    assert driver.budget("b") == ONE_ROW
    driver.confirm("b")
    assert driver.reserved() == 3 * MODEL + 100
    driver.confirm("a")
    driver.measure(a=MODEL + 100)
    assert driver.reserved() <= 3 * MODEL


def test_a_given_memory_is_the_limit_of_its_rows() -> None:
    given_bytes = MODEL + 321
    driver = RowsDriver("a", 10**9, {"a": need_of(given=given_bytes)})
    driver.bring_up("a")
    assert driver.budget("a") == ONE_ROW + 321
    assert driver.reserved() == given_bytes


def test_a_given_memory_is_the_limit_without_a_budget_too() -> None:
    driver = RowsDriver("a", 1, {"a": need_of(given=MODEL)}, budget=None)
    driver.bring_up("a")
    assert driver.budget("a") == ONE_ROW


def test_without_a_budget_nothing_limits_rows() -> None:
    driver = RowsDriver("a", 1, budget=None)
    driver.bring_up("a")
    assert driver.budgets["a"] == []
    assert driver.row("a")["row_budget_bytes"] is None


def test_a_load_has_room_for_its_longest_answer() -> None:
    """A crash takes the process; what its stream needs is reserved before the next one."""
    driver = RowsDriver("a", 10**9)
    driver.bring_up("a")
    driver.begin("a", "r1", prompt=3000)
    driver.exit("a")
    assert driver.state("a") is State.LOADING
    assert driver.reserved() == FIXED + bytes_for(1, 3000 + 256)
    driver.come_up("a")
    assert driver.row("a")["row_budget_bytes"] == ALL_ROWS


def test_a_model_that_was_swapped_out_returns_with_room_for_its_longest_answer() -> None:
    driver = RowsDriver("ab", 2 * MODEL - 1)
    driver.bring_up("a")
    key = driver.begin("a", "r1", prompt=3000)
    driver.token(key, model="a")
    driver.ask("r2", "b")
    while not driver.pausing:
        driver.pass_time(1.0)
    driver.row_left(key, "a")
    driver.exit("a", code=0)
    assert driver.spawns() == ["b"]
    driver.cancel("r2")
    driver.unload("b")
    driver.exit("b", code=0)
    assert driver.spawns() == ["a"]
    assert driver.row("a")["reserved_bytes"] >= FIXED + bytes_for(1, 3000 + 256)


def test_an_answer_of_the_whole_context_needs_no_more_than_that() -> None:
    driver = RowsDriver("a", 10**9)
    driver.bring_up("a")
    driver.begin("a", "r1", prompt=CONTEXT - 1)
    driver.exit("a")
    assert driver.reserved() == FIXED + bytes_for(1, CONTEXT)


def test_the_status_shows_what_rows_may_take() -> None:
    driver = RowsDriver("a", 2 * MODEL)
    driver.bring_up("a")
    row = driver.row("a")
    assert row["row_budget_bytes"] == ONE_ROW + MODEL
    assert row["reserved_bytes"] == 2 * MODEL


def test_what_calls_for_a_look_gets_one_even_if_no_model_was_touched() -> None:
    driver = RowsDriver("a", 10**9)
    driver.bring_up("a")
    head_room = driver.core.fleet.head_room
    head_room.stir()
    driver.do(Tick(now=driver.now))
    assert not head_room.is_stirred
