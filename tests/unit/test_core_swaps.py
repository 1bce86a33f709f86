"""Swaps: models that do not fit together take turns, and no stream is lost."""

from __future__ import annotations

import pytest

from mlxsup.protocol.client_messages import Failed, Notice, Subscribe
from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.states import Priority, State
from mlxsup.protocol.worker_messages import Exit, PauseRow
from mlxsup.supervisor.core.settings import ClientSettings

from support.core_looks import ALICE, BOB
from support.core_memory import GIB, SUBSCRIPTION, limited, notes, sized, states
from support.core_swaps import SwapDriver, finish, rivals

# ---------------------------------------------------------------- the way of a swap


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


def test_a_swap_is_neither_a_crash_nor_a_stable_start() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    driver.exit("a", code=70)  # the first crash: at once again
    driver.turn("a")
    driver.ask("r2", "b")
    driver.swap("a")  # after more than `stable_s`
    row = driver.row("a")
    assert (row["restarts"], row["last_exit"]["reason"]) == (1, "asked")
    assert (row["last_exit"]["detail"], row["suspects"]) == ("swapped out for b", 1)
    driver.turn("b")
    driver.swap("b")
    driver.turn("a")
    driver.exit("a", code=70)
    assert driver.state("a") is State.BACKOFF, "the second in a row"


def test_who_waits_is_told_why() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    driver.ask("r2", "b", notices=True)
    assert [n.detail["reason"] for n in driver.sent(Notice) if n.kind == "queued"] == ["memory"]
    driver.passes_until("a")
    driver.ask("r3", "a", notices=True)
    assert [n.detail["reason"] for n in driver.sent(Notice) if n.kind == "queued"] == ["swap"]


def test_a_dry_run_says_who_would_be_swapped_out() -> None:
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


# ---------------------------------------------------------------- how long a turn lasts


def test_a_turn_lasts_three_times_what_it_cost_from_its_first_tokens_on() -> None:
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
    assert driver.stays("a", 119.9), "it was loading for a second and reading for 39"
    driver.pass_time(0.2)
    assert driver.why("a") == "swap"


def test_rows_that_come_later_do_not_make_a_turn_longer() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.pass_time(15.0)
    driver.serve("r3", model="a")
    driver.pass_time(5.1)
    assert driver.why("a") == "swap"


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


def test_a_turn_in_which_all_rows_end_at_once_is_over_in_time() -> None:
    driver = rivals()
    [key] = driver.serve("r1", model="a")
    finish(driver, "a", key)
    driver.stream("a", "r2")
    driver.ask("r3", "b")
    assert driver.passes_until("a") <= 20


# ---------------------------------------------------------------- who goes


@pytest.mark.parametrize("waits", [Priority.NORMAL, Priority.BATCH])
def test_what_runs_something_of_a_higher_class_stays(waits: Priority) -> None:
    driver = rivals()
    key = driver.stream("a", "r1", priority=waits.above)
    driver.ask("r2", "b", priority=waits)
    assert driver.stays("a"), "however long the other one has waited"
    driver.stream("a", "r3", priority=waits)
    finish(driver, "a", key)
    assert driver.why("a") == "swap"


def test_what_must_run_through_is_not_interrupted() -> None:
    driver = rivals()
    key = driver.stream("a", "r1", resume=False)
    driver.ask("r2", "b")
    driver.stream("a", "r3")
    assert driver.stays("a")
    finish(driver, "a", key)
    assert driver.why("a") == "swap"


def test_a_deterministic_model_is_not_interrupted() -> None:
    entry = sized("d", 4 * GIB)
    object.__setattr__(entry.launch, "deterministic", True)
    driver = rivals("b", entry)
    driver.unload("b")
    driver.exit("b", code=0)
    driver.bring_up("d")
    driver.stream("d", "r1")
    driver.ask("r2", "b")
    assert driver.stays("d")


def test_a_pinned_model_stays() -> None:
    models = [sized("p", 2 * GIB, pinned=True), sized("a", 2 * GIB), sized("b", 2 * GIB)]
    driver = SwapDriver(models, limited(4 * GIB))
    driver.bring_up("p", "a")
    driver.stream("p", "r1")
    driver.stream("a", "r2")
    driver.ask("r3", "b")
    driver.passes_until("a")
    assert driver.state("p") is State.READY


def test_the_longest_resident_goes_and_no_more_than_needed() -> None:
    models = [sized(name, 2 * GIB) for name in "abcde"]
    driver = SwapDriver(models, limited(6 * GIB))
    driver.bring_up("b", "a", "c")
    for name in "abc":
        driver.stream(name, f"r-{name}")
    driver.ask("r1", "d")
    driver.passes_until("b")
    assert states(driver, "abc") == [State.READY, State.DRAINING, State.READY]


def test_idle_models_go_first() -> None:
    models = [sized("a", 2 * GIB), sized("b", 2 * GIB), sized("c", 4 * GIB)]
    driver = SwapDriver(models, limited(4 * GIB))
    driver.bring_up("a", "b")
    driver.stream("a", "r1")
    driver.ask("r2", "c")
    assert driver.stays("b", 19.0), "without the other one it is of no use"
    driver.passes_until("a")
    assert (driver.row("b")["wanted"], driver.why("b")) == ("down", "evict")


# ---------------------------------------------------------------- who is next


def three_want_in(**changes: object) -> SwapDriver:
    """`a` runs a stream; `b` and then `c` have waited for nearly 20 seconds."""
    driver = rivals("abc", **changes)
    driver.stream("a", "r1")
    return driver


def test_the_higher_class_is_next() -> None:
    driver = three_want_in()
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


def test_what_a_swap_frees_is_for_the_model_that_it_was_for() -> None:
    driver = three_want_in()
    driver.ask("r2", "b")
    driver.pass_time(1.0)
    driver.ask("r3", "c", priority=Priority.INTERACTIVE)
    driver.pass_time(15.0)
    driver.cancel("r2")
    driver.ask("r4", "b")  # so that c has waited for longer
    driver.passes_until("a")
    driver.ask("r5", "b", priority=Priority.INTERACTIVE)
    driver.gone("a")
    assert driver.spawns() == ["c"]


def test_three_models_of_one_client_take_turns() -> None:
    driver = rivals("abc", min_residency_s=25.0)  # so that each waits for all others
    driver.stream("a", "r-a")
    driver.ask("r-b", "b")
    driver.ask("r-c", "c")
    served = ["a"]
    for _ in range(9):
        driver.swap(served[-1])
        [next_one] = driver.spawns()
        assert driver.turn(next_one), "each turn delivers tokens"
        served.append(next_one)
    assert "".join(served) == "abcabcabca"


def test_clients_that_have_received_less_do_not_keep_a_model_out_for_ever() -> None:
    driver = rivals("abc", aging_s=60.0, min_residency_s=25.0)
    driver.stream("a", "s-a", connection=BOB, priority=Priority.INTERACTIVE)
    key = driver.stream("a", "r-a", connection=ALICE)
    driver.compute(5000.0, key, model="a")
    finish(driver, "a", key)
    for name, who in (("b", ALICE), ("c", BOB)):
        driver.ask(f"s-{name}", name, who, priority=Priority.INTERACTIVE)
    out, served = "a", ""
    for _ in range(12):
        driver.swap(out)
        [out] = driver.spawns()
        driver.turn(out)
        served += out
    assert served.startswith("caca"), "the client that has received less"
    assert "b" in served, served


def test_a_client_at_its_own_limit_swaps_nothing_out() -> None:
    driver = rivals(clients={"*": ClientSettings(max_running=1)})
    key = driver.stream("a", "r1")
    driver.ask("r2", "b")
    assert driver.stays("a"), "it would run nothing"
    driver.stream("a", "r3", connection=BOB)
    finish(driver, "a", key)
    assert driver.why("a") == "swap"


# ---------------------------------------------------------------- called off, refused


def test_a_swap_for_somebody_who_has_gone_is_called_off() -> None:
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
