"""What goes, and in which order, when less memory is there than is in use; how it comes back."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.client_messages import Event, Failed, Reply, Subscribe
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import State, WorkerPhase
from mlxsup.protocol.worker_messages import GiveBack, Heartbeat
from mlxsup.supervisor.core.actions import BudgetChanged, SendToWorker
from mlxsup.supervisor.core.events import Caller, Reloaded, Sampled
from mlxsup.supervisor.core.memory.pressure import CALM_S, Reading
from mlxsup.supervisor.core.model import ASK_AGAIN_S

from support.core_looks import ALICE
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

KEPT = GIB // 2
SHORTAGE = "0.0 MiB is available on this machine, and 512.0 MiB must stay free"


def sample(driver: MemoryDriver, available_gib: float | None = None, **held_gib: float) -> None:
    """A second later; `held_gib`: what processes are measured at, by model."""
    driver.now += 1.0
    reading = None
    if available_gib is not None:
        reading = Reading(available_bytes=int(available_gib * GIB), kept_free_bytes=KEPT)
    footprint = {ord(name): int(size * GIB) for name, size in held_gib.items()}
    sampled = Sampled(
        now=driver.now, footprint_bytes=footprint, machine_bytes=99 * GIB, reading=reading
    )
    driver.do(sampled)


def beat(driver: MemoryDriver, model: str, *, cache_gib: float = 0.0, prefix_gib: int = 0) -> None:
    """Its worker says what it keeps for reuse."""
    heartbeat = Heartbeat(
        step=0,
        phase=WorkerPhase.IDLE,
        phase_s=0.0,
        cache_bytes=int(cache_gib * GIB),
        prefix_bytes=prefix_gib * GIB,
    )
    driver.worker(heartbeat, model)


def asked(driver: MemoryDriver) -> list[str]:
    """The models that the latest event asked to give back what they keep for reuse."""
    sent = [action for action in driver.actions if isinstance(action, SendToWorker)]
    return [str(one.model) for one in sent if isinstance(one.message, GiveBack)]


def memory(driver: MemoryDriver) -> dict[str, Any]:
    value: dict[str, Any] = driver.core.status(driver.now)["memory"]
    return value


def budgets(driver: MemoryDriver) -> list[int]:
    """What the latest event said that is left of the budget."""
    return [one.budget.size_bytes for one in driver.actions if isinstance(one, BudgetChanged)]


def test_while_enough_is_available_the_budget_is_whole() -> None:
    driver = pair_and_more()
    sample(driver, 0.5, a=4, b=4)
    assert (budgets(driver), states(driver, "ab")) == ([], [State.READY] * 2)
    assert memory(driver)["effective_budget_bytes"] == 8 * GIB
    sample(driver, None, a=4, b=4)
    assert budgets(driver) == []


def test_what_is_missing_is_taken_from_the_models_that_nobody_uses() -> None:
    driver = pair_and_more()
    driver.now += 1.0
    driver.use("a", "r1")
    driver.say(Subscribe(id=SUBSCRIPTION))
    sample(driver, 0, a=4, b=4)
    left = (8 * GIB - KEPT) // (8 * GIB // 50) * (8 * GIB // 50)
    assert budgets(driver) == [left]
    assert states(driver, "ab") == [State.READY, State.STOPPING]
    assert f"8.00 GiB of 7.36 GiB are reserved and {SHORTAGE}" in notes(driver)[0]
    shown = memory(driver)
    assert (shown["budget_bytes"], shown["effective_budget_bytes"]) == (8 * GIB, left)
    assert (shown["shortage"], shown["over_bytes"]) == (SHORTAGE, 0)


def test_busy_models_stay_and_what_is_too_much_is_said() -> None:
    driver = pair_and_more()
    driver.serve("r1", model="a")
    [key] = driver.serve("r2", model="b")
    sample(driver, 0, a=4, b=4)
    assert states(driver, "ab") == [State.READY] * 2
    assert memory(driver)["over_bytes"] == 8 * GIB - memory(driver)["effective_budget_bytes"] > 0
    driver.row_ends("b", key)
    assert driver.state("b") is State.STOPPING, "as soon as it is idle"


def test_workers_give_back_what_they_keep_for_reuse_before_anybody_is_evicted() -> None:
    driver = pair_and_more()
    driver.say(Subscribe(id=SUBSCRIPTION))
    beat(driver, "a", cache_gib=1)
    beat(driver, "b", prefix_gib=1)
    sample(driver, 0, a=4, b=4)
    assert asked(driver) == ["a", "b"]
    assert notes(driver)[0].startswith(
        "asked to give back 1.00 GiB kept for reuse: 8.00 GiB of 7.36"
    )
    assert states(driver, "ab") == [State.READY] * 2
    beat(driver, "a")
    beat(driver, "b")
    sample(driver, 2, a=3, b=3)
    assert states(driver, "ab") == [State.READY, State.READY], (
        "2 GiB more are available, 2 less held"
    )


def test_a_reservation_that_a_process_had_outgrown_shrinks_with_what_it_gives_back() -> None:
    driver = pair_and_more()
    beat(driver, "a", cache_gib=1)
    sample(driver, 9, a=5, b=4)
    assert (driver.reserved(), asked(driver)) == (9 * GIB, ["a"])
    beat(driver, "a")
    sample(driver, 9, a=3.5, b=4)
    assert driver.reserved() == 8 * GIB, "never less than it was started with"
    assert states(driver, "ab") == [State.READY] * 2
    driver.now += ASK_AGAIN_S
    sample(driver, 9, a=4.5, b=3)
    assert driver.reserved() == int(8.5 * GIB), "what is measured above counts as before"


def test_who_gives_back_nothing_is_evicted_at_the_next_measurement() -> None:
    driver = pair_and_more()
    beat(driver, "b", cache_gib=1)
    sample(driver, 0, a=4, b=4)
    assert asked(driver) == ["b"]
    sample(driver, 0, a=4, b=4)
    assert asked(driver) == [], "once in ten seconds"
    assert states(driver, "ab") == [State.STOPPING, State.READY]


def test_a_worker_is_asked_again_after_ten_seconds_and_not_for_a_trifle() -> None:
    driver = pair_and_more()
    driver.serve("r1", model="a")
    driver.serve("r2", model="b")
    beat(driver, "a", cache_gib=1)
    beat(driver, "b", cache_gib=0.001)
    times = []
    for second in range(25):
        sample(driver, 0, a=4, b=4)
        times += [second] * len(asked(driver))
        assert asked(driver) in ([], ["a"])
    assert times == [0, 10, 20]


def test_the_budget_comes_back_after_ten_calm_seconds_and_a_waiting_model_is_loaded() -> None:
    driver = pair_and_more()
    sample(driver, 0, a=4, b=4)
    driver.exit("a", code=0)
    driver.ask("r2", "b")
    driver.ask("r1", "a")
    reason = "needs 4.00 GiB, 3.36 GiB is free: b is busy, and goes when its turn is over"
    assert driver.row("a")["memory_wait"]["reason"] == reason
    for _ in range(int(CALM_S)):
        sample(driver, 9, b=4)
        assert budgets(driver) == []
    sample(driver, 9, b=4)
    assert budgets(driver) == [8 * GIB]
    assert driver.state("a") is State.LOADING
    assert memory(driver)["shortage"] == ""


def test_who_fits_into_the_budget_waits_for_its_rest_and_is_not_refused() -> None:
    driver = MemoryDriver([sized("a", 4 * GIB), sized("big", 9 * GIB)], limited(8 * GIB))
    sample(driver, 1)
    driver.ask("r1", "a")
    assert driver.row("a")["memory_wait"]["reason"] == (
        "needs 4.00 GiB, 491.6 MiB is free: other programs hold the rest of the memory budget"
    )
    driver.load("a")
    assert driver.sent(Failed) == []
    driver.ask("r2", "big")
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == "insufficient_memory"
    assert failed.error["detail"]["budget_bytes"] == 8 * GIB


def test_what_a_process_that_ends_held_is_not_missing_meanwhile() -> None:
    driver = pair_and_more()
    driver.unload("a")
    sample(driver, 0.5, b=4)
    assert budgets(driver) == [], "it is measured at nothing, and its memory is not free yet"
    driver.exit("a", code=0)
    sample(driver, 4.5, b=4)
    assert budgets(driver) == []


def test_memory_that_does_not_come_back_after_an_exit_is_not_promised_again() -> None:
    driver = pair_and_more()
    driver.unload("a")
    driver.exit("a", code=0)
    sample(driver, 0.5, b=4)
    assert budgets(driver) == [int(4 * GIB) // (8 * GIB // 50) * (8 * GIB // 50)]


def test_a_reload_keeps_the_budget_lowered_and_says_how_much_must_go() -> None:
    driver = pair_and_more()
    driver.serve("r1", model="a")
    driver.serve("r2", model="b")
    sample(driver, 0, a=4, b=4)
    lowered = memory(driver)["effective_budget_bytes"]
    models = tuple(sized(name, 4 * GIB) for name in "abc")
    caller = Caller(connection=ALICE, id=RequestId("x"))
    for budget, left in ((20 * GIB, lowered), (6 * GIB, 6 * GIB)):
        settings = limited(budget)
        driver.do(Reloaded(now=driver.now, settings=settings, models=models, caller=caller))
        [reply] = driver.sent(Reply)
        assert reply.value["over_budget_bytes"] == 8 * GIB - left
        assert memory(driver)["budget_bytes"] == budget
        assert memory(driver)["effective_budget_bytes"] == left


def test_an_event_of_giving_back_is_no_change_of_state() -> None:
    driver = pair_and_more()
    driver.say(Subscribe(id=SUBSCRIPTION))
    beat(driver, "b", cache_gib=1)
    sample(driver, 0, a=4, b=4)
    [event] = driver.sent(Event)
    assert (event.value["from"], event.value["to"]) == ("READY", "READY")
