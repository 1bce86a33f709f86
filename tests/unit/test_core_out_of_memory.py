"""A request that runs out of memory alone gets a second try, and others make room for that."""

from __future__ import annotations

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import State
from mlxsup.protocol.worker_messages import Dispatch, GiveBack
from mlxsup.supervisor.core.actions import SendToWorker

from support.core_driver import entry
from support.core_memory import MemoryDriver, limited
from support.core_rows import FIXED, ONE_ROW, RowsDriver, bytes_for
from support.suspects import crash, engine_of, finish

MODEL = FIXED + ONE_ROW


def asked(driver: MemoryDriver) -> list[str]:
    """The models that the latest event asked to give back."""
    sent = [action for action in driver.actions if isinstance(action, SendToWorker)]
    return [str(one.model) for one in sent if isinstance(one.message, GiveBack)]


def three_models() -> MemoryDriver:
    """`a` and `b` are READY, `c` is loading; nothing limits their memory."""
    driver = MemoryDriver([entry(name) for name in "abc"], limited(10**12, parallel_loads=2))
    driver.bring_up("a", "b")
    driver.load("c")
    assert driver.state("c") is State.LOADING
    return driver


def test_it_ends_at_the_second_time() -> None:
    driver = engine_of(4)
    [key] = driver.serve("a")
    driver.accept(key)
    driver.token(key)
    assert crash(driver, code=75) == [key]
    assert driver.errors() == {}
    assert driver.row()["row_limit"] == 4, "nobody else is limited"
    driver.exit(code=75)
    assert driver.errors() == {"a": ErrorCode.INSUFFICIENT_MEMORY}


def test_the_second_try_continues_the_answer() -> None:
    driver = engine_of(4)
    [key] = driver.serve("a")
    driver.accept(key)
    driver.token(key)
    crash(driver, code=75)
    [again] = driver.told(Dispatch)
    assert again.resume is not None
    finish(driver, key)
    assert driver.errors() == {}


def test_two_requests_that_each_ran_out_of_memory_once_do_not_count_together() -> None:
    driver = engine_of(4)
    for id, other in (("a", 1), ("b", 2)):
        assert driver.serve(id) == [other]
        assert crash(driver, code=75) == [other]
        finish(driver, other)
    assert driver.errors() == {}


def test_one_that_must_not_continue_ends_like_all_of_its_kind() -> None:
    driver = engine_of(4)
    driver.ask("a", resume=False)
    [key] = driver.dispatched()
    driver.accept(key)
    driver.exit(code=75)
    assert driver.errors() == {"a": ErrorCode.WORKER_CRASHED}


def test_every_other_worker_that_is_ready_gives_back_before_the_second_try() -> None:
    driver = three_models()
    driver.serve("r", model="a")
    driver.exit("a", code=75)
    assert asked(driver) == ["b"], "c has nothing to give, and a is gone"


def test_nobody_gives_back_if_there_is_no_second_try() -> None:
    driver = three_models()
    driver.serve("r", model="a")
    driver.cancel("r")
    driver.exit("a", code=75)
    assert asked(driver) == [], "it had been cancelled"
    driver.come_up("a")
    driver.serve("r1", "r2", model="a")
    driver.exit("a", code=75)
    assert asked(driver) == [], "half as many run"


def test_a_death_of_another_kind_asks_nobody_again() -> None:
    driver = three_models()
    [key] = driver.serve("r", model="a")
    driver.exit("a", code=75)
    driver.come_up("a")
    assert driver.dispatched() == [key]
    driver.exit("a", signal="SIGKILL")
    assert asked(driver) == []


def test_others_keep_to_what_their_rows_hold_until_the_second_try_has_ended() -> None:
    driver = RowsDriver("ab", 3 * MODEL)
    driver.bring_up("a")
    driver.load("b")
    driver.confirm("a")
    driver.now += 1
    driver.measure()
    driver.come_up("b")
    for name in "ab":
        driver.confirm(name)
    assert driver.budget("b") > ONE_ROW
    key = driver.begin("a", "r", prompt=500)
    driver.begin("b", "s", prompt=900)
    driver.exit("a", code=75)
    held = bytes_for(1, 900 + 256)
    assert (asked(driver), driver.budget("b")) == (["b"], held)
    driver.confirm("b")
    driver.come_up("a")
    assert driver.dispatched() == [key]
    driver.confirm("a")
    driver.now += 1
    driver.measure()
    assert driver.budget("b") == held, "it is under way"
    assert driver.budget("a") > held, "and may take the room"
    driver.end("a", key)
    driver.now += 1
    driver.measure()
    driver.confirm("a")
    assert driver.budget("b") > held
