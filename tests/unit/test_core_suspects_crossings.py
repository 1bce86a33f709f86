"""What crosses the end of a turn of a suspect: tokens, ends, cancels, crashes."""

from __future__ import annotations

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import PauseRow
from mlxsup.supervisor.core.health.blame import PROBATION_TOKENS

from support.core.driver import Driver
from support.core.suspects import crash, engine_of, gain, prove


def yielding() -> Driver:
    """Suspects `a` and `b`; `a` has come past the crash, and its row has been asked to leave."""
    driver = engine_of(2)
    for key in driver.serve("a", "b"):
        driver.accept(key)
    crash(driver)
    crash(driver)
    for _ in range(PROBATION_TOKENS):
        gain(driver, 1)
    assert driver.told(PauseRow) == [PauseRow(key=RequestKey(1), keep=False)]
    return driver


def test_a_cancel_that_crosses_the_end_of_a_turn_is_answered_once() -> None:
    driver = yielding()
    driver.cancel("a")
    end = driver.result_of("a")
    assert end.finish_reason is FinishReason.CANCELLED
    driver.row_left(1)
    assert driver.dispatched() == [2]
    assert driver.row()["queued"] == 0


def test_a_crash_at_the_end_of_a_turn_accuses_its_rows_and_convicts_none() -> None:
    driver = yielding()
    assert crash(driver) == [1]
    assert driver.row()["quarantined"] == 0
    assert driver.row()["alone"] == "a", "it has to come past this crash as well"


def test_a_row_is_asked_to_leave_once_whatever_happens_until_it_has_left() -> None:
    driver = yielding()
    driver.beat()
    assert driver.told(PauseRow) == []
    driver.ask("new", body=b"new")
    assert driver.told(PauseRow) == []
    driver.token(1)
    assert driver.told(PauseRow) == []


def test_a_turn_that_was_cancelled_lasts_until_its_row_has_left() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    assert crash(driver) == [1]
    driver.cancel("a")
    assert driver.dispatched() == [], "the engine may still die of it"
    driver.ask("new", body=b"new")
    assert driver.dispatched() == []
    driver.row_left(1)
    assert driver.dispatched() == [3]


def test_a_turn_that_ended_leaves_no_limit_for_the_start() -> None:
    driver = engine_of(2)
    for round_ in range(2):
        driver.ask(f"a{round_}", body=b"a")
        driver.ask(f"b{round_}", body=b"b")
        crash(driver)
        driver.cancel(f"a{round_}")
        driver.cancel(f"b{round_}")
    for key in range(1, 5):
        driver.row_left(key)
    driver.ask("a", body=b"a", queue_timeout_s=5.0)
    driver.ask("b", body=b"b")
    driver.accept(5)
    assert prove(driver, 5) == [6]
    driver.pass_time(6.0)
    assert driver.row()["queued"] == 1
    assert prove(driver, 6) == [5]
