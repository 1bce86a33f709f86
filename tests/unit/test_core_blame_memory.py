"""Deaths for want of memory: the rows are halved and nobody is accused."""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat

from support.core_driver import LAUNCH, Driver, entry
from support.suspects import HOUR_S, SETTINGS, crash, engine_of, finish


def test_out_of_memory_halves_the_rows_and_accuses_nobody() -> None:
    driver = engine_of(4)
    driver.serve(*"abcd")
    assert crash(driver, code=75) == [1, 2]
    assert (driver.row()["row_limit"], driver.row()["suspects"]) == (2, 0)
    assert crash(driver, code=75) == [1]
    assert crash(driver, code=75) == [1], "it tries once more"
    driver.exit(code=75)
    assert driver.errors() == {"a": ErrorCode.INSUFFICIENT_MEMORY}
    driver.pass_time(10.0)
    driver.come_up()
    assert driver.dispatched() == [2]
    driver.pass_time(HOUR_S)
    finish(driver, 2)
    assert driver.row()["row_limit"] == 4


def test_a_kill_over_the_memory_limit_is_taken_for_out_of_memory() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    driver.sample(1001)
    assert crash(driver, "SIGKILL") == [1]
    assert driver.row()["row_limit"] == 1
    beat = Heartbeat(step=1, phase=WorkerPhase.DECODE, phase_s=0.0, active_bytes=2000)
    driver.worker(beat)
    assert crash(driver, "SIGKILL") == [1], "it tries once more"
    driver.worker(beat)
    driver.exit(signal="SIGKILL")
    assert driver.errors() == {"a": ErrorCode.INSUFFICIENT_MEMORY}


def test_what_was_measured_of_a_process_says_nothing_of_the_next_one() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    before = driver.row()["pid"]
    driver.sample(1000)
    assert driver.row()["footprint_bytes"] == 1000
    driver.exit()
    driver.sample(1001, pid=before)
    assert driver.row()["footprint_bytes"] == 0
    driver.come_up(pid=before + 1)
    driver.sample(1001, pid=before)
    assert crash(driver, "SIGKILL") == [1, 2], "no kill for memory"


def test_nor_before_the_next_one_was_measured() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    driver.sample(1001)
    driver.exit(signal="SIGTERM")
    driver.come_up()
    assert crash(driver, "SIGKILL") == [1, 2], "no kill for memory"


def test_a_kill_under_the_limit_is_a_kill_from_outside() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    driver.sample(1000)
    assert crash(driver, "SIGKILL") == [1, 2]


def killed_holding(driver: Driver, footprint_bytes: int, machine_bytes: int) -> list[RequestKey]:
    """SIGKILL from outside, after a sample; returns what is dispatched afterwards."""
    driver.serve("a", "b")
    driver.sample(footprint_bytes, machine_bytes=machine_bytes)
    return crash(driver, "SIGKILL")


def test_the_limit_is_what_the_launch_says_where_no_other_is_set() -> None:
    launch = replace(LAUNCH, max_concurrency=4, memory_limit_bytes=1000)
    for footprint_bytes, dispatched in ((1001, [1]), (1000, [1, 2])):
        driver = Driver([entry(launch=launch)], SETTINGS)
        driver.load()
        driver.come_up()
        assert killed_holding(driver, footprint_bytes, 10_000) == dispatched


def test_without_a_limit_a_kill_of_who_fills_the_machine_is_out_of_memory() -> None:
    assert killed_holding(engine_of(4), 901, 1000) == [1]
    assert killed_holding(engine_of(4), 900, 1000) == [1, 2]
