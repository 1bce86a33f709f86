"""Test swaps: models that do not fit together take turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Done, Failed, Notice, Subscribe
from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.states import Priority, State
from mlxsup.protocol.worker_messages import Exit, PauseRow
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.life import Files
from mlxsup.supervisor.core.settings import ClientSettings, ModelSettings

from support.core.looks import ALICE, BOB
from support.core.memory import GIB, SUBSCRIPTION, limited, notes, sized, states
from support.core.scripts import play
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
    assert driver.row("a")["memory_wait"]["reason"].startswith("needs 4.00 GiB; 0.0 MiB is free")
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
    reasons = []
    for script in ("stream a r1; ask r2 b notices=True", "passes_until a; ask r3 a notices=True"):
        play(driver, script)
        queued = [n.detail for n in driver.sent(Notice) if n.kind == "queued"]
        reasons += [detail["reason"] for detail in queued]
    assert reasons == ["memory", "swap"]


def test_load_dry_run_names_swaps() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    answer = driver.foresees("b")
    assert (answer["outcome"], answer["swaps"], answer["evicts"]) == ("swaps", ["a"], [])
    assert answer["reason"] == (
        "needs 4.00 GiB; 0.0 MiB is free: a is busy and makes room when its turn ends"
    )
    driver.now += 100.0
    assert driver.foresees("b")["reason"] == answer["reason"], "it has to wait, too"
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
    assert answer["reason"].endswith(": a and b are busy and make room when their turns end")


TURNS = {
    "a turn lasts three times its load and its reading": (
        "unload a; exit a code=0; ask r1 a; ask r2 a; up a; ask r3 b; wait 9; token 1 model=a;"
        " stays a 30 -> returns=True;"  # the other row has no token yet
        " token 2 model=a; serve r4 model=a; stays a 119.9 -> returns=True; wait 0.2 -> a.why=swap"
    ),
    "a turn that has delivered no token is not ended": (
        "serve r1 model=a; ask r2 b; wait 5; serve r3 model=a; cancel r1; row_left 1 a;"
        " stays a 50 -> returns=True; token 3 model=a; stays a 150 -> returns=True; passes_until a"
    ),
    "no higher class is swapped out for a lower one": (
        "stream a r1 priority=interactive; ask r2 b; stays a 100 -> returns=True;"
        " stream a r3; token 1 model=a finish=stop -> a.why=swap"
    ),
    "no normal class is swapped out for batch": (
        "stream a r1; ask r2 b priority=batch; stays a 100 -> returns=True;"
        " stream a r3 priority=batch; token 1 model=a finish=stop -> a.why=swap"
    ),
    "an answer that may not be resumed blocks a swap": (
        "stream a r1 resume=False; ask r2 b; stream a r3; stays a 100 -> returns=True;"
        " token 1 model=a finish=stop -> a.why=swap"
    ),
    "once its process is to exit, a swap is not called off": (
        "stream a r1; ask r2 b; passes_until a; rows_leave a; cancel r2 -> a=STOPPING;"
        " exit a code=0 -> spawns=[a]"
    ),
    "a swap is called off if only a lower class still wants it": (
        "stream a r1; ask r2 b; ask r3 b priority=batch; passes_until a; cancel r2 -> a=READY"
    ),
    "rows that do not leave are cut off and continue later": (
        "stream a r1; ask r2 b; passes_until a; wait 5 -> a=STOPPING; exit a code=0; turn b;"
        " swap b; up a -> dispatched=[1]"
    ),
    "a load swaps as an interactive request does": (
        "stream a r1 priority=interactive; load b; passes_until a -> returns=20; gone a;"
        " up b -> b=READY & replies=[c2]"
    ),
    "a load of a model that makes room is done if that is called off": (
        "stream a r1; ask r2 b; passes_until a; load a -> replies=[]; cancel r2 -> replies=[c2]"
    ),
    "a shutdown ends the queue of a model that made room": (
        "stream a r1; ask r2 b; passes_until a; gone a; turn b;"
        " stop -> errors={r1: shutting_down}"
    ),
    "a restart while rows leave brings it back at once": (
        "stream a r1; ask r2 b; passes_until a; restart a; row_left 1 a; exit a code=0;"
        " -> spawns=[a]; up a -> dispatched=[1]; token 1 model=a; passes_until a 40"
    ),
    "a restart with now while rows leave brings it back at once": (
        "stream a r1; ask r2 b; passes_until a; restart a now=True -> a=STOPPING; exit a code=0;"
        " -> spawns=[a]; up a -> dispatched=[1]; token 1 model=a; passes_until a 40"
    ),
    "a crash while rows leave is a crash, and the swap comes later": (
        "stream a r1; ask r2 b; passes_until a; exit a code=70 -> spawns=[a] & a.restarts=1;"
        " up a -> dispatched=[1]; token 1 model=a; swap a -> spawns=[b]"
    ),
    "a load of a model that makes room waits on if that crashes": (
        "stream a r1; ask r2 b; passes_until a; load a; exit a code=70 -> spawns=[a] & errors={};"
        " up a -> replies=[c2]"
    ),
    "a model that crashes in its first load of a turn keeps its turn": (
        "stream a r1; ask r2 b; passes_until a; gone a; spawned b; exit b code=70 -> spawns=[b]"
    ),
    "a crash after a long turn is restarted at once, though a swap ended that turn F2": (
        "exit a; up a; stream a r1; ask r2 b; swap a; turn b; swap b; up a; exit a -> a=LOADING"
    ),
    "paused requests survive a swap": (
        "stream a r1; stream a r2; pause r1; row_left 1 a; ask r3 b; swap a; turn b;"
        " -> a.paused=[r1]; swap b; up a -> dispatched=[2]; resume r1 -> dispatched=[1]"
    ),
    "a model of paused requests alone makes room, and waits until one resumes": (
        "stream a r1; pause r1; row_left 1 a; ask r2 b; passes_until a -> a=STOPPING;"
        " exit a code=0; turn b; stays b 100 -> returns=True; resume r1; swap b -> spawns=[a]"
    ),
}  # fmt: skip
"""Models `a`, which is READY, and `b`, of which one fits into memory."""


@pytest.mark.parametrize("rule", TURNS)
def test_turns_of_two_models(rule: str) -> None:
    play(rivals(), TURNS[rule])


def test_a_client_at_its_own_limit_swaps_nothing_out() -> None:
    driver = rivals(clients={"*": ClientSettings(max_running=1)})
    play(driver, "stream a r1; ask r2 b; stays a 100 -> returns=True")
    driver.stream("a", "r3", connection=BOB)
    play(driver, "token 1 model=a finish=stop -> a.why=swap")


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


def unequal(**changes: Any) -> SwapDriver:
    """`a` is busy; ALICE has received 3 and 4 seconds of `b` and `a`, BOB 5 of `c`."""
    driver = rivals("abc", **changes)
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
    return driver


def test_the_account_that_has_received_less_from_all_models_is_next() -> None:
    driver = unequal()
    driver.ask("r2", "b", ALICE)
    driver.ask("r3", "c", BOB)
    driver.swap("a")
    assert driver.spawns() == ["c"], "5 seconds are less than 3 and 4"


@pytest.mark.parametrize(("turn_s", "comes"), [(110.0, "c"), (130.0, "b")])
def test_a_model_that_has_waited_for_two_agings_is_next(turn_s: float, comes: str) -> None:
    driver = unequal(min_residency_s=turn_s, aging_s=60.0)
    driver.ask("r2", "b", ALICE)
    driver.pass_time(20.0)
    driver.ask("r3", "c", BOB)
    driver.swap("a")
    assert driver.spawns() == [comes]


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


def test_a_model_that_was_swapped_out_waits_for_memory_at_once() -> None:
    """Its end is the news, not that it waits from then on."""
    driver = rivals()
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.swap("a")
    assert [note for note in notes(driver) if note.startswith("waiting for memory")] == []


def test_a_turn_counts_once_the_row_that_had_no_token_was_cancelled() -> None:
    """No step comes after the cancel, and no sample."""
    settings = limited(4 * GIB, min_residency_s=30.0)
    driver = SwapDriver([sized(name, 4 * GIB) for name in "ab"], settings)
    driver.ask("r1", "a", body=b"r1")
    driver.ask("r2", "a", body=b"r2")
    driver.come_up("a")
    first, _ = driver.dispatched()
    driver.accept(first, "a")
    driver.token(first, model="a")
    driver.ask("r3", "b")
    driver.pass_time(5.0)
    driver.cancel("r2")
    assert driver.passes_until("a") == 30, "`min_residency_s` from the cancel"


def test_swap_without_waiters_is_called_off() -> None:
    driver = play(rivals(), "stream a r1; stream a r2")
    driver.ask("r3", "b", BOB)
    play(driver, "passes_until a; row_left 1 a")
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.leave(BOB)
    assert "stays: b no longer needs its memory" in notes(driver)
    play(driver, "-> a=READY & dispatched=[1]; row_left 2 a -> dispatched=[2]")


def test_with_swap_off_what_would_need_one_is_refused() -> None:
    driver = rivals(swap=False)
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.pass_time(21.0)
    assert states(driver, "ab") == [State.READY, State.STOPPED]
    [error] = driver.terminals[ALICE, "r2"]
    assert isinstance(error, Failed)
    assert error.error.code == "insufficient_memory"
    assert error.error.detail["blocked_by"] == ["a"]
    assert error.error.message == (
        "b cannot be loaded: it needs 4.00 GiB; 0.0 MiB is free: a is busy,"
        " and busy models do not make room because `swap` is off"
    )


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
    return error.error.code, error.error.detail.get("tokens_sent")


def reload(driver: SwapDriver, *models: ModelSettings) -> None:
    settings = limited(4 * GIB, max_queue=64, max_queue_per_client=64)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


A, B = sized("a", 4 * GIB), sized("b", 4 * GIB)
OTHER_A = replace(A, launch=replace(A.launch, path="/other"))


def test_a_preload_never_swaps() -> None:
    models = [A, replace(B, preload=True)]
    driver = SwapDriver([A], limited(4 * GIB))
    driver.bring_up("a")
    driver.stream("a", "r1")
    driver.do(Reloaded(now=driver.now, settings=limited(4 * GIB), models=tuple(models)))
    assert driver.stays("a")
    assert driver.state("b") is State.PENDING
    driver.ask("r2", "b")
    assert driver.passes_until("a") == 20, "from the moment at which a request waits"


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


def test_a_pinned_entry_with_another_launch_does_not_keep_the_old_process() -> None:
    driver, key = swapping()
    reload(driver, replace(OTHER_A, pinned=True), B)
    assert driver.state("a") is State.DRAINING
    driver.row_left(key, "a")
    assert driver.state("a") is State.STOPPING


def test_a_removal_while_rows_leave_is_not_called_off_with_the_swap() -> None:
    driver, key = swapping()
    reload(driver, B)
    driver.cancel("r2")
    driver.row_left(key, "a")
    assert ([one.key for one in driver.resumed()], driver.state("a")) == ([key], State.DRAINING)
    finish(driver, "a", key)
    assert driver.state("a") is State.STOPPING


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


def test_changed_files_keep_a_model_for_an_answer_that_is_paused() -> None:
    driver = SwapDriver([A, B], limited(4 * GIB))
    driver.bring_up("a")
    key = driver.stream("a", "r1")
    driver.pause("r1")
    driver.row_left(key, "a")
    model = driver.model("a")
    model.life.files = Files(seen_at=driver.now, change="config.json has changed")
    assert model.stays_because == "config.json has changed"
    driver.cancel("r1")
    assert model.stays_because == ""


def test_a_model_that_is_pinned_meanwhile_stays() -> None:
    driver, key = swapping()
    driver.say(Subscribe(id=SUBSCRIPTION))
    reload(driver, replace(A, pinned=True), replace(B, pinned=False))
    assert "stays: it is pinned now" in notes(driver)
    assert driver.state("a") is State.READY
    driver.row_left(key, "a")
    assert [one.key for one in driver.resumed()] == [key]
    assert ended(driver, "r2")[0] == "insufficient_memory"


# Memory kept for a swap


def crowded(*more: ModelSettings) -> SwapDriver:
    """`a` makes room for `b`, which is asked interactively; `d` has waited for longer, and neither
    fits beside `a`. Before `a` has left, `c` loads again after a crash."""
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
    driver = play(crowded(), "gone a")
    assert driver.row("b")["memory_wait"] == {
        "waits_s": 20.0,
        "reason": "needs 7.00 GiB, which is kept for it: other models load first",
    }
    play(driver, "up c -> spawns=[b]")  # though the other one has waited for longer


def test_kept_memory_is_released_without_waiters() -> None:
    play(crowded(), "gone a; cancel r2 -> b.memory_wait=None; up c -> spawns=[d]")


def test_a_swap_is_called_off_if_there_is_room_without_it_while_another_one_loads() -> None:
    play(
        crowded(sized("e", 7 * GIB)),
        "unload e; exit e code=0 -> a=READY & b=PENDING & c=LOADING; up c -> spawns=[b]",
    )
