"""What is reserved of the memory budget, from before a load until its process is gone; refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Subscribe
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat
from mlxsup.supervisor.core.events import Appraised, Reloaded, Sampled
from mlxsup.supervisor.core.memory.need import Figure, Need, Source

from support.core_driver import entry
from support.core_memory import (
    GIB,
    SUBSCRIPTION,
    MemoryDriver,
    limited,
    notes,
    pair_and_more,
    sized,
    states,
)

# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("is_command", [True, False])
def test_what_can_never_fit_is_refused_at_once_with_the_numbers_I4(is_command: bool) -> None:
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


# ---------------------------------------------------------------- the books


def test_a_crash_keeps_the_memory_for_the_restart_I2() -> None:
    driver = pair_and_more()
    driver.exit("a")
    assert driver.state("a") is State.LOADING, "the first restart is immediate"
    driver.exit("a")
    assert driver.state("a") is State.BACKOFF
    assert driver.reserved() == 8 * GIB, "it is back within seconds"
    driver.ask("r1", "c")
    assert driver.state("c") is State.PENDING


def test_a_long_back_off_gives_the_memory_back() -> None:
    policy = replace(entry().restart, backoff_initial_s=60.0, backoff_max_s=60.0)
    models = [sized("a", 4 * GIB, restart=policy), sized("c", 8 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a")
    driver.exit("a")
    driver.come_up("a")
    driver.exit("a")
    assert (driver.state("a"), driver.reserved()) == (State.BACKOFF, 0)
    driver.bring_up("c")
    driver.pass_time(100.0)
    assert driver.state("a") is State.PENDING, "nobody waits for it, and there is no room"


def test_a_pinned_model_keeps_its_memory_in_a_long_back_off() -> None:
    policy = replace(entry().restart, backoff_initial_s=60.0, backoff_max_s=60.0)
    driver = MemoryDriver([sized("a", 4 * GIB, restart=policy, pinned=True)], limited(8 * GIB))
    driver.bring_up("a")
    driver.exit("a")
    driver.come_up("a")
    driver.exit("a")
    assert (driver.state("a"), driver.reserved()) == (State.BACKOFF, 4 * GIB)


def test_a_pinned_model_that_goes_keeps_only_what_it_needs() -> None:
    """So others wait for the rest of what its process holds, and are not refused."""
    models = [sized("a", 4 * GIB, pinned=True), sized("c", 4 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a")
    driver.do(Sampled(now=driver.now, footprint_bytes={ord("a"): 6 * GIB}, machine_bytes=0))
    driver.unload("a")
    assert (driver.state("a"), driver.reserved()) == (State.STOPPING, 6 * GIB)
    driver.ask("r1", "c")
    assert driver.state("c") is State.PENDING
    driver.exit("a", code=0)
    assert (driver.spawns(), driver.reserved()) == (["c"], 8 * GIB)


def test_a_pinned_model_that_comes_back_keeps_only_what_it_needs() -> None:
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


def test_what_is_measured_above_what_is_reserved_corrects_it_and_idle_models_go() -> None:
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


def test_what_mlx_reports_counts_and_with_cuda_nothing_else_does() -> None:
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


def test_without_a_size_a_model_needs_what_it_was_appraised_at() -> None:
    need = Need(
        weights=Figure(size_bytes=5 * GIB, source=Source.ESTIMATED),
        own=Figure(size_bytes=GIB, source=Source.ESTIMATED),
        layers=(),
        layers_source=Source.ESTIMATED,
        context_tokens=100,
        least_tokens=100,
        max_rows=1,
    )
    driver = MemoryDriver([entry("a"), entry("b"), sized("c", 3 * GIB)], limited(8 * GIB))
    driver.do(Appraised(now=driver.now, needs={ModelName("a"): need, ModelName("c"): need}))
    assert [driver.row(name)["needed_bytes"] for name in "abc"] == [6 * GIB, 0, 3 * GIB]
    driver.bring_up("a")
    assert driver.reserved() == 6 * GIB


def test_without_a_budget_nothing_is_refused_and_nothing_goes() -> None:
    models = [sized("a", 400 * GIB, pinned=True), sized("b", 400 * GIB)]
    driver = MemoryDriver(models, limited(0, budget=None))
    driver.bring_up("a", "b")
    assert states(driver, "ab") == [State.READY, State.READY]
    assert driver.core.status(driver.now)["memory"]["budget_bytes"] is None
