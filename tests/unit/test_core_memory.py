"""Loads within a memory budget: who waits, who goes, and what each of them is notified of."""

from __future__ import annotations

from mlxsup.protocol.client_messages import Failed, Notice, Subscribe
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import Exit

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

# ---------------------------------------------------------------- requests


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


def test_who_waits_for_memory_gets_a_notice_that_says_so() -> None:
    driver = pair_and_more()
    driver.serve("r1", model="a")
    driver.serve("r2", model="b")
    driver.ask("r3", "c", notices=True)
    details = [notice.detail for notice in driver.sent(Notice)]
    assert {"position": 1, "reason": "memory", "since_s": 0.0} in details
    assert driver.row("c")["progress"] == {"phase": "waiting for memory", "fraction": 0.0}


def test_an_evicted_model_that_is_wanted_again_waits_behind_who_evicted_it() -> None:
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


def test_who_leaves_room_for_the_one_that_waits_longest_passes_it() -> None:
    models = [sized("a", 6 * GIB), sized("c", 6 * GIB), sized("x", 2 * GIB)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a")
    driver.serve("r1", model="a")
    driver.ask("r2", "c")
    driver.pass_time(100.0)
    driver.ask("r3", "x")
    assert driver.spawns() == ["x"]


def test_while_one_loads_nobody_is_evicted_for_the_next() -> None:
    models = [sized(name, 4 * GIB) for name in "abcd"]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a", "b")
    driver.pass_time(50.0)
    driver.ask("r1", "c")
    driver.ask("r2", "d")
    assert states(driver, "abcd") == [
        State.STOPPING, State.READY, State.PENDING, State.PENDING,
    ]  # fmt: skip
    driver.exit("a", code=0)
    assert driver.state("b") is State.READY
    assert driver.row("d")["progress"]["phase"] == "waiting for turn"
    driver.come_up("c")
    assert driver.state("b") is State.STOPPING


# ---------------------------------------------------------------- commands, preloads, pins


def test_a_load_evicts_idle_models_at_once() -> None:
    driver = pair_and_more()
    driver.use("a", "r1")
    driver.use("b", "r2")
    command = driver.load("c")
    assert states(driver) == [State.STOPPING, State.READY, State.PENDING]
    driver.exit("a", code=0)
    driver.come_up("c")
    assert driver.replies() == [command]


def test_a_preload_evicts_nobody_and_comes_when_there_is_room() -> None:
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


def test_a_request_makes_others_go_for_a_model_whose_preload_waits() -> None:
    models = [sized(name, 4 * GIB, preload=True) for name in "abc"]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.come_up("a")
    driver.come_up("b")
    driver.pass_time(50.0)
    driver.ask("r1", "c")
    assert driver.state("a") is State.STOPPING


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


# ---------------------------------------------------------------- without doing it


def test_a_dry_run_says_what_a_load_would_do_and_changes_nothing() -> None:
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


def test_who_was_to_go_and_is_wanted_again_goes_first_and_gives_its_memory_to_others() -> None:
    driver = MemoryDriver([sized("a", 3 * GIB), sized("b", 3 * GIB)], limited(4 * GIB))
    driver.bring_up("a")
    driver.unload("a")
    driver.load("a")
    assert driver.state("a") is State.STOPPING
    assert driver.foresees("b")["reason"].endswith("a is about to go")


def test_a_load_does_what_its_dry_run_said() -> None:
    driver = pair_and_more()
    gone = driver.foresees("c")["evicts"]
    driver.load("c")
    assert [name for name in "ab" if driver.state(name) is State.STOPPING] == gone


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
