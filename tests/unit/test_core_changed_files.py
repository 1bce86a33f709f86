"""Models whose files have changed are not swapped out while answers are open that only their live
process can continue."""

from __future__ import annotations

import pytest

from mlxsup.protocol.client_messages import Failed, Subscribe
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.states import State
from mlxsup.protocol.worker_messages import Exit, PauseRow
from mlxsup.supervisor.core.actions import LookAtFiles
from mlxsup.supervisor.core.events import FilesSeen
from mlxsup.supervisor.core.lifecycle.files import COUNTS_FOR_S
from mlxsup.supervisor.core.settings import ClientSettings

from .test_core_giving_back import sample
from .test_core_shortage import TURN_S, crowd, short
from support.core_looks import ALICE, BOB
from support.core_memory import GIB, SUBSCRIPTION, limited, notes, sized, states
from support.core_swaps import SwapDriver, finish, rivals

CHANGE = "config.json has changed since it was loaded"


def changed(model: str = "a", names: str = "ab") -> SwapDriver:
    """Rivals, of which the first has a stream, and other files than it has loaded."""
    driver = rivals(names)
    driver.stream("a", "r1")
    driver.folders.changes[model] = CHANGE
    return driver


# ---------------------------------------------------------------- who stays


def test_a_model_whose_files_have_changed_stays_until_its_answers_have_ended_I7() -> None:
    driver = changed()
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.ask("r2", "b")
    assert driver.stays("a")
    assert driver.told(PauseRow) == []
    assert driver.row("b")["memory_wait"]["reason"] == (
        "needs 4.00 GiB, 0.0 MiB is free: a is busy; a stays until its answers have ended,"
        f" because {CHANGE}"
    )
    [key] = driver.model("a").running
    finish(driver, "a", key)
    [done] = driver.terminals[ALICE, "r1"]
    assert not isinstance(done, Failed)
    driver.exit("a", code=0)
    assert driver.spawns() == ["b"], "now it may go"


def test_watchers_are_notified_once_why_it_stays_and_when_that_is_over() -> None:
    driver = changed()
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.ask("r2", "b")
    driver.now += TURN_S
    driver.pass_time(0.1)
    assert notes(driver) == [f"is not swapped out while its answers are open: {CHANGE}"]
    for _ in range(3):
        driver.now += COUNTS_FOR_S
        sample(driver, 9)
        assert notes(driver) == []
    driver.folders.changes.clear()
    driver.now += COUNTS_FOR_S
    sample(driver, 9)
    restored, swapped = notes(driver)
    assert restored == "may be swapped out again: its files are those that it has loaded"
    assert swapped.startswith("swapped out for b")


@pytest.mark.parametrize("is_accepted", [True, False])
def test_paused_answers_keep_it_if_they_have_begun(is_accepted: bool) -> None:
    driver = rivals()
    stream = driver.stream("a", "r1")
    if is_accepted:
        driver.pause("r1")
        driver.row_left(stream, "a")
    else:
        [other] = driver.serve("r2", model="a")
        driver.pause("r2")
        driver.row_left(other, "a")
        finish(driver, "a", stream)
    driver.folders.changes["a"] = CHANGE
    driver.ask("r3", "b")
    driver.pass_time(TURN_S + 1.0)
    assert (driver.state("a") is State.READY) is is_accepted


def test_answers_that_wait_to_continue_keep_it() -> None:
    models = [sized("d", 2 * GIB, pinned=True), sized("a", 2 * GIB), sized("b", 2 * GIB)]
    clients = {"*": ClientSettings(max_running=1)}
    driver = SwapDriver(models, limited(4 * GIB, clients=clients))
    driver.bring_up("d", "a")
    stream = driver.stream("a", "r1")
    driver.pause("r1")
    driver.row_left(stream, "a")
    driver.stream("d", "r2")
    driver.resume("r1")
    assert not driver.model("a").running, "its client has another one running"
    driver.folders.changes["a"] = CHANGE
    driver.ask("r3", "b", BOB)
    assert driver.stays("a")


def test_a_row_that_the_worker_has_not_accepted_yet_keeps_it() -> None:
    """It may be accepted before it leaves."""
    driver = changed()
    [key] = driver.model("a").running
    driver.serve("r2", model="a")
    finish(driver, "a", key)
    driver.ask("r3", "b")
    assert driver.stays("a")


def test_the_next_in_line_gets_its_turn_instead() -> None:
    models = [sized("a", 4 * GIB), sized("b", 8 * GIB), sized("c", 4 * GIB), sized("d", 4 * GIB)]
    driver = SwapDriver(models, limited(8 * GIB, max_queue=64, max_queue_per_client=64))
    driver.bring_up("a", "d")
    for name in "ad":
        driver.stream(name, name)
    driver.folders.changes["a"] = CHANGE
    driver.ask("r1", "b")
    driver.ask("r2", "c")
    driver.passes_until("d")
    driver.gone("d")
    assert driver.spawns() == ["c"], "as long as `a` stays, nothing makes room for `b`"
    assert driver.state("a") is State.READY


def test_another_model_goes_when_memory_is_short() -> None:
    driver = crowd()
    for name in "ab":
        driver.stream(name, name)
    driver.folders.changes["a"] = CHANGE
    driver.now += TURN_S
    short(driver)
    assert states(driver, "ab") == [State.READY, State.DRAINING]
    both = crowd()
    for name in "ab":
        both.stream(name, name)
        both.folders.changes[name] = CHANGE
    both.now += TURN_S
    short(both)
    assert states(both, "ab") == [State.READY] * 2


# ---------------------------------------------------------------- when files are looked at


def test_nobody_looks_before_a_swap_depends_on_it() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    driver.pass_time(60.0)
    driver.ask("r2", "b")
    driver.pass_time(19.9)
    assert driver.folders.looks == []
    driver.pass_time(0.2)
    assert (driver.folders.looks, driver.why("a")) == (["a"], "swap")


def test_files_do_not_matter_if_nothing_has_begun() -> None:
    driver = rivals()
    key = driver.stream("a", "r1")
    [other] = driver.serve("r2", model="a")
    driver.pause("r2")
    driver.row_left(other, "a")
    finish(driver, "a", key)
    driver.folders.changes["a"] = CHANGE
    driver.ask("r3", "b")
    driver.pass_time(TURN_S + 1.0)
    assert (driver.folders.looks, driver.why("a")) == ([], "swap")


def test_nothing_leaves_before_a_slow_look_has_ended_and_nobody_looks_twice() -> None:
    driver = rivals()
    driver.folders.is_slow = True
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.pass_time(TURN_S + 60.0)
    sample(driver, 9)
    assert (driver.folders.looks, driver.state("a")) == (["a"], State.READY)
    driver.folders.answer(driver.core, "a", driver.now)
    assert driver.why("a") == "swap"


def test_what_was_found_counts_for_some_seconds_and_no_longer() -> None:
    driver = rivals()
    driver.folders.is_slow = True
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.pass_time(TURN_S + 0.1)
    driver.cancel("r2")
    driver.folders.answer(driver.core, "a", driver.now)
    driver.ask("r3", "b")
    driver.pass_time(TURN_S + 0.1)
    assert driver.folders.looks == ["a", "a"], "the first look was 20 s ago"
    driver.folders.answer(driver.core, "a", driver.now)
    assert driver.why("a") == "swap"


def test_files_that_keep_a_model_are_looked_at_again_while_its_answers_are_open() -> None:
    driver = changed()
    driver.ask("r2", "b")
    driver.pass_time(TURN_S + 0.1)
    for _ in range(int(4 * COUNTS_FOR_S) + 1):
        sample(driver, 9)
    assert driver.folders.looks == ["a"] * 5
    [key] = driver.model("a").running
    finish(driver, "a", key)
    for _ in range(int(4 * COUNTS_FOR_S)):
        sample(driver, 9)
    assert driver.folders.looks == ["a"] * 5


def test_nobody_looks_again_while_a_look_has_not_ended() -> None:
    driver = changed()
    driver.ask("r2", "b")
    driver.pass_time(TURN_S + 0.1)
    driver.folders.is_slow = True
    for _ in range(int(4 * COUNTS_FOR_S)):
        sample(driver, 9)
    assert driver.folders.looks == ["a"] * 2


def test_all_victims_are_compared_before_any_of_them_goes() -> None:
    models = [*(sized(name, 2 * GIB) for name in "ab"), sized("c", 4 * GIB)]
    driver = SwapDriver(models, limited(4 * GIB))
    driver.bring_up("a", "b")
    driver.folders.is_slow = True
    for name in "ab":
        driver.stream(name, name)
    driver.ask("r1", "c")
    driver.pass_time(TURN_S + 10.0)
    assert sorted(driver.folders.looks) == ["a", "b"]
    driver.folders.answer(driver.core, "a", driver.now)
    assert states(driver, "ab") == [State.READY] * 2
    driver.folders.changes["b"] = CHANGE
    driver.folders.answer(driver.core, "b", driver.now)
    assert states(driver, "ab") == [State.READY] * 2, "without `b` it would be for nothing"


def test_an_answer_about_an_earlier_process_says_nothing_of_this_one() -> None:
    driver = rivals()
    driver.folders.is_slow = True
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.pass_time(TURN_S + 0.1)
    old = driver.generation("a")
    driver.exit("a", code=70)
    driver.turn("a")
    late = FilesSeen(now=driver.now, model=ModelName("a"), generation=Generation(old), change="x")
    driver.do(late)
    assert driver.model("a").life.files.change == ""


def test_an_answer_that_meets_a_drain_is_kept_for_its_return() -> None:
    driver = rivals()
    driver.folders.is_slow = True
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.pass_time(TURN_S + 0.1)
    driver.unload("a")
    driver.folders.changes["a"] = CHANGE
    driver.folders.answer(driver.core, "a", driver.now)
    driver.load("a")
    assert driver.state("a") is State.READY
    driver.folders.is_slow = False
    assert driver.stays("a", 60.0)


def test_an_answer_that_meets_the_end_of_the_process_changes_nothing() -> None:
    driver = rivals()
    driver.folders.is_slow = True
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.pass_time(TURN_S + 0.1)
    driver.restart("a", now=True)
    assert len(driver.told(Exit)) == 1
    driver.folders.answer(driver.core, "a", driver.now)
    assert driver.state("a") is State.STOPPING


def test_the_look_is_for_the_process_that_lives_now() -> None:
    driver = rivals()
    driver.folders.is_slow = True
    driver.stream("a", "r1")
    driver.exit("a", code=70)
    driver.turn("a")
    driver.ask("r2", "b")
    found: list[LookAtFiles] = []
    for _ in range(60):
        driver.pass_time(1.0)
        found += driver.of(LookAtFiles)
    assert found == [LookAtFiles(model=ModelName("a"), generation=driver.generation("a"))]


def test_a_new_process_has_loaded_what_is_there_now() -> None:
    driver = changed()
    driver.ask("r2", "b")
    driver.pass_time(TURN_S + 1.0)
    driver.exit("a", code=70)
    driver.folders.changes.clear()
    driver.turn("a")
    driver.passes_until("a")
