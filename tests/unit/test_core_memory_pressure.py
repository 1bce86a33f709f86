"""Test memory pressure: reclaim, eviction, swaps, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.client_messages import Failed, Reply, Subscribe
from mlxsup.protocol.ids import Caller, Generation, ModelName, RequestId
from mlxsup.protocol.states import State, WorkerPhase
from mlxsup.protocol.worker_messages import Exit, GiveBack, Heartbeat, PauseRow
from mlxsup.supervisor.core.actions import BudgetChanged, SendToWorker
from mlxsup.supervisor.core.budget import CALM_S, STEPS, Pressure, Reading
from mlxsup.supervisor.core.events import FilesSeen, Reloaded, Sampled
from mlxsup.supervisor.core.life import FILES_COUNT_FOR_S, Files

from support.core.looks import ALICE
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
from support.core.scripts import play
from support.core.swaps import SwapDriver, finish, rivals

# The lowered budget

WHOLE = 5000
STEP = WHOLE // STEPS


def after(*rooms: int, whole: int = WHOLE) -> int | None:
    """What is left after one room a second; None: all."""
    state = Pressure()
    for second, room in enumerate(rooms):
        state.follow(room, whole, float(second))
    return state.limit_bytes


def test_budget_is_raised_after_ten_calm_seconds() -> None:
    assert CALM_S == 10.0
    seconds = int(CALM_S)
    low = [1000]
    assert after(*low, *[3050] * seconds) == 1000
    assert after(*low, *[3050] * (seconds + 1)) == 2900, "a step less than the room"
    assert after(*low, *[WHOLE + STEP - 1] * (seconds + 1)) == WHOLE - STEP
    assert after(*low, *[WHOLE + STEP] * (seconds + 1)) is None
    assert after(*low, *[1000 + STEP] * 100) == 1000, "not for a single step"
    calm = [4000] * seconds
    assert after(1000, *calm, 1000 + STEP, *calm) == 1000, "a dip counts afresh"
    assert after(1000, *calm[1:], 2000, 4000) == 2000 - STEP
    assert after(3, whole=STEPS - 1) == 3, "a step is at least a byte"


# Reclaim and eviction

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


def test_pressure_evicts_idle_models() -> None:
    driver = pair_and_more()
    for available in (0.5, None):  # enough, or unknown
        sample(driver, available, a=4, b=4)
        assert (budgets(driver), states(driver, "ab")) == ([], [State.READY] * 2)
        assert memory(driver)["effective_budget_bytes"] == 8 * GIB
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
    assert not shown["is_short"], "nothing waits, and no more has to go"


def test_memory_that_is_being_freed_squeezes_no_model() -> None:
    """Its process is measured smaller before the machine has what it frees."""
    driver = pair_and_more()
    driver.unload("b")
    assert driver.state("b") is State.STOPPING
    sample(driver, 0.5, a=4, b=1)
    assert budgets(driver) == []


def test_busy_models_stay_and_the_excess_is_shown() -> None:
    driver = pair_and_more()
    driver.serve("r1", model="a")
    [key] = driver.serve("r2", model="b")
    sample(driver, 0, a=4, b=4)
    assert states(driver, "ab") == [State.READY] * 2
    assert memory(driver)["over_bytes"] == 8 * GIB - memory(driver)["effective_budget_bytes"] > 0
    assert memory(driver)["is_short"]
    driver.row_ends("b", key)
    assert driver.state("b") is State.STOPPING, "as soon as it is idle"


@pytest.mark.parametrize("gives_back", [True, False])
def test_caches_are_reclaimed_before_eviction(gives_back: bool) -> None:
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
    if not gives_back:
        sample(driver, 0, a=4, b=4)
        assert asked(driver) == [], "once in ten seconds"
        assert states(driver, "ab") == [State.STOPPING, State.READY]
        return
    beat(driver, "a")
    beat(driver, "b")
    sample(driver, 2, a=3, b=3)
    assert states(driver, "ab") == [State.READY, State.READY], (
        "2 GiB more are available, 2 less held"
    )


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
    reason = "needs 4.00 GiB; 3.36 GiB is free: b is busy and makes room when its turn ends"
    assert driver.row("a")["memory_wait"]["reason"] == reason
    for _ in range(int(CALM_S)):
        sample(driver, 9, b=4)
        assert budgets(driver) == []
    sample(driver, 9, b=4)
    assert budgets(driver) == [8 * GIB]
    assert driver.state("a") is State.LOADING
    assert memory(driver)["shortage"] == ""


def test_model_within_the_whole_budget_waits_for_the_rest() -> None:
    driver = MemoryDriver([sized("a", 4 * GIB), sized("big", 9 * GIB)], limited(8 * GIB))
    sample(driver, 1)
    driver.ask("r1", "a")
    assert memory(driver)["is_short"]
    assert driver.row("a")["memory_wait"]["reason"] == (
        "needs 4.00 GiB; 491.6 MiB is free: other programs hold the rest of the memory budget"
    )
    driver.load("a")
    assert driver.sent(Failed) == []
    driver.ask("r2", "big")
    [failed] = driver.sent(Failed)
    assert failed.error.code == "insufficient_memory"
    assert failed.error.detail["budget_bytes"] == 8 * GIB


def test_ending_process_does_not_lower_the_budget() -> None:
    driver = pair_and_more()
    lowered = "budgets -> returns=[];"  # it is measured at nothing, and not free yet
    play(
        driver,
        f"unload a; sample 0.5 b=4; {lowered} exit a code=0; sample 4.5 b=4; {lowered}",
        sample,
        budgets,
    )


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


def test_a_reload_that_lowers_the_budget_reclaims_before_it_evicts() -> None:
    driver = pair_and_more()
    beat(driver, "a", cache_gib=1)
    models = tuple(sized(name, 4 * GIB) for name in "abc")
    driver.do(Reloaded(now=driver.now, settings=limited(6 * GIB), models=models))
    assert (asked(driver), states(driver, "ab")) == (["a"], [State.READY] * 2)
    sample(driver, a=4, b=4)
    assert (asked(driver), states(driver, "ab")) == ([], [State.STOPPING, State.READY])


# Busy models under memory pressure

TURN_S = 20.0


def crowd(names: str = "ab", gib: int = 4, pinned: str = "", **changes: Any) -> SwapDriver:
    """Models of these sizes in GiB are READY and fill the budget; nothing runs."""
    models = [sized(name, gib * GIB, pinned=name in pinned) for name in names]
    driver = SwapDriver(models, limited(gib * len(names) * GIB, **changes))
    driver.bring_up(*names)
    return driver


def streaming(names: str = "ab", **changes: Any) -> SwapDriver:
    """Each of them has a stream, and has had its turn."""
    driver = crowd(names, **changes)
    for name in names:
        driver.stream(name, name)
    driver.now += TURN_S
    return driver


def short(driver: SwapDriver, gib: float = 4, names: str = "ab") -> None:
    """A second later nothing is available, and each model holds so much."""
    sample(driver, 0, **dict.fromkeys(names, gib))


def reload(driver: SwapDriver, names: str, *, budget_gib: float, **changes: Any) -> None:
    """The same models of 4 GiB, with another budget."""
    models = tuple(sized(name, 4 * GIB) for name in names)
    caller = Caller(connection=ALICE, id=RequestId("x"))
    settings = limited(int(budget_gib * GIB), **changes)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models, caller=caller))


def test_a_busy_model_goes_while_others_need_memory_and_its_stream_continues_later() -> None:
    driver = crowd()
    driver.say(Subscribe(id=SUBSCRIPTION))
    keys = {name: driver.stream(name, name) for name in "ab"}
    short(driver)
    assert states(driver, "ab") == [State.READY] * 2, "no turn is over"
    driver.now += TURN_S
    short(driver)
    assert driver.told(PauseRow) == [PauseRow(key=keys["a"], keep=False)]
    assert notes(driver) == [
        f"swapped out because other programs need memory: 8.00 GiB of 7.36 GiB are reserved and"
        f" {SHORTAGE}; it had its turn for 23 s"
    ]
    assert (driver.row("a")["wanted"], driver.why("a")) == ("up", "swap")
    assert memory(driver)["over_bytes"] == 0
    driver.row_left(keys["a"], "a")
    assert driver.told(Exit) == [Exit()]
    driver.exit("a", code=0)
    assert driver.row("a")["last_exit"]["detail"] == (
        "swapped out because other programs need memory"
    )
    assert (driver.state("a"), driver.state("b")) == (State.PENDING, State.READY)
    sample(driver, 9, b=4)
    assert driver.state("a") is State.PENDING, "memory has not been calm for long enough"
    for _ in range(int(CALM_S)):
        sample(driver, 9, b=4)
    assert driver.state("a") is State.LOADING
    driver.come_up("a")
    assert [one.key for one in driver.resumed()] == [keys["a"]]
    finish(driver, "a", keys["a"])
    assert not isinstance(driver.terminals[ALICE, "a"][0], Failed)


def test_a_reload_that_lowers_the_budget_swaps_down_to_it() -> None:
    driver = streaming()
    driver.say(Subscribe(id=SUBSCRIPTION))
    reload(driver, "ab", budget_gib=6)
    assert (
        "swapped out because the loaded models need more than memory_budget: 8.00 GiB of 6.00 GiB"
        in (" ".join(notes(driver)))
    )
    driver.gone("a")
    assert states(driver, "ab") == [State.PENDING, State.READY]
    assert driver.passes_until("b") <= 21, "they take turns from now on"
    driver.gone("b")
    assert driver.spawns() == ["a"]


BUSY: dict[str, tuple[str, str]] = {
    "no model goes while workers may give back": (
        "ab", "beat b cache_gib=1; short -> a=READY & b=READY; short -> a=DRAINING & b=READY",
    ),
    "one that serves always stays": (
        "ab",
        3 * "sample -9 a=4 b=4 -> a=DRAINING & b=READY;" + "gone a; sample -9 b=4 -> b=READY",
    ),
}  # fmt: skip
"""Models that have had their turn, each with a stream, and the script."""


@pytest.mark.parametrize("rule", BUSY)
def test_busy_models_under_pressure(rule: str) -> None:
    names, script = BUSY[rule]
    play(streaming(names), script, beat, short, sample)


def test_the_lowest_class_goes_first() -> None:
    driver = crowd("abc")
    play(driver, "stream a a priority=interactive; stream b b; stream c c priority=batch")
    driver.now += TURN_S
    short(driver, names="abc")
    assert states(driver) == [State.READY, State.READY, State.DRAINING]


def test_pinned_and_unresumable_models_stay() -> None:
    driver = play(crowd("abc", pinned="a"), "stream a r1; stream b r2 resume=False; stream c r3")
    driver.now += TURN_S
    sample(driver, -9, a=4, b=4, c=4)
    assert states(driver) == [State.READY, State.READY, State.DRAINING]


@pytest.mark.parametrize("why", ["swap is off", "a process has grown"])
def test_no_model_is_swapped_out_in_vain(why: str) -> None:
    """One that has grown would be back at once, and grow again."""
    is_off = why == "swap is off"
    driver = streaming(swap=not is_off)
    short(driver) if is_off else sample(driver, 9, a=5, b=4)
    assert memory(driver)["over_bytes"] > 0
    assert states(driver, "ab") == [State.READY] * 2


def test_swap_that_is_called_off_resumes_its_rows_and_says_so() -> None:
    driver = crowd()
    driver.say(Subscribe(id=SUBSCRIPTION))
    keys = [driver.stream("a", "r1"), driver.stream("a", "r2")]
    driver.stream("b", "r3")
    driver.now += TURN_S
    short(driver)
    driver.row_left(keys[0], "a")
    answer = driver.foresees("a")
    assert (answer["outcome"], answer["reason"]) == (
        "waits",
        "makes room because other programs need memory, and is loaded again in its turn",
    )
    sample(driver, 9, a=4, b=4)
    assert driver.state("a") is State.READY
    assert "stays: memory is no longer short" in notes(driver)
    assert [one.key for one in driver.resumed()] == [keys[0]]


@pytest.mark.parametrize("budget_gib", [8, 6])
def test_reload_calls_a_swap_off_only_with_room(budget_gib: int) -> None:
    driver = streaming()
    reload(driver, "ab", budget_gib=6)
    assert driver.state("a") is State.DRAINING
    reload(driver, "ab", budget_gib=budget_gib)
    assert driver.state("a") is (State.READY if budget_gib == 8 else State.DRAINING)


# Models whose files have changed

CHANGE = "config.json has changed since it was loaded"


def changed() -> SwapDriver:
    """Rivals, of which the first has a stream, and other files than it has loaded."""
    driver = rivals()
    driver.stream("a", "r1")
    driver.folders.changes["a"] = CHANGE
    return driver


def test_changed_files_keep_a_model_until_its_answers_end_I7() -> None:
    driver = changed()
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.ask("r2", "b")
    assert driver.stays("a", 60.0)
    assert driver.told(PauseRow) == []
    assert driver.row("b")["memory_wait"]["reason"] == (
        "needs 4.00 GiB; 0.0 MiB is free: a is busy; a stays loaded until its answers are complete,"
        f" because {CHANGE}"
    )
    [key] = driver.model("a").batch.running
    finish(driver, "a", key)
    [done] = driver.terminals[ALICE, "r1"]
    assert not isinstance(done, Failed)
    driver.exit("a", code=0)
    assert driver.spawns() == ["b"], "now it may go"


def test_watchers_are_notified_once_why_it_stays_and_when_that_is_over() -> None:
    driver = changed()
    driver.say(Subscribe(id=SUBSCRIPTION))
    play(driver, f"ask r2 b; now {TURN_S}; wait 0.1")
    assert notes(driver) == [f"cannot be swapped out while it has open answers: {CHANGE}"]
    for _ in range(2):
        driver.now += FILES_COUNT_FOR_S
        sample(driver, 9)
        assert notes(driver) == []
    driver.folders.changes.clear()
    driver.now += FILES_COUNT_FOR_S
    sample(driver, 9)
    restored, swapped = notes(driver)
    assert restored == "can be swapped out again, because its files are unchanged since the load"
    assert swapped.startswith("swapped out for b")


def changes(driver: SwapDriver, *names: str) -> None:
    """The files of these models are others than those that they have loaded."""
    driver.folders.changes = dict.fromkeys(names, CHANGE)


def slow(driver: SwapDriver, is_slow: bool = True) -> None:
    """Looks at files come to no end by themselves."""
    driver.folders.is_slow = is_slow


def looks(driver: SwapDriver) -> list[str]:
    return driver.folders.looks


def answers(driver: SwapDriver) -> None:
    """The look at the files of `a` comes to its end."""
    driver.folders.answer(driver.core, "a", driver.now)


FILES = {
    "a paused answer that has begun keeps its model loaded": (
        "stream a r1; pause r1; row_left 1 a; changes a; ask r3 b; wait 21 -> a=READY"
    ),
    "a paused request that has not begun does not": (
        "stream a r1; serve r2 model=a; pause r2; row_left 2 a; token 1 model=a finish=stop;"
        " changes a; ask r3 b; wait 21 -> a=STOPPING"
    ),
    "a swap waits for a slow look": (
        "slow; stream a r1; ask r2 b; wait 80 -> a=READY; looks -> returns=[a];"
        " answers -> a.why=swap"
    ),
    "a look counts for some seconds": (
        "slow; stream a r1; ask r2 b; wait 20.1; cancel r2; answers; ask r3 b; wait 20.1;"
        " looks -> returns=[a, a]; answers -> a.why=swap"
    ),
    "a look that meets a drain is kept for the return": (
        "slow; stream a r1; ask r2 b; wait 20.1; unload a; changes a; answers;"
        " load a -> a=READY; slow False; stays a 60 -> returns=True"
    ),
}
"""Models `a`, which is READY, and `b`, of which one fits into memory."""


@pytest.mark.parametrize("rule", FILES)
def test_files_that_are_looked_at_before_a_swap(rule: str) -> None:
    play(rivals(), FILES[rule], changes, slow, looks, answers)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_another_model_goes_when_memory_is_short(names: str) -> None:
    driver = streaming()
    changes(driver, *names)
    short(driver)
    other = State.DRAINING if names == "a" else State.READY
    assert states(driver, "ab") == [State.READY, other]


def test_files_that_keep_a_model_are_looked_at_again_while_its_answers_are_open() -> None:
    driver = play(changed(), f"ask r2 b; wait {TURN_S + 0.1}")
    for _ in range(int(4 * FILES_COUNT_FOR_S) + 1):
        sample(driver, 9)
    assert driver.folders.looks == ["a"] * 5
    [key] = driver.model("a").batch.running
    finish(driver, "a", key)
    for _ in range(int(4 * FILES_COUNT_FOR_S)):
        sample(driver, 9)
    assert driver.folders.looks == ["a"] * 5


def test_an_answer_about_an_earlier_process_says_nothing_of_this_one() -> None:
    driver = play(rivals(), "slow; stream a r1; ask r2 b; wait 20.1", slow)
    old = driver.generation("a")
    play(driver, "exit a code=70; turn a")
    late = FilesSeen(now=driver.now, model=ModelName("a"), generation=Generation(old), change="x")
    assert driver.model("a").life.files == Files(), "nor that it is being looked at"
    driver.do(late)
    assert driver.model("a").life.files.change == ""
