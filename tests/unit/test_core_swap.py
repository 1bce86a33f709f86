"""Test swaps: models that do not fit together take turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Done, Failed, Notice, Reply, Subscribe
from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.states import FinishReason, Priority, State
from mlxsup.protocol.worker_messages import Exit, PauseRow
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.settings import ClientSettings, ModelSettings

from support.core.looks import ALICE, BOB
from support.core.memory import GIB, SUBSCRIPTION, limited, notes, sized, states
from support.core.swaps import SwapDriver, finish, rivals

# Turns of models


def test_a_busy_model_makes_room_and_its_stream_continues_in_its_next_turn() -> None:
    driver = rivals()
    key = driver.stream("a", "r1", notices=True)
    driver.ask("r2", "b")
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.pass_time(19.9)
    assert states(driver, "ab") == [State.READY, State.PENDING]
    driver.pass_time(0.2)
    assert driver.told(PauseRow) == [PauseRow(key=key, keep=False)]
    assert notes(driver) == [
        "swapped out for b, which needs 4.00 GiB and has waited for 20 s; it had its turn for 20 s"
    ]
    assert (driver.row("a")["wanted"], driver.why("a")) == ("up", "swap")
    driver.row_left(key, "a", tokens=1)
    [paused] = [n for n in driver.sent(Notice) if n.kind == "paused"]
    assert paused.detail == {"reason": "swap", "tokens_sent": 2, "since_s": 0.0}
    assert driver.told(Exit) == [Exit()]
    assert driver.reserved() == 4 * GIB, "until its process is gone"
    assert driver.spawns() == []
    driver.exit("a", code=0)
    assert driver.spawns() == ["b"]
    assert driver.state("a") is State.PENDING
    assert driver.row("a")["memory_wait"]["reason"].startswith("needs 4.00 GiB, 0.0 MiB is free")
    driver.turn("b")
    driver.swap("b")
    assert driver.spawns() == ["a"]
    driver.come_up("a")
    [again] = driver.resumed()
    assert (again.key, again.resume and unpack_tokens(again.resume.delivered)) == (key, [9, 9])
    driver.token(key, model="a")
    finish(driver, "a", key)
    [done] = driver.terminals[ALICE, "r1"]
    assert not isinstance(done, Failed)
    assert (done.paused, done.resumed) == (1, 0)
    assert driver.why("a") == "request"


def test_notices_of_swaps_name_the_reason() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    driver.ask("r2", "b", notices=True)
    assert [n.detail["reason"] for n in driver.sent(Notice) if n.kind == "queued"] == ["memory"]
    driver.passes_until("a")
    driver.ask("r3", "a", notices=True)
    assert [n.detail["reason"] for n in driver.sent(Notice) if n.kind == "queued"] == ["swap"]


def test_load_dry_run_names_swaps() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    answer = driver.foresees("b")
    assert (answer["outcome"], answer["swaps"], answer["evicts"]) == ("swaps", ["a"], [])
    assert answer["reason"] == (
        "needs 4.00 GiB, 0.0 MiB is free: a is busy, and goes when its turn is over"
    )
    off = rivals(swap=False)
    off.stream("a", "r1")
    assert off.foresees("b")["outcome"] == "waits"
    driver.ask("r2", "b")
    driver.passes_until("a")
    answer = driver.foresees("a")
    assert answer["outcome"] == "waits"
    assert answer["reason"] == "makes room for b, and is loaded again in its turn"
    two = SwapDriver(
        [sized("a", 2 * GIB), sized("b", 2 * GIB), sized("c", 4 * GIB)], limited(4 * GIB)
    )
    two.bring_up("a", "b")
    two.stream("a", "r1")
    two.stream("b", "r2")
    answer = two.foresees("c")
    assert answer["swaps"] == ["a", "b"]
    assert answer["reason"].endswith(": a and b are busy, and go when their turns are over")


def test_turn_lasts_three_times_its_cost() -> None:
    driver = rivals()
    driver.unload("a")
    driver.exit("a", code=0)
    driver.ask("r1", "a")
    driver.ask("r2", "a")
    driver.come_up("a")
    keys = driver.dispatched()
    driver.ask("r3", "b")
    driver.pass_time(9.0)
    driver.token(keys[0], model="a")
    assert driver.stays("a", 30.0), "the other row has no token yet"
    driver.token(keys[1], model="a")
    driver.serve("r4", model="a")
    assert driver.stays("a", 119.9), "it was loading for a second and reading for 39"
    driver.pass_time(0.2)
    assert driver.why("a") == "swap", "a row that comes later makes it no longer"


def test_a_turn_that_has_delivered_no_token_is_not_ended() -> None:
    driver = rivals()
    [first] = driver.serve("r1", model="a")
    driver.ask("r2", "b")
    driver.pass_time(5.0)
    [second] = driver.serve("r3", model="a")
    driver.cancel("r1")
    driver.row_left(first, "a")
    assert driver.stays("a", 50.0)
    driver.token(second, model="a")
    assert driver.passes_until("a") > 150, "three times as long as it took"


@pytest.mark.parametrize("waits", [Priority.NORMAL, Priority.BATCH])
def test_model_with_a_higher_class_is_not_swapped_out(waits: Priority) -> None:
    driver = rivals()
    key = driver.stream("a", "r1", priority=waits.above)
    driver.ask("r2", "b", priority=waits)
    assert driver.stays("a", 100.0), "however long the other one has waited"
    driver.stream("a", "r3", priority=waits)
    finish(driver, "a", key)
    assert driver.why("a") == "swap"


@pytest.mark.parametrize("why", ["unresumable", "at its client's limit"])
def test_an_answer_that_blocks_a_swap_blocks_it_until_its_end(why: str) -> None:
    is_limit = why == "at its client's limit"
    driver = rivals(clients={"*": ClientSettings(max_running=1)} if is_limit else {})
    key = driver.stream("a", "r1", resume=is_limit)
    driver.ask("r2", "b")
    driver.stream("a", "r3", connection=BOB)
    assert driver.stays("a", 100.0)
    finish(driver, "a", key)
    assert driver.why("a") == "swap"


def test_pinned_and_deterministic_models_are_not_interrupted() -> None:
    exact = sized("d", 2 * GIB)
    exact = replace(exact, launch=replace(exact.launch, deterministic=True))
    models = [sized("p", 2 * GIB, pinned=True), exact, sized("a", 2 * GIB), sized("b", 2 * GIB)]
    driver = SwapDriver(models, limited(6 * GIB))
    driver.bring_up("p", "d", "a")
    for name in "pda":
        driver.stream(name, f"r-{name}")
    driver.ask("r3", "b")
    driver.passes_until("a")
    assert states(driver, "pd") == [State.READY] * 2


def test_idle_models_go_first() -> None:
    models = [sized("a", 2 * GIB), sized("b", 2 * GIB), sized("c", 4 * GIB)]
    driver = SwapDriver(models, limited(4 * GIB))
    driver.bring_up("a", "b")
    driver.stream("a", "r1")
    driver.ask("r2", "c")
    assert driver.stays("b", 19.0), "without the other one it is of no use"
    driver.passes_until("a")
    assert (driver.row("b")["wanted"], driver.why("b")) == ("down", "evict")


def test_the_higher_class_is_next() -> None:
    driver = rivals("abc")
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.ask("r3", "c", priority=Priority.INTERACTIVE)
    driver.swap("a")
    assert driver.spawns() == ["c"]


def test_the_account_that_has_received_less_from_all_models_is_next() -> None:
    driver = rivals("abc")
    driver.unload("a")
    driver.exit("a", code=0)
    for model, seconds, who in (("b", 3.0, ALICE), ("c", 5.0, BOB), ("a", 4.0, ALICE)):
        driver.bring_up(model)
        driver.ask(f"x-{model}", model, who)
        [key] = driver.dispatched()
        driver.compute(seconds, key, model=model)
        if model != "a":
            finish(driver, model, key)
            driver.unload(model)
            driver.exit(model, code=0)
    driver.ask("r2", "b", ALICE)
    driver.ask("r3", "c", BOB)
    driver.swap("a")
    assert driver.spawns() == ["c"], "5 seconds are less than 3 and 4"


def test_three_models_of_one_client_take_turns() -> None:
    driver = rivals("abc", min_residency_s=25.0)  # so that each waits for all others
    driver.stream("a", "r-a")
    driver.ask("r-b", "b")
    driver.ask("r-c", "c")
    served = ["a"]
    for _ in range(5):
        driver.swap(served[-1])
        [next_one] = driver.spawns()
        assert driver.turn(next_one), "each turn delivers tokens"
        served.append(next_one)
    assert "".join(served) == "abcabc"


def test_swap_without_waiters_is_called_off() -> None:
    driver = rivals()
    keys = [driver.stream("a", "r1"), driver.stream("a", "r2")]
    driver.ask("r3", "b", BOB)
    driver.passes_until("a")
    driver.row_left(keys[0], "a")
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.leave(BOB)
    assert "stays: b no longer needs its memory" in notes(driver)
    assert driver.state("a") is State.READY
    assert [one.key for one in driver.resumed()] == [keys[0]]
    driver.row_left(keys[1], "a")
    assert [one.key for one in driver.resumed()] == [keys[1]]


def test_once_its_process_is_to_exit_a_swap_is_not_called_off() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.passes_until("a")
    driver.rows_leave("a")
    driver.cancel("r2")
    assert driver.state("a") is State.STOPPING
    driver.exit("a", code=0)
    assert driver.spawns() == ["a"], "it is wanted, and there is room"


def test_a_swap_is_called_off_if_only_a_lower_class_still_wants_it() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.ask("r3", "b", priority=Priority.BATCH)
    driver.passes_until("a")
    driver.cancel("r2")
    assert driver.state("a") is State.READY


def test_with_swap_off_what_would_need_one_is_refused() -> None:
    driver = rivals(swap=False)
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.pass_time(21.0)
    assert states(driver, "ab") == [State.READY, State.STOPPED]
    [error] = driver.terminals[ALICE, "r2"]
    assert isinstance(error, Failed)
    assert error.error["code"] == "insufficient_memory"
    assert error.error["detail"]["blocked_by"] == ["a"]
    assert error.error["message"] == (
        "b cannot be loaded: it needs 4.00 GiB, 0.0 MiB is free: a is busy,"
        " and with `swap` off nothing that is busy makes room"
    )


def test_rows_that_do_not_leave_are_cut_off_and_continue_later() -> None:
    driver = rivals()
    key = driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.passes_until("a")
    driver.pass_time(5.0)
    assert driver.state("a") is State.STOPPING
    driver.exit("a", code=0)
    driver.turn("b")
    driver.swap("b")
    driver.come_up("a")
    assert [one.key for one in driver.resumed()] == [key]


# Commands, crashes and reloads during a swap


def swapping(**changes: Any) -> tuple[SwapDriver, int]:
    """The rows of `a` have been asked to leave for `b`; also returns the key of its stream."""
    driver = rivals(**changes)
    key = driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.passes_until("a")
    return driver, key


def swapped_out() -> SwapDriver:
    """`a` has made room for `b`, which serves."""
    driver, _ = swapping()
    driver.gone("a")
    driver.turn("b")
    return driver


def ended(driver: SwapDriver, id: str = "r1") -> tuple[str, int | None]:
    """The code of a request's error, and how many tokens it had been sent."""
    [error] = driver.terminals[ALICE, id]
    assert isinstance(error, Failed)
    return error.error["code"], error.error.get("detail", {}).get("tokens_sent")


def reload(driver: SwapDriver, *models: ModelSettings) -> None:
    settings = limited(4 * GIB, max_queue=64, max_queue_per_client=64)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


A, B = sized("a", 4 * GIB), sized("b", 4 * GIB)
OTHER_A = replace(A, launch=replace(A.launch, path="/other"))


def test_a_load_command_swaps_as_an_interactive_request_does() -> None:
    driver = rivals()
    driver.stream("a", "r1", priority=Priority.INTERACTIVE)
    driver.load("b")
    assert driver.passes_until("a") == 20
    driver.gone("a")
    driver.come_up("b")
    assert driver.sent(Reply)[0].value["model"]["state"] == "READY"


def test_a_preload_never_swaps() -> None:
    models = [A, replace(B, preload=True)]
    driver = SwapDriver([A], limited(4 * GIB))
    driver.bring_up("a")
    driver.stream("a", "r1")
    driver.do(Reloaded(now=driver.now, settings=limited(4 * GIB), models=tuple(models)))
    assert driver.stays("a")
    assert driver.state("b") is State.PENDING
    driver.ask("r2", "b")
    assert driver.passes_until("a") == 20, "from the moment at which somebody waits"


def test_a_load_of_a_model_that_makes_room_is_done_if_the_swap_is_called_off() -> None:
    driver, _ = swapping()
    driver.load("a")
    driver.cancel("r2")
    assert [one.value["model"]["state"] for one in driver.sent(Reply)] == ["READY"]


@pytest.mark.parametrize("command", ["unload", "stop"])
@pytest.mark.parametrize("ends", [True, False])
def test_an_end_while_rows_leave_brings_begun_answers_to_their_end(
    command: str, ends: bool
) -> None:
    driver, key = swapping()
    driver.ask("r3", "a")
    driver.unload("a") if command == "unload" else driver.stop()
    code = "unloaded" if command == "unload" else "shutting_down"
    assert ended(driver, "r3") == (code, None)
    driver.row_left(key, "a")
    assert [one.key for one in driver.resumed()] == [key]
    if not ends:
        driver.pass_time(5.1)
        assert ended(driver) == (code, 1)
        return
    finish(driver, "a", key)
    [done] = driver.terminals[ALICE, "r1"]
    assert isinstance(done, Done)
    driver.exit("a", code=0)
    then = State.LOADING if command == "unload" else State.STOPPED
    assert states(driver, "ab") == [State.STOPPED, then]


def test_a_shutdown_ends_the_queue_of_a_swapped_out_model() -> None:
    driver = swapped_out()
    driver.stop()
    assert ended(driver) == ("shutting_down", 1)


@pytest.mark.parametrize("is_immediate", [True, False])
def test_a_restart_while_rows_leave_brings_it_back_at_once(is_immediate: bool) -> None:
    driver, key = swapping()
    driver.restart("a", now=is_immediate)
    if not is_immediate:
        driver.row_left(key, "a")
    driver.exit("a", code=0)
    assert driver.spawns() == ["a"]
    driver.come_up("a")
    assert [one.key for one in driver.resumed()] == [key]
    driver.token(key, model="a")
    assert driver.passes_until("a") < 40, "the other one still waits"


@pytest.mark.parametrize("has_left", [False, True])
def test_a_changed_entry_is_loaded_in_its_turn(has_left: bool) -> None:
    if has_left:
        driver = swapped_out()
        reload(driver, OTHER_A, B)
        assert driver.state("a") is State.PENDING
        driver.swap("b")
    else:
        driver, key = swapping()
        reload(driver, OTHER_A, B)
        driver.row_left(key, "a")
        driver.exit("a", code=0)
    assert driver.spawns() == ["a"]
    assert driver.model("a").life.launch.path == "/other"


def test_a_model_that_is_pinned_meanwhile_stays() -> None:
    driver, key = swapping()
    reload(driver, replace(A, pinned=True), replace(B, pinned=False))
    assert driver.state("a") is State.READY
    driver.row_left(key, "a")
    assert [one.key for one in driver.resumed()] == [key]
    assert ended(driver, "r2")[0] == "insufficient_memory"


def test_a_crash_while_rows_leave_is_a_crash_and_the_swap_comes_later() -> None:
    driver, key = swapping()
    driver.exit("a", code=70)
    assert driver.row("a")["last_exit"]["reason"] == "crash"
    assert driver.spawns() == ["a"]
    driver.come_up("a")
    assert [one.key for one in driver.resumed()] == [key]
    driver.token(key, model="a")
    driver.swap("a")
    assert driver.spawns() == ["b"]


def test_a_model_that_crashes_in_its_first_load_of_a_turn_keeps_its_turn() -> None:
    driver, _ = swapping()
    driver.gone("a")
    driver.spawned("b")
    driver.exit("b", code=70)
    assert driver.spawns() == ["b"]


def test_paused_requests_survive_a_swap() -> None:
    driver = rivals()
    keys = [driver.stream("a", "r1"), driver.stream("a", "r2")]
    driver.pause("r1")
    driver.row_left(keys[0], "a")
    driver.ask("r3", "b")
    driver.swap("a")
    driver.turn("b")
    assert driver.row("a")["paused"] == ["r1"]
    driver.swap("b")
    driver.come_up("a")
    assert [one.key for one in driver.resumed()] == [keys[1]]
    driver.resume("r1")
    assert [one.key for one in driver.resumed()] == [keys[0]]
    driver.token(keys[0], model="a", finish=FinishReason.STOP)


def test_a_model_of_paused_requests_alone_makes_room() -> None:
    driver = rivals()
    key = driver.stream("a", "r1")
    driver.pause("r1")
    driver.row_left(key, "a")
    driver.ask("r2", "b")
    driver.passes_until("a")
    assert driver.state("a") is State.STOPPING
    driver.exit("a", code=0)
    driver.turn("b")
    assert driver.stays("b"), "nobody waits for the other one"
    driver.resume("r1")
    driver.swap("b")
    assert driver.spawns() == ["a"]


# Memory kept for a swap


def crowded(*more: ModelSettings) -> SwapDriver:
    """`a` makes room for `b`, which somebody types to; `d` has waited for longer, and neither of
    the two fits beside `a`. Before `a` has left, `c` loads again after a crash."""
    models = [sized("a", 4 * GIB), sized("c", 2 * GIB), sized("b", 7 * GIB), sized("d", 7 * GIB)]
    more_bytes = sum(one.launch.memory_limit_bytes or 0 for one in more)
    driver = SwapDriver([*models, *more], limited(10 * GIB + more_bytes))
    for name in ("a", "c", *(one.name for one in more)):
        driver.bring_up(name)
        driver.stream(name, f"r-{name}")
    driver.ask("r1", "d", priority=Priority.BATCH)
    driver.pass_time(1.0)
    driver.ask("r2", "b", priority=Priority.INTERACTIVE)
    driver.passes_until("a")
    driver.exit("c", code=70)
    assert states(driver, "abcd") == [
        State.DRAINING,
        State.PENDING,
        State.LOADING,
        State.PENDING,
    ]
    return driver


def test_swapped_memory_is_kept_for_its_model() -> None:
    driver = crowded()
    driver.gone("a")
    assert driver.row("b")["memory_wait"] == {
        "waits_s": 20.0,
        "reason": "needs 7.00 GiB, which is kept for it: other models load first",
    }
    driver.come_up("c")
    assert driver.spawns() == ["b"], "though the other one has waited for longer"


def test_kept_memory_is_released_without_waiters() -> None:
    driver = crowded()
    driver.gone("a")
    driver.cancel("r2")
    assert driver.row("b")["memory_wait"] is None
    driver.come_up("c")
    assert driver.spawns() == ["d"]


def test_a_swap_is_called_off_if_there_is_room_without_it_while_another_one_loads() -> None:
    driver = crowded(sized("e", 7 * GIB))
    driver.unload("e")
    driver.exit("e", code=0)
    assert states(driver, "abc") == [State.READY, State.PENDING, State.LOADING]
    driver.come_up("c")
    assert driver.spawns() == ["b"]
