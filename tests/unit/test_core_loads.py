"""What the core learns from loads: that one cannot heal, and how rows may be batched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import Batching, State
from mlxsup.protocol.worker_messages import Dying, Ready
from mlxsup.supervisor.core.actions import Announce, Spawn
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import LAUNCH, RESTART, Driver, entry

RAISED = "RuntimeError: [GatherMM] only float32 is supported"
READY = Ready(
    context_length=100,
    fingerprint="print-1",
    backend="fake",
    batching=Batching.SERIAL_PREFILL,
    batching_reason="rows of different length differ by 0.4",
    warnings=["memory is short", "the context is unknown"],
)
KNOWN = {
    "fingerprint": "print-1",
    "batching": "serial_prefill",
    "reason": "rows of different length differ by 0.4",
}

# ---------------------------------------------------------------- loads that end alike


def die(driver: Driver, message: str, code: int = 70) -> None:
    """The process comes up, says why it dies, and exits."""
    driver.pass_time(10.0)  # the delay before the start, if there is one
    assert driver.state() is State.LOADING
    driver.spawned()
    driver.hello()
    driver.worker(Dying(code=code, message=message))
    driver.exit(code=code)


def test_the_same_error_in_two_loads_in_a_row_is_permanent_P11() -> None:
    driver = Driver()
    driver.ask("waits")
    die(driver, RAISED)
    assert driver.state() is State.LOADING, "once may be bad luck"
    die(driver, RAISED)
    row = driver.row()
    assert (row["state"], row["generation"]) == ("FAILED", 2)
    assert row["cause"] == f"exit code 70: {RAISED}, as the time before"
    assert (row["last_exit"]["reason"], row["last_exit"]["detail"]) == ("load_error", RAISED)
    assert driver.errors() == {"waits": "load_failed"}


def test_numbers_do_not_make_an_error_another_one() -> None:
    driver = Driver()
    driver.load()
    die(driver, "ValueError: no room at 0x7f3a2b10 after 12.5 s (object deadbeef01)")
    die(driver, "ValueError: no room at 0x7f00ffee after 3.75 s (object 00c0ffee42)")
    assert (driver.state(), driver.generation()) == (State.FAILED, 2)


def test_another_error_is_another_attempt() -> None:
    driver = Driver()
    driver.load()
    for message in ("ValueError: a", "ValueError: b", "ValueError: a"):
        die(driver, message)
        assert driver.state() in (State.LOADING, State.BACKOFF)
    assert driver.generation() >= RESTART.max_restarts


def test_another_code_with_the_same_words_is_another_error() -> None:
    driver = Driver()
    driver.load()
    die(driver, "gone", code=70)
    die(driver, "gone", code=71)
    assert driver.state() is State.BACKOFF


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (ExitCode.OUT_OF_MEMORY, "the weights do not fit into memory"),
        (ExitCode.STEP_ERROR, "RuntimeError: [malloc] Unable to allocate 12 bytes"),
        (ExitCode.GPU_FAULT_ELSEWHERE, "innocent victim"),
        (ExitCode.STEP_ERROR, "RuntimeError: Caused GPU Timeout Error"),
        (143, "ended by SIGTERM"),
    ],
)
def test_what_others_cause_is_tried_as_often_as_the_entry_says_P9(code: int, message: str) -> None:
    driver = Driver()
    driver.load()
    for _ in range(RESTART.max_restarts):
        die(driver, message, code=code)
        assert driver.state() in (State.LOADING, State.BACKOFF)
    die(driver, message, code=code)
    assert driver.state() is State.FAILED
    assert "crashed 4 times" in driver.row()["cause"]


def test_a_process_that_says_nothing_is_tried_again() -> None:
    driver = Driver()
    driver.load()
    for _ in range(2):
        driver.spawned()
        driver.exit(signal="SIGSEGV", last_lines=("the same line",))
    assert driver.state() is State.BACKOFF


def test_a_load_that_succeeded_between_makes_it_the_first_again() -> None:
    driver = Driver()
    driver.load()
    die(driver, RAISED)
    driver.come_up()
    driver.worker(Dying(code=70, message=RAISED))
    driver.exit(code=70)
    assert driver.state() is State.BACKOFF, "a crash after READY is no load that failed"
    die(driver, RAISED)
    assert driver.state() is State.BACKOFF


@pytest.mark.parametrize("between", ["silence", "a stall", "no process"])
def test_a_load_that_ended_otherwise_between_makes_it_the_first_again(between: str) -> None:
    driver = Driver()
    driver.load()
    die(driver, RAISED)
    if between == "no process":
        driver.spawn_failed()
    else:
        driver.spawned()
        driver.hello()
        if between == "a stall":
            driver.pass_time(entry().load_stall_timeout_s + 1.0)
            assert driver.state() is State.STOPPING
        driver.exit(code=70)
    assert driver.row()["last_exit"]["detail"] != RAISED
    die(driver, RAISED)
    assert driver.state() is State.BACKOFF
    die(driver, RAISED)
    assert driver.state() is State.FAILED


def test_a_load_that_was_ended_is_not_the_first_of_two() -> None:
    driver = Driver()
    driver.load()
    driver.spawned()
    driver.hello()
    driver.worker(Dying(code=70, message=RAISED))
    driver.unload()
    driver.exit(code=70)
    driver.ask()
    die(driver, RAISED)
    assert driver.state() is State.LOADING


def test_a_person_who_asks_for_it_gets_two_attempts_again() -> None:
    driver = Driver()
    driver.load()
    die(driver, RAISED)
    die(driver, RAISED)
    driver.restart()
    die(driver, RAISED)
    assert driver.state() is State.LOADING
    die(driver, RAISED)
    assert (driver.state(), driver.generation()) == (State.FAILED, 4)


# ---------------------------------------------------------------- what READY says


def come_up(driver: Driver, ready: Ready = READY) -> None:
    """From the spawn to this READY."""
    driver.spawned()
    driver.hello()
    driver.worker(ready)


def known(driver: Driver) -> list[dict[str, str] | None]:
    """What the spawns of the latest event hand over."""
    return [spawn.known_batching for spawn in driver.of(Spawn)]


def test_status_shows_how_rows_are_batched_and_what_to_know() -> None:
    driver = Driver()
    driver.load()
    assert (driver.row()["batching"], driver.row()["warnings"]) == (None, [])
    come_up(driver)
    assert driver.row()["batching"] == {"mode": "serial_prefill", "reason": READY.batching_reason}
    assert driver.row()["warnings"] == ["memory is short", "the context is unknown"]
    driver.exit()
    assert (driver.row()["batching"], driver.row()["warnings"]) == (None, [])


def test_the_change_to_ready_tells_it_and_no_other_change_does() -> None:
    driver = Driver()
    driver.load()
    come_up(driver)
    told = {"batching": {"mode": "serial_prefill", "reason": READY.batching_reason}}
    [change] = [action.change for action in driver.of(Announce)]
    assert change["to"] == "READY"
    assert {key: change[key] for key in told} == told
    assert change["warnings"] == READY.warnings
    driver.ask()
    driver.unload()
    driver.load()
    [drains, *_] = changes = [action.change for action in driver.of(Announce)]
    assert drains["to"] == "READY", "it was reported already"
    assert all((one["batching"], one["warnings"]) == (None, []) for one in changes)


def test_what_was_found_out_survives_crashes_restarts_and_unloads() -> None:
    driver = Driver()
    driver.load()
    assert known(driver) == [None]
    come_up(driver)
    driver.exit()
    assert known(driver) == [KNOWN]
    come_up(driver)
    driver.restart()
    driver.exit(code=0)
    assert known(driver) == [KNOWN]
    driver.exit()  # while loading
    assert known(driver) == [KNOWN]
    come_up(driver)
    driver.unload()
    driver.exit(code=0)
    driver.load()
    assert known(driver) == [KNOWN]


def test_the_latest_word_counts() -> None:
    driver = Driver()
    driver.load()
    come_up(driver)
    driver.exit()
    other = replace(
        READY, fingerprint="print-2", batching=Batching.TOGETHER, batching_reason="", warnings=[]
    )
    come_up(driver, other)
    driver.pass_time(RESTART.stable_s)
    driver.exit()
    assert known(driver) == [{"fingerprint": "print-2", "batching": "together", "reason": ""}]


def test_a_worker_of_one_row_has_found_nothing_out() -> None:
    single = entry(launch=replace(LAUNCH, max_concurrency=1))
    driver = Driver([single])
    driver.load()
    come_up(driver, replace(READY, batching=Batching.TOGETHER, batching_reason=""))
    driver.do(
        Reloaded(now=driver.now, settings=CoreSettings(), models=(entry(),), caller=None, later=())
    )
    driver.exit(code=0)
    assert known(driver) == [None]


def test_what_is_known_stays_known_beside_a_life_of_one_row() -> None:
    driver = Driver()
    driver.load()
    come_up(driver)
    for concurrency in (1, 2):
        changed = entry(launch=replace(LAUNCH, max_concurrency=concurrency))
        driver.do(
            Reloaded(
                now=driver.now, settings=CoreSettings(), models=(changed,), caller=None, later=()
            )
        )
        driver.exit(code=0)
        assert known(driver) == [KNOWN]
        come_up(driver, replace(READY, batching=Batching.TOGETHER, batching_reason=""))
        if concurrency == 1:
            assert driver.row()["batching"] == {"mode": "together", "reason": ""}
