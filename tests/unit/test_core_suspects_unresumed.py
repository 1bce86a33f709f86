"""Suspects and requests that may not be resumed, in one engine."""

from __future__ import annotations

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.worker_messages import PauseRow
from mlxsup.supervisor.core.health.blame import APPROACH_TOKENS

from support.core_driver import Driver
from support.suspects import crash, engine_of, finish, prove


def test_a_suspect_that_waits_for_the_others_and_may_not_be_resumed_ends_with_its_worker() -> None:
    driver = engine_of(2)
    for round_ in range(2):
        driver.ask(f"a{round_}", body=b"a")
        driver.ask(f"b{round_}", body=b"b")
        crash(driver)
        driver.cancel(f"a{round_}")
        driver.cancel(f"b{round_}")
    for key in range(1, 5):
        driver.row_left(key)
    driver.ask("a", body=b"a", resume=False)
    driver.ask("b", body=b"b")
    driver.accept(5)
    assert prove(driver, 5) == [6], "it may be asked to leave, because a crash accuses it"
    driver.exit(signal="SIGKILL")
    assert driver.errors() == {"a": ErrorCode.WORKER_CRASHED}


def test_a_new_request_that_may_not_be_resumed_waits_until_no_turn_is_due() -> None:
    driver = engine_of(4)
    driver.serve("a", "b")
    crash(driver)
    assert crash(driver) == [1]
    driver.ask("new", body=b"new", resume=False)
    assert prove(driver, 1) == [2]
    assert prove(driver, 2) == [1, 3]


def waits_for_a_row_that_may_not_be_resumed() -> Driver:
    """Suspect `long` (key 3) comes near its crash while `stays` (4) and `plain` (5) run."""
    driver = engine_of(4)
    driver.serve("long", "other")
    for _ in range(APPROACH_TOKENS + 1):
        driver.token(1)
    crash(driver)
    driver.cancel("other")
    driver.row_left(2)
    crash(driver)
    driver.cancel("long")
    driver.row_left(1)
    running = driver.serve("long")
    running += driver.serve("stays", resume=False)
    running += driver.serve("plain")
    for key in running:
        driver.accept(key)
    driver.token(*running)
    return driver


def test_a_row_that_may_not_be_resumed_holds_up_a_turn_and_nobody_else() -> None:
    driver = waits_for_a_row_that_may_not_be_resumed()
    assert [told.key for told in driver.told(PauseRow)] == [3]
    assert driver.row()["alone"] is None, "others run, too, until its row has left"
    driver.row_left(3)
    assert (driver.dispatched(), driver.row()["queued"]) == ([], 1)
    assert driver.serve("new") == [6]
    driver.token(4, 5, 6)
    assert driver.told(PauseRow) == []
    finish(driver, 4)
    assert [told.key for told in driver.told(PauseRow)] == [5, 6]


def test_rows_that_may_not_be_resumed_do_not_hold_up_a_turn_by_overlapping() -> None:
    driver = waits_for_a_row_that_may_not_be_resumed()
    driver.row_left(3)
    assert driver.serve("next", resume=False) == [], "a turn is due, and 6 would hold it up again"
    assert driver.serve("new") == [7]
    driver.token(4, 5, 7)
    finish(driver, 4)
    for key in (5, 7):
        driver.row_left(key)
    assert driver.dispatched() == [3]
    assert finish(driver, 3) == [5, 6, 7], "no turn is due any longer"


def test_one_that_may_not_be_resumed_starts_while_no_suspect_is_near_its_crash() -> None:
    driver = waits_for_a_row_that_may_not_be_resumed()
    driver.row_left(3)
    driver.cancel("long")
    assert driver.serve("long") == [6]
    assert driver.row()["on_probation"] == 2
    assert driver.serve("next", resume=False) == [7]


def test_a_crash_in_company_convicts_nobody_who_was_near_his_own() -> None:
    driver = waits_for_a_row_that_may_not_be_resumed()
    crash(driver)
    assert (driver.row()["quarantined"], driver.row()["on_probation"]) == (0, 4)
