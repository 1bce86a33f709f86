"""A pinned model keeps for good what a load of it needs; what its rows take besides comes back."""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, Priority, State
from mlxsup.protocol.text import size_text
from mlxsup.supervisor.core.events import Reloaded

from support.core_driver import RESTART
from support.core_memory import limited, sized, states
from support.core_rows import FIXED, ONE_ROW, RowsDriver, bytes_for, served
from support.core_shortage import ShortageDriver

MODEL = FIXED + ONE_ROW
LONG = 3000
BUDGET = 2 * MODEL + 4000
BUSY = FIXED + bytes_for(2, LONG + 1 + 256)
assert MODEL > BUDGET - BUSY


def run_long_rows(driver: RowsDriver) -> list[RequestKey]:
    """`p` runs two rows that take all that there is beside it."""
    driver.now += 10.0
    driver.confirm("p")
    driver.measure()
    keys = [driver.begin("p", id, LONG) for id in ("p1", "p2")]
    for key in keys:
        driver.gain("p", key, 1)
    return keys


def rows_end(driver: RowsDriver, keys: list[RequestKey]) -> None:
    for key in keys:
        driver.end("p", key)
    driver.confirm("p")
    driver.measure()


def busy() -> tuple[RowsDriver, list[RequestKey]]:
    """`p` is pinned and runs such rows."""
    driver = RowsDriver("pm", BUDGET, pinned="p")
    driver.bring_up("p")
    return driver, run_long_rows(driver)


def test_a_request_waits_until_rows_of_a_pinned_model_have_ended() -> None:
    driver, keys = busy()
    assert driver.foresees("m")["outcome"] == "waits"
    driver.ask("r1", "m")
    assert driver.errors() == {}
    assert driver.row("m")["memory_wait"]["reason"] == (
        f"needs {size_text(MODEL)}, 0.0 MiB is free:"
        f" p is pinned and holds {size_text(BUSY)} for now"
    )
    rows_end(driver, keys)
    assert driver.state("m") is State.LOADING


def test_what_fits_beside_no_pinned_model_is_refused_at_once() -> None:
    driver = RowsDriver("pm", 2 * MODEL - 1, pinned="p")
    driver.bring_up("p")
    driver.ask("r1", "m")
    error = driver.failure_of("r1").error
    assert error["code"] == ErrorCode.INSUFFICIENT_MEMORY
    assert f"p is pinned and holds {size_text(MODEL)}" in error["message"]


def test_answers_of_a_model_that_crashed_wait_for_rows_of_a_pinned_one() -> None:
    """Its restart is too far away for its memory to be kept, so rows of the other one take it."""
    driver = RowsDriver("pm", BUDGET, pinned="p")
    slow = replace(RESTART, backoff_initial_s=8.0, backoff_max_s=8.0)
    models = (served("p", pinned=True), served("m", restart=slow))
    driver.do(
        Reloaded(
            now=driver.now, settings=limited(BUDGET), models=models, needs=driver.core.fleet.needs
        )
    )
    driver.bring_up("p")
    driver.load("m")
    for _ in range(2):
        driver.confirm("p")
        driver.measure()
    driver.come_up("m")
    driver.exit("m")
    driver.come_up("m")
    stream = driver.begin("m", "r1", 100)
    driver.gain("m", stream, 1)
    driver.exit("m")
    assert driver.state("m") is State.BACKOFF
    keys = run_long_rows(driver)
    driver.pass_time(10.0)
    assert (driver.state("m"), driver.errors()) == (State.PENDING, {})
    rows_end(driver, keys)
    driver.come_up("m")
    assert driver.dispatched() == [stream]


def test_a_small_model_passes_one_that_waits_for_rows_of_a_pinned_model() -> None:
    """However long that one has waited, it is not in the way once those rows have ended."""
    driver = RowsDriver("pms", BUDGET, pinned="p")
    models = (served("p", pinned=True), served("m"), sized("s", 1000))
    driver.do(
        Reloaded(
            now=driver.now, settings=limited(BUDGET), models=models, needs=driver.core.fleet.needs
        )
    )
    driver.bring_up("p")
    run_long_rows(driver)
    driver.ask("r1", "m", priority=Priority.INTERACTIVE)
    driver.pass_time(30.0)
    driver.ask("r2", "s")
    driver.confirm("p")
    driver.measure()
    assert driver.state("m") is State.PENDING
    assert driver.state("s") is State.LOADING


def test_who_can_return_when_rows_of_a_pinned_model_end_goes_for_a_lowered_budget() -> None:
    driver = ShortageDriver("pm", pinned="p")
    run_long_rows(driver)
    driver.start("m", "m1", 100)
    driver.now += 60.0
    driver.measure()
    settings = limited(2 * MODEL + 2000, min_residency_s=0.0)
    models = (served("p", pinned=True), served("m"))
    driver.do(
        Reloaded(now=driver.now, settings=settings, models=models, needs=driver.core.fleet.needs)
    )
    driver.measure()
    assert states(driver, "pm") == [State.READY, State.DRAINING]


def grown(held: int) -> RowsDriver:
    """`p` is pinned and idle, and its process holds so much for no row."""
    driver = RowsDriver("pm", BUDGET, pinned="p")
    driver.bring_up("p")
    driver.confirm("p")
    driver.now += 1.0
    driver.measure(p=held)
    return driver


def test_what_a_process_has_outgrown_is_in_the_way_for_good_once_it_gave_nothing_back() -> None:
    held = BUDGET - 100
    driver = grown(held)
    driver.ask("r1", "m")
    assert driver.errors() == {}, "it may keep that for speed alone"
    driver.confirm("p")
    driver.now += 1.0
    driver.measure(p=held)
    error = driver.failure_of("r1").error
    assert f"p is pinned and holds {size_text(held)}" in error["message"]


def test_what_it_does_give_back_is_not() -> None:
    driver = grown(BUDGET - 100)
    driver.ask("r1", "m")
    driver.confirm("p")
    driver.now += 1.0
    driver.measure(p=MODEL)
    assert driver.state("m") is State.LOADING


def test_what_is_measured_while_rows_run_says_nothing_of_what_stays() -> None:
    """It gave back just before, so what it holds is what it needs; that was for its rows."""
    driver = RowsDriver("pms", BUDGET, pinned="p")
    models = (served("p", pinned=True), served("m"), sized("s", 1000))
    needs = driver.core.fleet.needs
    driver.do(Reloaded(now=driver.now, settings=limited(BUDGET), models=models, needs=needs))
    driver.bring_up("p")
    keys = run_long_rows(driver)
    driver.ask("r1", "m")
    driver.ask("r2", "s")
    driver.confirm("p")
    driver.now += 1.0
    driver.measure(p=BUSY)
    assert driver.state("s") is State.LOADING
    driver.come_up("s")
    driver.token(*keys, model="p", finish=FinishReason.STOP)
    assert (driver.errors(), driver.state("m")) == ({}, State.PENDING)
    driver.unload("s")
    driver.exit("s", code=0)
    for _ in range(12):
        driver.now += 1.0
        driver.measure(p=MODEL)
        driver.confirm("p")
    assert driver.state("m") is State.LOADING
