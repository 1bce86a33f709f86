"""Which busy models go, and which stay, when memory is short and nothing else is left to go."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.client_messages import Failed, Subscribe
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import Priority, State
from mlxsup.protocol.worker_messages import Exit, PauseRow
from mlxsup.supervisor.core.events import Caller, Reloaded
from mlxsup.supervisor.core.memory.pressure import CALM_S
from mlxsup.supervisor.core.settings import ModelSettings

from .test_core_giving_back import SHORTAGE, beat, memory, sample
from support.core_looks import ALICE
from support.core_memory import GIB, SUBSCRIPTION, limited, notes, sized, states
from support.core_swaps import SwapDriver, finish

TURN_S = 20.0


def crowd(names: str = "ab", gib: int = 4, **changes: Any) -> SwapDriver:
    """Models of these sizes in GiB are READY and fill the budget; nothing runs."""
    models = [sized(name, gib * GIB) for name in names]
    return ready(models, budget_gib=gib * len(names), **changes)


def ready(models: list[ModelSettings], *, budget_gib: int, **changes: Any) -> SwapDriver:
    """These models are READY, in this order."""
    driver = SwapDriver(models, limited(budget_gib * GIB, **changes))
    driver.bring_up(*(str(model.name) for model in models))
    return driver


def short(driver: SwapDriver, gib: float = 4, names: str = "ab") -> None:
    """A second later nothing is available, and each model holds so much."""
    sample(driver, 0, **dict.fromkeys(names, gib))


def reload(driver: SwapDriver, names: str, *, budget_gib: float, **changes: Any) -> None:
    """The same models of 4 GiB, with another budget."""
    models = tuple(sized(name, 4 * GIB) for name in names)
    caller = Caller(connection=ALICE, id=RequestId("x"))
    settings = limited(int(budget_gib * GIB), **changes)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models, caller=caller))


# ---------------------------------------------------------------- the way of it


def test_a_busy_model_goes_while_others_need_memory_and_its_stream_continues_later() -> None:
    driver = crowd()
    driver.say(Subscribe(id=SUBSCRIPTION))
    keys = {name: driver.stream(name, name) for name in "ab"}
    short(driver)
    assert states(driver, "ab") == [State.READY] * 2, "no turn is over"
    driver.now += TURN_S
    short(driver)
    assert driver.told(PauseRow) == [PauseRow(key=keys["a"], keep=False)]
    assert notes(driver) == [
        f"swapped out because other programs need memory: 8.00 GiB of 7.36 GiB are reserved and"
        f" {SHORTAGE}; it had its turn for 23 s"
    ]
    assert (driver.row("a")["wanted"], driver.why("a")) == ("up", "swap")
    assert memory(driver)["over_bytes"] == 0
    driver.row_left(keys["a"], "a")
    assert driver.told(Exit) == [Exit()]
    driver.exit("a", code=0)
    assert driver.row("a")["last_exit"]["detail"] == (
        "swapped out because other programs need memory"
    )
    assert (driver.state("a"), driver.state("b")) == (State.PENDING, State.READY)
    sample(driver, 9, b=4)
    assert driver.state("a") is State.PENDING, "memory has not been calm for long enough"
    for _ in range(int(CALM_S)):
        sample(driver, 9, b=4)
    assert driver.state("a") is State.LOADING
    driver.come_up("a")
    assert [one.key for one in driver.resumed()] == [keys["a"]]
    finish(driver, "a", keys["a"])
    assert not isinstance(driver.terminals[ALICE, "a"][0], Failed)


def test_a_reload_that_lowers_the_budget_swaps_down_to_it() -> None:
    driver = crowd()
    driver.say(Subscribe(id=SUBSCRIPTION))
    for name in "ab":
        driver.stream(name, name)
    driver.now += TURN_S
    reload(driver, "ab", budget_gib=6)
    assert (
        "swapped out because what is loaded needs more than memory_budget: 8.00 GiB of 6.00 GiB"
        in (" ".join(notes(driver)))
    )
    driver.gone("a")
    assert states(driver, "ab") == [State.PENDING, State.READY]
    assert driver.passes_until("b") <= 21, "they take turns from now on"
    driver.gone("b")
    assert driver.spawns() == ["a"]


def test_as_many_go_as_are_needed_and_the_rest_stays() -> None:
    driver = crowd("abcd", 2)
    for name in "abcd":
        driver.stream(name, name)
    driver.now += TURN_S
    sample(driver, -2, a=2, b=2, c=2, d=2)  # 2.5 GiB must go
    stays, goes = State.READY, State.DRAINING
    assert states(driver, "abcd") == [goes, goes, stays, stays]
    short(driver, 2, "abcd")
    assert states(driver, "abcd") == [goes, goes, stays, stays], "they are enough"


# ---------------------------------------------------------------- who goes first


def test_idle_models_go_first_and_no_busy_one_if_they_are_enough() -> None:
    driver = crowd()
    driver.stream("a", "r1")
    driver.now += TURN_S
    short(driver)
    assert states(driver, "ab") == [State.READY, State.STOPPING]


def test_nobody_goes_while_workers_may_still_give_back() -> None:
    driver = crowd()
    for name in "ab":
        driver.stream(name, name)
    driver.now += TURN_S
    beat(driver, "b", cache_gib=1)
    short(driver)
    assert states(driver, "ab") == [State.READY] * 2
    short(driver)
    assert states(driver, "ab") == [State.DRAINING, State.READY], "it was not enough"


def test_the_lowest_class_goes_first() -> None:
    driver = crowd("abc")
    classes = (Priority.INTERACTIVE, Priority.NORMAL, Priority.BATCH)
    for name, priority in zip("abc", classes, strict=True):
        driver.stream(name, name, priority=priority)
    driver.now += TURN_S
    short(driver, names="abc")
    assert states(driver) == [State.READY, State.READY, State.DRAINING]


# ---------------------------------------------------------------- who stays


def test_one_that_serves_always_stays() -> None:
    driver = crowd()
    for name in "ab":
        driver.stream(name, name)
    driver.now += TURN_S
    for _ in range(3):
        sample(driver, -9, a=4, b=4)
        assert states(driver, "ab") == [State.DRAINING, State.READY]
    driver.gone("a")
    sample(driver, -9, b=4)
    assert driver.state("b") is State.READY


def test_what_is_pinned_or_must_run_through_stays() -> None:
    models = [sized("a", 4 * GIB, pinned=True), sized("b", 4 * GIB), sized("c", 4 * GIB)]
    driver = ready(models, budget_gib=12)
    driver.stream("a", "r1")
    driver.stream("b", "r2", resume=False)
    driver.stream("c", "r3")
    driver.now += TURN_S
    sample(driver, -9, a=4, b=4, c=4)
    assert states(driver) == [State.READY, State.READY, State.DRAINING]


@pytest.mark.parametrize("budget_gib", [3, 4])
def test_who_could_not_return_stays_and_who_just_fits_goes(budget_gib: int) -> None:
    driver = crowd()
    for name in "ab":
        driver.stream(name, name)
    driver.now += TURN_S
    reload(driver, "ab", budget_gib=budget_gib)
    sample(driver, 9, a=4, b=4)
    first = State.READY if budget_gib == 3 else State.DRAINING
    assert states(driver, "ab") == [first, State.READY], "without room its answers would end"


def test_with_swap_off_nobody_goes() -> None:
    driver = crowd(swap=False)
    for name in "ab":
        driver.stream(name, name)
    driver.now += TURN_S
    short(driver)
    assert states(driver, "ab") == [State.READY] * 2


def test_nobody_goes_while_the_budget_is_lowered_and_memory_is_not_short() -> None:
    driver = SwapDriver([sized(name, 4 * GIB) for name in "abc"], limited(8 * GIB))
    driver.bring_up("a", "b")
    for name in "ab":
        driver.stream(name, name)
    short(driver)
    driver.now += TURN_S
    sample(driver, 0.5, a=4, b=4)
    assert memory(driver)["effective_budget_bytes"] < 8 * GIB
    driver.ask("r1", "c")
    assert states(driver) == [State.READY, State.READY, State.PENDING]
    assert driver.told(PauseRow) == []


def test_nobody_goes_because_a_process_has_grown() -> None:
    driver = crowd()
    for name in "ab":
        driver.stream(name, name)
    driver.now += TURN_S
    sample(driver, 9, a=5, b=4)
    assert memory(driver)["over_bytes"] == GIB
    assert states(driver, "ab") == [State.READY] * 2, "it would be back at once, and grow again"


# ---------------------------------------------------------------- called off


def test_it_is_called_off_when_memory_is_no_longer_short() -> None:
    driver = crowd()
    driver.say(Subscribe(id=SUBSCRIPTION))
    keys = [driver.stream("a", "r1"), driver.stream("a", "r2")]
    driver.stream("b", "r3")
    driver.now += TURN_S
    short(driver)
    driver.row_left(keys[0], "a")
    short(driver)
    assert driver.state("a") is State.DRAINING
    answer = driver.foresees("a")
    assert (answer["outcome"], answer["reason"]) == (
        "waits",
        "makes room because other programs need memory, and is loaded again in its turn",
    )
    sample(driver, 9, a=4, b=4)
    assert driver.state("a") is State.READY
    assert "stays: memory is no longer short" in notes(driver)
    assert [one.key for one in driver.resumed()] == [keys[0]]


@pytest.mark.parametrize("budget_gib", [8, 6])
def test_it_is_called_off_by_a_reload_only_if_there_is_room_then(budget_gib: int) -> None:
    driver = crowd()
    for name in "ab":
        driver.stream(name, name)
    driver.now += TURN_S
    reload(driver, "ab", budget_gib=6)
    assert driver.state("a") is State.DRAINING
    reload(driver, "ab", budget_gib=budget_gib)
    assert driver.state("a") is (State.READY if budget_gib == 8 else State.DRAINING)
