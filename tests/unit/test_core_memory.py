"""Test loads within a memory budget: admission, eviction, reservations, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Failed, Subscribe
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Exit, Heartbeat
from mlxsup.supervisor.core.events import Reloaded, Sampled
from mlxsup.supervisor.core.settings import CoreSettings

from support.core.driver import Driver, entry
from support.core.memory import (
    GIB,
    SUBSCRIPTION,
    MemoryDriver,
    limited,
    notes,
    pair_and_more,
    sized,
    states,
)
from support.core.rows import FIXED, ONE_ROW, RowsDriver, bytes_for
from support.core.swaps import SwapDriver, rivals

# Loads within the budget


def test_a_request_evicts_the_least_recently_used_once_it_was_idle_for_its_load_time_H9() -> None:
    driver = pair_and_more()
    driver.pass_time(1.0)
    driver.use("a", "r1")
    driver.pass_time(5.0)
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.ask("r2", "c")
    assert driver.told(Exit) == [Exit()]
    assert states(driver) == [State.READY, State.STOPPING, State.PENDING]
    assert (driver.row("b")["wanted"], driver.row("b")["why"]) == ("down", "evict")
    assert "evicted for c, which needs 4.00 GiB; it was idle for 6 s" in notes(driver)
    assert driver.reserved() == 8 * GIB, "until its process is gone"
    driver.exit("b", code=0)
    assert driver.spawns() == ["c"]
    assert driver.reserved() == 8 * GIB
    driver.come_up("c")
    assert len(driver.dispatched()) == 1


def test_a_model_that_was_just_used_stays_for_its_residency() -> None:
    driver = pair_and_more()  # b became READY a moment ago, a a second ago
    driver.pass_time(0.5)
    driver.use("a", "r1")
    driver.ask("r2", "c")
    assert states(driver) == [State.READY, State.READY, State.PENDING]
    driver.pass_time(0.4)
    assert driver.state("b") is State.READY, "a load takes a second"
    driver.pass_time(0.2)
    assert states(driver) == [State.READY, State.STOPPING, State.PENDING], "nobody had to ask"


def test_a_model_in_constant_use_goes_once_it_had_its_residency() -> None:
    driver = pair_and_more()
    driver.serve("busy", model="b")
    driver.use("a", "u")
    driver.ask("r0", "c")
    for second in range(11):
        driver.use("a", f"u{second}")
        driver.pass_time(0.75)
    assert driver.state("a") is State.READY, "for 9.25 seconds"
    for second in range(11, 14):
        driver.use("a", f"u{second}")
        driver.pass_time(0.75)
    assert driver.state("a") is State.STOPPING, "two chats on two models take turns"


def test_busy_models_are_waited_for_H9() -> None:
    driver = pair_and_more()
    [one] = driver.serve("r1", model="a")
    [other] = driver.serve("r2", model="b")
    driver.ask("r3", "c")
    driver.pass_time(100.0)
    assert states(driver) == [State.READY, State.READY, State.PENDING]
    wait = driver.row("c")["memory_wait"]
    assert wait == {
        "waits_s": 100.0,
        "reason": "needs 4.00 GiB, 0.0 MiB is free: a is busy, and goes when its turn is over",
    }
    driver.accept(other, "b")
    driver.token(other, model="b", finish=FinishReason.STOP)
    assert driver.state("b") is State.STOPPING, "it had its residency"
    driver.exit("b", code=0)
    assert driver.spawns() == ["c"]
    driver.accept(one, "a")
    driver.token(one, model="a", finish=FinishReason.STOP)
    assert driver.state("a") is State.READY


def test_evicted_model_waits_behind_its_successor() -> None:
    driver = pair_and_more()
    driver.pass_time(1.0)
    driver.use("a", "r1")
    driver.pass_time(5.0)
    driver.ask("r2", "c")
    driver.ask("r3", "b")
    assert driver.state("b") is State.STOPPING
    driver.exit("b", code=0)
    assert driver.spawns() == ["c"], "the memory was freed for it"
    assert driver.state("b") is State.PENDING
    driver.come_up("c")
    driver.pass_time(5.0)
    driver.exit("a", code=0)
    assert driver.spawns() == ["b"]


def test_a_smaller_model_passes_one_that_waits_but_not_for_ever() -> None:
    small = [sized("x", 2 * GIB), sized("y", 2 * GIB)]
    models = [sized("a", 4 * GIB), sized("c", 8 * GIB), *small]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a")
    driver.serve("r1", model="a")
    driver.ask("r2", "c")
    driver.ask("r3", "x")
    assert driver.spawns() == ["x"], "there is room for it"
    driver.come_up("x")
    driver.pass_time(20.0)
    driver.ask("r4", "y")
    assert driver.state("y") is State.PENDING
    assert driver.row("y")["memory_wait"]["reason"] == "needs 2.00 GiB: another has waited longer"


def test_a_model_that_leaves_room_for_the_longest_waiter_loads_first() -> None:
    models = [sized("a", 6 * GIB), sized("c", 6 * GIB), sized("x", 2 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a")
    driver.serve("r1", model="a")
    driver.ask("r2", "c")
    driver.pass_time(100.0)
    driver.ask("r3", "x")
    assert driver.spawns() == ["x"]


def test_a_load_evicts_idle_models_at_once() -> None:
    driver = pair_and_more()
    driver.use("a", "r1")
    driver.use("b", "r2")
    command = driver.load("c")
    assert states(driver) == [State.STOPPING, State.READY, State.PENDING]
    driver.exit("a", code=0)
    driver.come_up("c")
    assert driver.replies() == [command]


def test_preload_waits_for_room() -> None:
    models = [sized(name, 4 * GIB, preload=True) for name in "abc"]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.come_up("a")
    driver.come_up("b")
    driver.pass_time(500.0)
    assert states(driver) == [State.READY, State.READY, State.PENDING]
    assert "only a request or a load" in driver.row("c")["memory_wait"]["reason"]
    driver.unload("a")
    driver.exit("a", code=0)
    assert driver.spawns() == ["c"]


def test_a_pinned_model_never_goes_and_holds_its_memory_from_the_start_H9() -> None:
    models = [sized("a", 4 * GIB, pinned=True), sized("b", 4 * GIB), sized("c", 4 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    assert (driver.state("a"), driver.reserved()) == (State.STOPPED, 4 * GIB)
    driver.bring_up("b", "a")
    driver.pass_time(500.0)
    driver.ask("r1", "c")
    assert states(driver) == [State.READY, State.STOPPING, State.PENDING], "b was used later"
    driver.exit("b", code=0)
    driver.come_up("c")
    driver.unload("a")
    driver.exit("a", code=0)
    assert (driver.state("a"), driver.row("a")["reserved_bytes"]) == (State.STOPPED, 4 * GIB)


def test_load_dry_run_changes_nothing() -> None:
    driver = pair_and_more(sized("big", 9 * GIB))
    answer = driver.foresees("a")
    assert (answer["outcome"], answer["reason"]) == ("loaded", "is READY")
    answer = driver.foresees("c")
    assert answer == {
        "model": "c",
        "needed_bytes": 4 * GIB,
        "evicts": ["a"],
        "swaps": [],
        "outcome": "evicts",
        "reason": "needs 4.00 GiB, 0.0 MiB is free: a is idle",
    }
    assert driver.row("c")["wanted"] == "down"
    assert states(driver) == [State.READY, State.READY, State.STOPPED]
    driver.foresees("big")
    assert driver.errors() == {"dry-big": ErrorCode.INSUFFICIENT_MEMORY}
    driver.serve("r1", model="a")
    driver.serve("r2", model="b")
    assert driver.foresees("c")["outcome"] == "swaps"
    driver.unload("b")
    assert driver.foresees("c")["reason"].endswith("b is about to go")
    driver.row_ends("b", 2)
    driver.exit("b", code=0)
    answer = driver.foresees("c")
    assert (answer["outcome"], answer["reason"]) == ("fits", "it needs 4.00 GiB, 4.00 GiB is free")


def test_a_dry_run_without_a_budget_or_of_a_stuck_process_answers_as_the_load_would() -> None:
    driver = MemoryDriver([sized("a", GIB)], limited(0, budget=None))
    answer = driver.foresees("a")
    assert (answer["outcome"], answer["reason"]) == ("fits", "there is no memory budget")
    driver.bring_up("a")
    driver.unload("a")
    driver.pass_time(100.0)
    driver.foresees("a")
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == ErrorCode.LOAD_FAILED
    assert not failed.error["retryable"], "the same command fails again until the process is gone"


# Reservations and refusals


@pytest.mark.parametrize("is_command", [True, False])
def test_model_larger_than_the_budget_is_refused_I4(is_command: bool) -> None:
    driver = pair_and_more(sized("big", 9 * GIB))
    if is_command:
        id = driver.load("big")
    else:
        id = RequestId("r1")
        driver.ask("r1", "big")
    error = driver.failure_of(id).error
    assert error["code"] == ErrorCode.INSUFFICIENT_MEMORY
    assert error["message"] == (
        "big cannot be loaded: it needs 9.00 GiB, and the memory budget is 8.00 GiB"
    )
    assert error["detail"]["needed_bytes"] == 9 * GIB
    assert error["detail"]["budget_bytes"] == 8 * GIB
    assert error["detail"]["blocked_by"] == []
    assert states(driver) == [State.READY, State.READY, State.STOPPED], "nobody went"
    row = driver.row("big")
    assert (row["state"], row["wanted"], row["why"]) == ("STOPPED", "down", "memory")


def test_a_refusal_names_the_pinned_models_in_the_way_I4() -> None:
    models = [sized("a", 6 * GIB, pinned=True), sized("c", 4 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.ask("r1", "c")
    assert driver.failure_of().error["detail"]["blocked_by"] == ["a"]


def test_a_preload_that_can_never_fit_stays_wanted_and_refuses_requests_at_once_I4() -> None:
    driver = MemoryDriver([sized("big", 9 * GIB, preload=True)], limited(8 * GIB))
    assert driver.state("big") is State.PENDING
    driver.ask("r1", "big")
    assert driver.errors() == {"r1": ErrorCode.INSUFFICIENT_MEMORY}
    row = driver.row("big")
    assert (row["state"], row["memory_wait"]["reason"]) == (
        "PENDING", "needs 9.00 GiB, and the memory budget is 8.00 GiB",
    )  # fmt: skip
    settings = limited(9 * GIB)
    models = (sized("big", 9 * GIB, preload=True),)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))
    assert driver.spawns() == ["big"]


def test_a_process_that_cannot_be_ended_keeps_its_memory_and_is_named_P26_I2() -> None:
    driver = pair_and_more()
    driver.unload("a")
    driver.pass_time(100.0)
    assert (driver.state("a"), driver.row("a")["reserved_bytes"]) == (State.FAILED, 4 * GIB)
    driver.unload("b")
    driver.exit("b", code=0)
    driver.bring_up("c")
    models = [driver.model(name).life.settings for name in "abc"]
    driver.do(
        Reloaded(now=driver.now, settings=limited(8 * GIB), models=(*models, sized("d", 5 * GIB)))
    )
    driver.ask("r1", "d")
    error = driver.failure_of().error
    assert error["detail"]["blocked_by"] == ["a"]
    assert "a has a process that cannot be ended and holds 4.00 GiB" in error["message"]
    driver.exit("a")
    assert driver.row("a")["reserved_bytes"] == 0


def test_a_crash_keeps_the_memory_for_the_restart_I2() -> None:
    driver = pair_and_more()
    driver.exit("a")
    assert driver.state("a") is State.LOADING, "the first restart is immediate"
    driver.exit("a")
    assert driver.state("a") is State.BACKOFF
    assert driver.reserved() == 8 * GIB, "it is back within seconds"
    driver.ask("r1", "c")
    assert driver.state("c") is State.PENDING


def test_a_pinned_model_keeps_its_memory_in_a_long_back_off() -> None:
    policy = replace(entry().restart, backoff_initial_s=60.0, backoff_max_s=60.0)
    driver = MemoryDriver([sized("a", 4 * GIB, restart=policy, pinned=True)], limited(8 * GIB))
    driver.bring_up("a")
    driver.exit("a")
    driver.come_up("a")
    driver.exit("a")
    assert (driver.state("a"), driver.reserved()) == (State.BACKOFF, 4 * GIB)


def test_restarting_pinned_model_keeps_only_its_need() -> None:
    """Its process goes, and the next one takes less: nobody is refused for what this one took."""
    models = [sized("a", 4 * GIB, pinned=True), sized("c", 4 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a")
    driver.do(Sampled(now=driver.now, footprint_bytes={ord("a"): 6 * GIB}, machine_bytes=0))
    driver.restart("a")
    assert (driver.state("a"), driver.reserved()) == (State.STOPPING, 6 * GIB)
    assert driver.foresees("c")["outcome"] == "waits", "the process has it still"
    driver.ask("r1", "c")
    assert driver.state("c") is State.PENDING
    driver.exit("a", code=0)
    assert (driver.spawns(), driver.reserved()) == (["c"], 8 * GIB)
    driver.come_up("c")
    assert driver.spawns() == ["a"]


def test_a_restart_keeps_the_memory() -> None:
    driver = pair_and_more()
    driver.restart("a")
    driver.ask("r1", "c")
    driver.exit("a", code=0)
    assert driver.spawns() == ["a"]


def test_a_restart_does_not_yield_to_a_model_that_has_waited_longer() -> None:
    models = [sized("a", 4 * GIB), sized("b", 4 * GIB), sized("c", 8 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a", "b")
    driver.serve("r1", model="a")
    driver.ask("r2", "c")
    driver.pass_time(100.0)
    driver.restart("b")
    driver.exit("b", code=0)
    assert driver.spawns() == ["b"]


def test_two_restarts_that_need_more_do_not_wait_for_each_other() -> None:
    driver = pair_and_more()
    models = tuple(sized(name, 6 * GIB) for name in "abc")
    driver.do(Reloaded(now=driver.now, settings=limited(8 * GIB), models=models))
    driver.exit("a", code=0)
    driver.exit("b", code=0)
    assert sorted(str(state) for state in states(driver, "ab")) == ["LOADING", "PENDING"]
    assert driver.reserved() == 6 * GIB


def test_measured_excess_raises_the_reservation_and_evicts() -> None:
    driver = pair_and_more()
    driver.use("b", "r1")
    driver.say(Subscribe(id=SUBSCRIPTION))
    footprint = {ord("b"): 5 * GIB}
    driver.do(Sampled(now=driver.now, footprint_bytes=footprint, machine_bytes=99 * GIB))
    assert driver.row("b")["reserved_bytes"] == 5 * GIB
    assert states(driver) == [State.STOPPING, State.READY, State.STOPPED]
    assert any("because 9.00 GiB of 8.00 GiB are reserved" in note for note in notes(driver))
    driver.do(Sampled(now=driver.now, footprint_bytes={}, machine_bytes=99 * GIB))
    assert driver.row("b")["reserved_bytes"] == 5 * GIB, "until its process is gone"


def test_reported_bytes_count_and_alone_with_cuda() -> None:
    driver = pair_and_more()
    beat = Heartbeat(
        step=0, phase=WorkerPhase.IDLE, phase_s=0.0, active_bytes=4 * GIB, cache_bytes=GIB
    )
    driver.worker(beat, "b")
    driver.do(Sampled(now=driver.now, footprint_bytes={}, machine_bytes=99 * GIB))
    assert driver.row("b")["reserved_bytes"] == 5 * GIB
    ready = driver.model("a").ready
    assert ready is not None
    driver.model("a").ready = replace(ready, backend="cuda")
    footprint = {ord("a"): 7 * GIB}
    driver.do(Sampled(now=driver.now, footprint_bytes=footprint, machine_bytes=99 * GIB))
    assert driver.row("a")["reserved_bytes"] == 4 * GIB


def test_a_reload_that_lowers_the_budget_evicts_down_to_it_and_says_so() -> None:
    driver = pair_and_more()
    [key] = driver.serve("r1", model="a")
    driver.say(Subscribe(id=SUBSCRIPTION))
    models = tuple(driver.model(name).life.settings for name in "abc")
    driver.do(Reloaded(now=driver.now, settings=limited(3 * GIB), models=models))
    assert states(driver) == [State.READY, State.STOPPING, State.STOPPED], "a is busy"
    assert any("because 8.00 GiB of 3.00 GiB are reserved" in note for note in notes(driver))
    driver.exit("b", code=0)
    driver.accept(key, "a")
    driver.token(key, model="a", finish=FinishReason.STOP)
    assert driver.state("a") is State.STOPPING
    assert driver.result_of().finish_reason is FinishReason.STOP


def test_pins_that_come_with_a_reload_are_reserved_at_once_and_given_up_with_one() -> None:
    driver = pair_and_more()
    pinned = replace(driver.model("c").life.settings, pinned=True)
    others = [driver.model(name).life.settings for name in "ab"]
    driver.do(Reloaded(now=driver.now, settings=limited(8 * GIB), models=(*others, pinned)))
    assert driver.row("c")["reserved_bytes"] == 4 * GIB
    assert states(driver) == [State.STOPPING, State.READY, State.STOPPED]
    unpinned = replace(pinned, pinned=False)
    driver.do(Reloaded(now=driver.now, settings=limited(8 * GIB), models=(*others, unpinned)))
    assert driver.row("c")["reserved_bytes"] == 0


def test_a_pin_that_goes_takes_its_memory_with_it_though_the_model_waits_for_its_turn() -> None:
    pinned = sized("b", 4 * GIB, pinned=True)
    driver = MemoryDriver([sized("a", 4 * GIB), pinned], limited(8 * GIB))
    driver.load("a")
    driver.load("b")
    assert (driver.state("b"), driver.row("b")["reserved_bytes"]) == (State.PENDING, 4 * GIB)
    models = (driver.model("a").life.settings, replace(pinned, pinned=False))
    driver.do(Reloaded(now=driver.now, settings=limited(8 * GIB), models=models))
    assert (driver.state("b"), driver.row("b")["reserved_bytes"]) == (State.PENDING, 0)


def test_without_a_budget_nothing_is_refused_and_nothing_goes() -> None:
    models = [sized("a", 400 * GIB, pinned=True), sized("b", 400 * GIB)]
    driver = MemoryDriver(models, limited(0, budget=None))
    driver.bring_up("a", "b")
    assert states(driver, "ab") == [State.READY, State.READY]
    assert driver.core.status(driver.now)["memory"]["budget_bytes"] is None


# Models that are no longer wanted


def refusing() -> MemoryDriver:
    """`p` is pinned and loaded; `a`, which is preloaded, is down and does not fit next to it."""
    models = [sized("p", 6 * GIB, pinned=True), sized("a", 4 * GIB, preload=True)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.unload("a")
    driver.bring_up("p")
    assert driver.state("a") is State.STOPPED
    return driver


def test_a_refused_request_leaves_a_model_to_preload_as_it_was() -> None:
    driver = refusing()
    driver.ask("r1", "a")
    assert driver.errors() == {"r1": ErrorCode.INSUFFICIENT_MEMORY}
    row = driver.row("a")
    assert (row["state"], row["wanted"], row["why"]) == ("STOPPED", "down", "memory")


def test_a_refused_command_leaves_it_as_it_was_and_it_does_not_come_up_by_itself() -> None:
    for command in ("load", "restart"):
        driver = refusing()
        id = driver.load("a") if command == "load" else driver.restart("a")
        assert driver.failure_of(id).error["code"] == ErrorCode.INSUFFICIENT_MEMORY
        assert driver.state("a") is State.STOPPED
        models = tuple(driver.model(name).life.settings for name in "pa")
        driver.do(Reloaded(now=driver.now, settings=limited(20 * GIB), models=models))
        assert driver.spawns() == []


def test_a_preload_that_was_refused_still_waits_when_a_request_is_refused() -> None:
    models = [sized("p", 6 * GIB, pinned=True), sized("a", 4 * GIB, preload=True)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.ask("r1", "a")
    assert driver.errors() == {"r1": ErrorCode.INSUFFICIENT_MEMORY}
    assert (driver.state("a"), driver.row("a")["why"]) == (State.PENDING, "preload")


def swapped_out() -> SwapDriver:
    """`a` has made room for `b`; its one request waits for its next turn."""
    driver = rivals()
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.swap("a")
    assert states(driver, "ab") == [State.PENDING, State.LOADING]
    return driver


def test_swapped_out_model_waits_for_commands_and_paused_requests() -> None:
    driver = swapped_out()
    driver.load("a")
    driver.cancel("r1")
    assert driver.state("a") is State.PENDING
    driver = swapped_out()
    driver.pause("r1")
    assert driver.state("a") is State.PENDING
    driver.cancel("r1")
    assert driver.state("a") is State.STOPPED


# Needs of open answers

MODEL = FIXED + ONE_ROW
LONG = 5000
WITH_LONG = FIXED + bytes_for(1, LONG + 1 + 256)


def after_long_stream(budget_bytes: int) -> RowsDriver:
    """`p` is pinned; it was loaded again for a long answer, which has ended since."""
    driver = RowsDriver("pm", budget_bytes, pinned="p")
    driver.bring_up("p")
    key = driver.begin("p", "r1", LONG)
    driver.gain("p", key, 1)
    driver.exit("p")
    assert driver.row("p")["needed_bytes"] == WITH_LONG
    driver.come_up("p")
    driver.end("p", key)
    driver.confirm("p")
    return driver


def test_a_pinned_model_keeps_no_memory_for_an_answer_that_has_ended() -> None:
    driver = after_long_stream(2 * MODEL)
    assert driver.row("p")["needed_bytes"] == MODEL
    assert driver.foresees("m")["outcome"] == "fits"
    driver.ask("r2", "m")
    assert driver.errors() == {}
    driver.confirm("p")
    driver.measure()
    assert driver.state("m") is State.LOADING
    assert driver.reserved() == 2 * MODEL


def test_unloaded_pinned_model_keeps_no_memory_for_an_ended_answer() -> None:
    driver = after_long_stream(2 * MODEL)
    driver.unload("p")
    driver.exit("p", code=0)
    assert (driver.state("p"), driver.reserved()) == (State.STOPPED, MODEL)
    assert driver.foresees("p")["needed_bytes"] == MODEL


@pytest.mark.parametrize("crashes", [1, 2])
def test_crash_keeps_the_memory_of_open_answers(crashes: int) -> None:
    """They have grown since it was loaded; the second time it waits for a while."""
    driver = RowsDriver("a", 2 * WITH_LONG)
    driver.bring_up("a")
    for _ in range(crashes - 1):
        driver.exit("a")
        driver.come_up("a")
    key = driver.begin("a", "r1", LONG)
    driver.gain("a", key, 1)
    driver.exit("a")
    assert driver.state("a") is (State.LOADING if crashes == 1 else State.BACKOFF)
    assert driver.reserved() == WITH_LONG


# Events that call for a look


def measure(driver: MemoryDriver, **footprints: int) -> None:
    """What the processes of models with these letters hold, in GiB."""
    footprint = {ord(name): size * GIB for name, size in footprints.items()}
    driver.do(Sampled(now=driver.now, footprint_bytes=footprint, machine_bytes=99 * GIB))


# parallel_loads

NAMES = ("a", "b", "c", "d")


def started(parallel_loads: int, *names: str) -> Driver:
    settings = CoreSettings(parallel_loads=parallel_loads)
    return Driver([entry(name) for name in names or NAMES], settings)


def loading(driver: Driver) -> str:
    return "".join(name for name in NAMES if driver.state(name) is State.LOADING)


def load_all(driver: Driver) -> None:
    for name in NAMES:
        driver.load(name)


@pytest.mark.parametrize(("most", "first"), [(1, "a"), (2, "ab"), (3, "abc"), (9, "abcd")])
def test_as_many_load_at_once_as_the_configuration_allows(most: int, first: str) -> None:
    driver = started(most)
    load_all(driver)
    assert loading(driver) == first
    for name in NAMES[len(first) :]:
        assert driver.row(name)["progress"]["phase"] == "waiting for turn"
