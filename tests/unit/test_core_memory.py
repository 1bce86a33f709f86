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
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

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
from support.core.scripts import play
from support.core.swaps import rivals

UP, GOES, WAITS, DOWN = State.READY, State.STOPPING, State.PENDING, State.STOPPED


def reload(driver: Driver, budget_gib: int, *models: ModelSettings) -> None:
    """A budget and these models, or those that there are."""
    models = models or tuple(model.life.settings for model in driver.core.fleet)
    settings = limited(budget_gib * GIB)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


def measure(driver: Driver, **held_gib: int) -> None:
    """The monitor has measured processes, by the letters of their models."""
    footprints = {ord(name): size * GIB for name, size in held_gib.items()}
    driver.do(Sampled(now=driver.now, footprint_bytes=footprints, machine_bytes=99 * GIB))


# Loads within the budget


def test_a_request_evicts_the_least_recently_used_once_it_was_idle_for_its_load_time_H9() -> None:
    driver = pair_and_more()
    driver.pass_time(1.0)
    driver.use("a", "r1")
    driver.pass_time(5.0)
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.ask("r2", "c")
    assert driver.told(Exit) == [Exit()]
    assert states(driver) == [UP, GOES, WAITS]
    assert (driver.row("b")["wanted"], driver.row("b")["why"]) == ("down", "evict")
    assert "evicted for c, which needs 4.00 GiB; it was idle for 6 s" in notes(driver)
    assert driver.reserved() == 8 * GIB, "until its process is gone"
    driver.ask("r3", "b")
    driver.exit("b", code=0)
    assert driver.spawns() == ["c"], "the memory was freed for it"
    assert (driver.state("b"), driver.reserved()) == (WAITS, 8 * GIB)
    driver.come_up("c")
    assert len(driver.dispatched()) == 1
    driver.pass_time(5.0)
    driver.exit("a", code=0)
    assert driver.spawns() == ["b"]


PAIR = {
    "a model that was just used stays for its residency": (
        # b became READY a moment ago, a a second ago
        "wait 0.5; use a r1; ask r2 c -> a=READY & b=READY & c=PENDING; wait 0.4 -> b=READY;"
        " wait 0.2 -> a=READY & b=STOPPING & c=PENDING"
    ),
    "a load evicts idle models at once": (
        "use a r1; use b r2; load c -> a=STOPPING & b=READY & c=PENDING; exit a code=0; up c;"
        " -> replies=[c3]"
    ),
    "a busy model stays until its turn is over, and goes first once it is idle H9": (
        "serve r1 model=a; serve r2 model=b; ask r3 c; wait 100 -> a=READY & b=READY & c=PENDING;"
        " row_ends b 2 -> b=STOPPING; exit b code=0 -> spawns=[c]; row_ends a 1 -> a=READY"
    ),
    "a restart keeps its memory": (
        "serve r1 model=a; ask r2 c; wait 5; restart b; exit b code=0 -> spawns=[b]"
    ),
    "a crash keeps its memory I2": (
        "exit a -> a=LOADING; exit a -> a=BACKOFF & a.reserved_bytes=4294967296;"
        " ask r1 c -> c=PENDING"
    ),
}
"""Models `a` and `b` are READY and fill the budget; `c` is not loaded."""


@pytest.mark.parametrize("rule", PAIR)
def test_a_third_model_beside_two(rule: str) -> None:
    play(pair_and_more(), PAIR[rule])


def test_a_model_in_constant_use_goes_once_it_had_its_residency() -> None:
    driver = pair_and_more()
    driver.serve("busy", model="b")
    driver.use("a", "u")
    driver.ask("r0", "c")
    for second in range(14):
        if second == 11:
            assert driver.state("a") is UP, "for 9.25 seconds"
        driver.use("a", f"u{second}")
        driver.pass_time(0.75)
    assert driver.state("a") is GOES, "two chats on two models take turns"


def test_a_model_that_waits_says_for_what() -> None:
    driver = play(pair_and_more(), "serve r1 model=a; serve r2 model=b; ask r3 c; wait 100")
    assert driver.row("c")["memory_wait"] == {
        "waits_s": 100.0,
        "reason": "needs 4.00 GiB; 0.0 MiB is free: a is busy and makes room when its turn ends",
    }


def test_a_smaller_model_passes_one_that_waits_but_not_for_ever() -> None:
    sizes = {"a": 4, "c": 8, "x": 2, "y": 2}
    driver = MemoryDriver([sized(name, gib * GIB) for name, gib in sizes.items()], limited(8 * GIB))
    play(
        driver,
        "bring_up a; serve r1 model=a; ask r2 c; ask r3 x -> spawns=[x]; up x; wait 20;"
        " ask r4 y -> y=PENDING",
    )
    reason = driver.row("y")["memory_wait"]["reason"]
    assert reason == "needs 2.00 GiB; another model has waited longer"
    sizes = {"a": 6, "c": 6, "x": 2}
    driver = MemoryDriver([sized(name, gib * GIB) for name, gib in sizes.items()], limited(8 * GIB))
    play(driver, "bring_up a; serve r1 model=a; ask r2 c; wait 100; ask r3 x -> spawns=[x]")


def test_preload_waits_for_room() -> None:
    models = [sized(name, 4 * GIB, preload=True) for name in "abc"]
    driver = MemoryDriver(models, limited(8 * GIB))
    play(driver, "up a; up b; wait 60 -> a=READY & b=READY & c=PENDING")
    assert (
        "other models are unloaded once it gets a request"
        in driver.row("c")["memory_wait"]["reason"]
    )
    play(driver, "unload a; exit a code=0 -> spawns=[c]")


def test_a_pinned_model_never_goes_and_holds_its_memory_from_the_start_H9() -> None:
    models = [sized("a", 4 * GIB, pinned=True), sized("b", 4 * GIB), sized("c", 4 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    assert (driver.state("a"), driver.reserved()) == (DOWN, 4 * GIB)
    play(driver, "bring_up b a; wait 60; ask r1 c -> a=READY & b=STOPPING & c=PENDING")
    play(driver, f"exit b code=0; up c; unload a; exit a code=0 -> a.reserved_bytes={4 * GIB}")


def test_load_dry_run_changes_nothing() -> None:
    driver = pair_and_more(sized("big", 9 * GIB))
    answer = driver.foresees("a")
    assert (answer["outcome"], answer["reason"]) == ("loaded", "is READY")
    assert driver.foresees("c") == {
        "model": "c",
        "needed_bytes": 4 * GIB,
        "evicts": ["a"],
        "swaps": [],
        "outcome": "evicts",
        "reason": "needs 4.00 GiB; 0.0 MiB is free: a is idle",
    }
    assert driver.row("c")["wanted"] == "down"
    assert states(driver) == [UP, UP, DOWN]
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
    assert (answer["outcome"], answer["reason"]) == ("fits", "it needs 4.00 GiB; 4.00 GiB is free")


def test_a_dry_run_without_a_budget_or_of_a_stuck_process_answers_as_the_load_would() -> None:
    driver = MemoryDriver([sized("a", GIB)], limited(0, budget=None))
    answer = driver.foresees("a")
    assert (answer["outcome"], answer["reason"]) == ("fits", "there is no memory budget")
    driver.bring_up("a")
    driver.unload("a")
    driver.pass_time(100.0)
    driver.foresees("a")
    [failed] = driver.sent(Failed)
    assert failed.error.code == ErrorCode.LOAD_FAILED
    assert not failed.error.retryable, "the same command fails again until the process is gone"


@pytest.mark.parametrize(("most", "first"), [(1, "a"), (2, "ab"), (9, "abcd")])
def test_as_many_load_at_once_as_the_configuration_allows(most: int, first: str) -> None:
    driver = Driver([entry(name) for name in "abcd"], CoreSettings(parallel_loads=most))
    for name in "abcd":
        driver.load(name)
    assert "".join(name for name in "abcd" if driver.state(name) is State.LOADING) == first
    for name in "abcd"[len(first) :]:
        assert driver.row(name)["progress"]["phase"] == "waiting for turn"


def test_without_a_budget_nothing_is_refused_and_nothing_goes() -> None:
    models = [sized("a", 400 * GIB, pinned=True), sized("b", 400 * GIB)]
    driver = MemoryDriver(models, limited(0, budget=None))
    driver.bring_up("a", "b")
    assert states(driver, "ab") == [UP, UP]
    assert driver.core.status(driver.now)["memory"]["budget_bytes"] is None


# Refusals


@pytest.mark.parametrize("is_command", [True, False])
def test_model_larger_than_the_budget_is_refused_I4(is_command: bool) -> None:
    driver = pair_and_more(sized("big", 9 * GIB))
    if is_command:
        id = driver.load("big")
    else:
        id = RequestId("r1")
        driver.ask("r1", "big")
    error = driver.failure_of(id).error
    assert error.code == ErrorCode.INSUFFICIENT_MEMORY
    assert error.message == (
        "big cannot be loaded: it needs 9.00 GiB, but the memory budget is 8.00 GiB"
    )
    detail = error.detail
    assert (detail["needed_bytes"], detail["budget_bytes"]) == (9 * GIB, 8 * GIB)
    assert detail["blocked_by"] == []
    assert states(driver) == [UP, UP, DOWN], "none went"
    row = driver.row("big")
    assert (row["state"], row["wanted"], row["why"]) == ("STOPPED", "down", "memory")


def test_a_preload_that_can_never_fit_stays_wanted_and_refuses_requests_at_once_I4() -> None:
    driver = MemoryDriver([sized("big", 9 * GIB, preload=True)], limited(8 * GIB))
    assert driver.state("big") is WAITS
    driver.pass_time(100.0)
    driver.ask("r1", "big")
    assert driver.errors() == {"r1": ErrorCode.INSUFFICIENT_MEMORY}
    row = driver.row("big")
    reason = "needs 9.00 GiB, but the memory budget is 8.00 GiB"
    assert (row["state"], row["memory_wait"]) == ("PENDING", {"waits_s": 100.0, "reason": reason})
    reload(driver, 9)
    assert driver.spawns() == ["big"]


@pytest.mark.parametrize("asks", ["a request", "load", "restart"])
@pytest.mark.parametrize("was_unloaded", [True, False])
def test_a_refusal_leaves_a_model_to_preload_as_it_was_I4(asks: str, was_unloaded: bool) -> None:
    models = [sized("p", 6 * GIB, pinned=True), sized("a", 4 * GIB, preload=True)]
    driver = MemoryDriver(models, limited(8 * GIB))
    if was_unloaded:
        driver.unload("a")
    before = driver.state("a"), driver.row("a")["why"]
    id = RequestId("r1")
    if asks == "a request":
        driver.ask("r1", "a")
    else:
        id = driver.load("a") if asks == "load" else driver.restart("a")
    error = driver.failure_of(id).error
    assert error.code == ErrorCode.INSUFFICIENT_MEMORY
    assert error.detail["blocked_by"] == ["p"]
    if was_unloaded:
        assert driver.state("a") is DOWN
        reload(driver, 20)
        assert driver.spawns() == []
    elif asks == "a request":
        assert (driver.state("a"), driver.row("a")["why"]) == before == (WAITS, "preload")


def test_a_process_that_cannot_be_ended_keeps_its_memory_and_is_named_P26_I2() -> None:
    driver = pair_and_more()
    driver.unload("a")
    driver.pass_time(100.0)
    assert (driver.state("a"), driver.row("a")["reserved_bytes"]) == (State.FAILED, 4 * GIB)
    driver.unload("b")
    driver.exit("b", code=0)
    driver.bring_up("c")
    models = [driver.model(name).life.settings for name in "abc"]
    reload(driver, 8, *models, sized("d", 5 * GIB))
    driver.ask("r1", "d")
    error = driver.failure_of().error
    assert error.detail["blocked_by"] == ["a"]
    assert "a has a process that cannot be ended and holds 4.00 GiB" in error.message
    driver.exit("a")
    assert driver.row("a")["reserved_bytes"] == 0


# Reservations


def test_a_pinned_model_keeps_its_memory_in_a_long_back_off() -> None:
    policy = replace(entry().restart, backoff_initial_s=60.0, backoff_max_s=60.0)
    driver = MemoryDriver([sized("a", 4 * GIB, restart=policy, pinned=True)], limited(8 * GIB))
    play(driver, "bring_up a; exit a; up a; exit a -> a=BACKOFF")
    assert driver.reserved() == 4 * GIB


def test_the_end_of_a_pinned_model_makes_room_for_no_other() -> None:
    """So the one that is idle goes at once."""
    models = [sized(name, 4 * GIB, pinned=name == "a") for name in "abc"]
    driver = MemoryDriver(models, limited(8 * GIB))
    play(driver, "bring_up a b; wait 60; unload a; ask r1 c -> a=STOPPING & b=STOPPING & c=PENDING")
    play(driver, "exit a code=0 -> spawns=[]; exit b code=0 -> spawns=[c]")


def test_restarting_pinned_model_keeps_only_its_need() -> None:
    """Its process goes, and the next one takes less: none is refused for what the first took."""
    models = [sized("a", 4 * GIB, pinned=True), sized("c", 4 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a")
    measure(driver, a=6)
    driver.restart("a")
    assert (driver.state("a"), driver.reserved()) == (GOES, 6 * GIB)
    assert driver.foresees("c")["outcome"] == "waits", "the process has it still"
    driver.ask("r1", "c")
    assert driver.state("c") is WAITS
    driver.exit("a", code=0)
    assert (driver.spawns(), driver.reserved()) == (["c"], 8 * GIB)
    driver.come_up("c")
    assert driver.spawns() == ["a"]


def test_a_restart_keeps_its_memory_from_a_model_that_has_waited_longer() -> None:
    driver = pair_and_more(sized("d", 8 * GIB))
    play(driver, "serve r1 model=a; ask r2 d; wait 100; restart b; exit b code=0 -> spawns=[b]")


def test_what_a_restart_holds_is_not_about_to_be_free() -> None:
    driver = play(pair_and_more(), "serve r1 model=b; restart a; ask r2 c -> a=STOPPING")
    assert driver.row("c")["memory_wait"]["reason"] == (
        "needs 4.00 GiB; 0.0 MiB is free: b is busy and makes room when its turn ends"
    )


def test_two_restarts_that_need_more_do_not_wait_for_each_other() -> None:
    driver = pair_and_more()
    reload(driver, 8, *(sized(name, 6 * GIB) for name in "abc"))
    driver.exit("a", code=0)
    driver.exit("b", code=0)
    assert sorted(str(state) for state in states(driver, "ab")) == ["LOADING", "PENDING"]
    assert driver.reserved() == 6 * GIB


def test_measured_excess_raises_the_reservation_and_evicts() -> None:
    driver = pair_and_more()
    driver.use("b", "r1")
    driver.say(Subscribe(id=SUBSCRIPTION))
    measure(driver, b=5)
    assert driver.row("b")["reserved_bytes"] == 5 * GIB
    assert states(driver) == [GOES, UP, DOWN]
    assert any("because 9.00 GiB of 8.00 GiB are reserved" in note for note in notes(driver))
    measure(driver)
    assert driver.row("b")["reserved_bytes"] == 5 * GIB, "until its process is gone"


def test_reported_bytes_count_and_alone_with_cuda() -> None:
    driver = pair_and_more()
    beat = Heartbeat(
        step=0, phase=WorkerPhase.IDLE, phase_s=0.0, active_bytes=4 * GIB, cache_bytes=GIB
    )
    driver.worker(beat, "b")
    measure(driver)
    assert driver.row("b")["reserved_bytes"] == 5 * GIB
    ready = driver.model("a").process.ready
    assert ready is not None
    driver.model("a").process.ready = replace(ready, backend="cuda")
    measure(driver, a=7)
    assert driver.row("a")["reserved_bytes"] == 4 * GIB


def test_a_reload_that_lowers_the_budget_evicts_down_to_it_and_says_so() -> None:
    driver = pair_and_more()
    [key] = driver.serve("r1", model="a")
    driver.say(Subscribe(id=SUBSCRIPTION))
    reload(driver, 3)
    assert states(driver) == [UP, GOES, DOWN], "a is busy"
    assert any("because 8.00 GiB of 3.00 GiB are reserved" in note for note in notes(driver))
    driver.exit("b", code=0)
    driver.row_ends("a", key)
    assert driver.state("a") is GOES
    assert driver.result_of().finish_reason is FinishReason.STOP


@pytest.mark.parametrize("is_waiting", [False, True])
def test_pins_are_reserved_and_given_up_with_a_reload(is_waiting: bool) -> None:
    driver = pair_and_more()
    pinned = sized("c", 4 * GIB, pinned=True)
    if is_waiting:
        driver.load("c")
    reload(driver, 8, sized("a", 4 * GIB), sized("b", 4 * GIB), pinned)
    assert driver.row("c")["reserved_bytes"] == 4 * GIB
    state = WAITS if is_waiting else DOWN
    assert states(driver) == [GOES, UP, state]
    reload(driver, 8, sized("a", 4 * GIB), sized("b", 4 * GIB), replace(pinned, pinned=False))
    assert (driver.state("c"), driver.row("c")["reserved_bytes"]) == (state, 0)


@pytest.mark.parametrize(
    "script",
    [
        "load a; cancel r1 -> a=PENDING",
        "pause r1 -> a=PENDING; cancel r1 -> a=STOPPED",
    ],
)
def test_swapped_out_model_waits_for_commands_and_paused_requests(script: str) -> None:
    driver = play(rivals(), "stream a r1; ask r2 b; swap a -> a=PENDING & b=LOADING")
    play(driver, script)


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
    driver.confirm("p")
    driver.measure()
    assert (driver.state("m"), driver.errors()) == (State.LOADING, {})
    assert driver.reserved() == 2 * MODEL
    driver = after_long_stream(2 * MODEL)
    driver.unload("p")
    driver.exit("p", code=0)
    assert (driver.state("p"), driver.reserved()) == (DOWN, MODEL)
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
