"""Evidence, suspects, quarantine, out of memory: who pays for a crash, and who does not (F10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.messages import (
    CancelRow,
    Deltas,
    Dispatch,
    Event,
    Heartbeat,
    Reply,
    StatusQuery,
    Subscribe,
)
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.recovery import (
    APPROACH_TOKENS,
    MAX_PLACES,
    MAX_QUARANTINED,
    MAX_SUSPECTS,
    PROBATION_S,
    PROBATION_TOKENS,
    Digest,
    Evidence,
    Held,
    Recovery,
    digest_of,
)
from mlxsup.supervisor.core.settings import CoreSettings, RestartSettings
from support.core_driver import LAUNCH, Driver, entry

SETTINGS = CoreSettings(max_queue=64, max_queue_per_client=64, drain_timeout_s=5.0)
ACCUSING = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
HOUR_S = 3600.0


def engine_of(rows: int, *, memory_limit_bytes: int | None = None, **changes: object) -> Driver:
    """A READY model with so many rows and room for many crashes."""
    restart = RestartSettings(
        max_restarts=50, stable_s=10.0, backoff_initial_s=0.1, backoff_max_s=0.1
    )
    launch = replace(LAUNCH, max_concurrency=rows, memory_limit_bytes=memory_limit_bytes)
    driver = Driver([entry(launch=launch, restart=restart, **changes)], SETTINGS)
    driver.load()
    driver.come_up()
    return driver


def crash(driver: Driver, signal: str = "SIGSEGV", code: int | None = None) -> list[int]:
    """The worker dies and comes back; returns the keys that are dispatched at once."""
    driver.exit(signal=signal, code=code)
    if driver.state() is State.BACKOFF:
        driver.pass_time(0.2)
    driver.come_up()
    return driver.dispatched()


def finish(driver: Driver, key: int) -> list[int]:
    """A request completes; returns the keys that are dispatched then."""
    driver.token(key, finish=FinishReason.STOP)
    return driver.dispatched()


# ---------------------------------------------------------------- rules 1 to 3


@pytest.mark.parametrize("signal", ACCUSING)
def test_poison_costs_three_crashes_and_nobody_else_fails_P10(signal: str) -> None:
    driver = engine_of(8)
    assert driver.serve(*"abcdefgh") == [1, 2, 3, 4, 5, 6, 7, 8]
    poison = 5
    assert crash(driver, signal) == [1, 2, 3, 4, 5, 6, 7, 8], "all go on together"
    assert driver.row()["suspects"] == 8
    running = crash(driver, signal)
    crashes = 2
    while running:
        [key] = running
        assert driver.row()["alone"] == "abcdefgh"[key - 1]
        if key == poison:
            crashes += 1
            running = crash(driver, signal)
            assert driver.row()["quarantined"] == 1
        else:
            running = finish(driver, key)
    assert crashes == 3
    ends = {id: message for (_, id), [message] in driver.terminals.items() if len(id) == 1}
    assert {id for id in ends if getattr(ends[id], "error", None)} == {"e"}
    assert ends["e"].error["code"] == ErrorCode.QUARANTINED
    assert driver.row()["suspects"] == 0


def test_exit_70_accuses_and_a_poison_that_is_always_by_itself_costs_three_too() -> None:
    driver = engine_of(2)
    driver.serve("poison")
    assert crash(driver, code=70) == [1]
    assert driver.row()["alone"] is None
    assert crash(driver, code=70) == [1]
    assert driver.row()["alone"] == "poison"
    driver.exit(code=70)
    assert driver.errors() == {"poison": ErrorCode.QUARANTINED}
    assert driver.state() is State.LOADING, "at once: this crash is not counted"


@pytest.mark.parametrize(("signal", "code"), [("SIGKILL", None), ("SIGTERM", None), ("", 72)])
def test_deaths_without_evidence_accuse_nobody_20_times(signal: str, code: int | None) -> None:
    driver = engine_of(4)
    driver.serve(*"abcd")
    for _ in range(20):
        assert crash(driver, signal, code) == [1, 2, 3, 4]
        driver.token(1, 2, 3, 4)
        assert (driver.row()["suspects"], driver.row()["quarantined"]) == (0, 0)
    driver.token(1, 2, 3, 4, finish=FinishReason.STOP)
    assert driver.errors() == {}


def test_deaths_asked_for_and_while_loading_accuse_nobody() -> None:
    driver = engine_of(2)
    driver.serve("a")
    driver.restart(now=True)
    driver.exit(signal="SIGSEGV")
    driver.spawned()
    driver.exit(signal="SIGSEGV")
    assert driver.row()["suspects"] == 0


def test_an_engine_that_held_nothing_accuses_nobody() -> None:
    driver = engine_of(2)
    for _ in range(5):
        crash(driver)
    assert driver.row()["suspects"] == 0


def test_two_poisons_at_once_cost_three_crashes_each_at_most() -> None:
    driver = engine_of(4)
    driver.serve(*"abcd")
    poisons, crashes = {2, 3}, 2
    crash(driver)
    running = crash(driver)
    while running:
        [key] = running
        crashes += key in poisons
        running = crash(driver) if key in poisons else finish(driver, key)
    assert crashes == 4
    failed = {id for (_, id), [end] in driver.terminals.items() if hasattr(end, "error")}
    assert failed == {"b", "c"}


def gain(driver: Driver, *keys: int) -> None:
    """A step, some time after the last one, gives each row a token."""
    driver.pass_time(PROBATION_S)
    driver.token(*keys)


def prove(driver: Driver, key: int) -> list[int]:
    """A suspect comes past the crash and leaves the batch; returns what is dispatched then."""
    for _ in range(PROBATION_TOKENS):
        assert driver.told(CancelRow) == []
        gain(driver, key)
    started = driver.dispatched()
    if driver.told(CancelRow):
        driver.row_left(key)
        started += driver.dispatched()
    return started


def test_the_suspects_of_both_crashes_take_turns_and_then_run_together_P25() -> None:
    driver = engine_of(8)
    keys = driver.serve(*"abcdefgh")
    for key in keys:
        driver.accept(key)
    driver.token(*keys)
    assert crash(driver) == keys
    running = crash(driver)
    for key in keys[:-1]:
        assert running == [key]
        assert driver.row()["running"] == ["abcdefgh"[key - 1]]
        assert driver.row()["on_probation"] == 8 - keys.index(key)
        running = prove(driver, key)
    assert running == [8]
    assert prove(driver, 8) == keys[:-1], "the last one stays, the others join it"
    assert (driver.row()["on_probation"], driver.row()["alone"]) == (0, None)
    for key in keys:
        finish(driver, key)
    ends = [driver.terminals[b"alice", id][0] for id in "abcdefgh"]
    assert [end.usage.completion_tokens for end in ends] == [1 + PROBATION_TOKENS + 1] * 8
    assert [end.resumed for end in ends] == [1] * 8, "a turn that ends is no crash"
    assert driver.row()["suspects"] == 0


@pytest.mark.parametrize("at", [0, 4, 40, 500])
def test_a_poison_that_is_sent_again_after_each_failure_costs_three_crashes_P10(at: int) -> None:
    driver = engine_of(8)
    keys = driver.serve(*"abcde")
    sends, crashes, open_ = 0, 0, False
    while crashes < 4:
        if not open_:
            sends += 1
            driver.ask(f"poison{sends}", body=b"poison", resume=False)
            if driver.errors():
                break
            open_ = True
        model = driver.core._models.by_name["m"]
        running = list(model.running.values())
        for request in running:
            if request.acceptance is None:
                driver.accept(request.key)
        due = [r for r in running if r.body == b"poison" or r.id.startswith("poison")]
        if due and due[0].tokens_sent == at:
            crashes += 1
            open_ = False
            crash(driver)
            continue
        for request in running:
            gain(driver, request.key)
            if driver.told(CancelRow):
                for told in driver.told(CancelRow):
                    driver.row_left(told.key)
    assert (sends, crashes) == (4, 3)
    assert driver.errors() == {"poison4": ErrorCode.QUARANTINED}
    assert driver.row()["state"] == "READY"
    assert all((b"alice", id) not in driver.terminals for id in "abcde"), keys


def test_a_suspect_that_waits_for_the_others_and_may_not_be_resumed_ends_with_its_worker() -> None:
    driver = engine_of(2)
    for round_ in range(2):
        driver.ask(f"a{round_}", body=b"a")
        driver.ask(f"b{round_}", body=b"b")
        crash(driver)
        driver.cancel(f"a{round_}")
        driver.cancel(f"b{round_}")
    for key in range(1, 5):
        driver.row_left(key)
    driver.ask("a", body=b"a", resume=False)
    driver.ask("b", body=b"b")
    driver.accept(5)
    assert prove(driver, 5) == [6], "it may be asked to leave, because a crash accuses it"
    driver.exit(signal="SIGKILL")
    assert driver.errors() == {"a": ErrorCode.WORKER_CRASHED}


def test_a_turn_ends_past_the_last_crash_and_no_earlier() -> None:
    driver = engine_of(2)
    driver.serve("late", "other")
    for _ in range(2 * APPROACH_TOKENS):
        gain(driver, 1)
    crash(driver)
    gain(driver, 1)
    driver.cancel("late")
    driver.row_left(1)
    driver.ask("again", body=b"late")  # the same request from its beginning
    assert crash(driver) == [2]
    driver.cancel("other")
    driver.row_left(2)
    assert driver.row()["alone"] == "again"
    driver.ask("waits", body=b"other")
    for _ in range(PROBATION_TOKENS - 1):
        gain(driver, 3)
    assert driver.told(CancelRow) == []
    gain(driver, 3)
    assert driver.told(CancelRow) == [CancelRow(key=3)]


def test_the_suspects_of_the_first_crash_take_turns_too_if_they_come_again() -> None:
    driver = engine_of(4)
    driver.serve("a", "b")
    crash(driver)
    driver.cancel("b")
    driver.row_left(2)
    driver.serve("c")
    assert crash(driver) == [1]
    assert driver.row()["on_probation"] == 3
    driver.ask("b again", body=b"b")
    assert prove(driver, 1) == [3]
    assert prove(driver, 3) == [4]


def test_of_equal_requests_the_one_that_had_come_furthest_counts() -> None:
    driver = engine_of(2)
    driver.ask("far", body=b"same")
    for _ in range(9):
        gain(driver, 1)
    driver.ask("near", body=b"same")
    crash(driver)
    gain(driver, 1)
    assert crash(driver) == [1], "it is near the place of the crash, and has its turn"
    driver.cancel("far")
    driver.row_left(1)
    assert driver.dispatched() == [2]
    driver.ask("third", body=b"same")
    for _ in range(10 + PROBATION_TOKENS - 1):
        gain(driver, 2)
    assert driver.row()["on_probation"] == 1
    gain(driver, 2)
    assert driver.row()["on_probation"] == 0


def test_a_suspect_that_is_sent_again_runs_in_company_until_it_is_near_the_crash() -> None:
    driver = engine_of(4)
    driver.serve("long", "other")
    for _ in range(APPROACH_TOKENS + 20):
        driver.token(1)
    crash(driver)
    driver.cancel("other")
    driver.row_left(2)
    assert crash(driver) == [1]
    driver.cancel("long")
    driver.row_left(1)
    [again, new] = driver.serve("long") + driver.serve("new")
    driver.accept(again)
    driver.accept(new)
    for _ in range(20 - 1):
        driver.token(again, new)
        assert (driver.row()["alone"], driver.told(CancelRow)) == (None, [])
    driver.token(again, new)
    assert [told.key for told in driver.told(CancelRow)] == [again, new]
    driver.row_left(new)
    assert driver.dispatched() == []
    driver.row_left(again)
    assert driver.dispatched() == [again], "alone, from the place where it was"
    driver.exit(signal="SIGSEGV")
    assert driver.errors() == {"long": ErrorCode.QUARANTINED}


def test_time_proves_nothing() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    assert crash(driver) == [1]
    driver.token(1)
    driver.pass_time(HOUR_S / 2)
    driver.token(1)
    assert (driver.row()["alone"], driver.dispatched()) == ("a", [])


def test_a_new_request_starts_before_the_next_turn_and_waits_for_the_rest_P25() -> None:
    driver = engine_of(4)
    driver.serve(*"abcd")
    crash(driver)
    driver.exit(signal="SIGSEGV")
    driver.pass_time(0.2)
    driver.ask("new", body=b"new")
    driver.come_up()
    assert driver.dispatched() == [5], "it came while the model loaded, and starts at READY"
    driver.accept(5)
    driver.ask("newer", body=b"newer")
    assert driver.dispatched() == [], "a turn is next"
    gain(driver, 5)
    assert driver.told(CancelRow) == [CancelRow(key=5)]
    driver.row_left(5)
    assert driver.dispatched() == [1]
    assert driver.row()["alone"] == "a"
    assert prove(driver, 1) == [6], "it waited for one turn"
    driver.accept(6)
    gain(driver, 6)
    driver.row_left(6)
    assert driver.dispatched() == [2]
    assert prove(driver, 2) == [3]
    assert prove(driver, 3) == [4]
    gain(driver, 4)
    gain(driver, 4)
    assert driver.dispatched() == []
    gain(driver, 4)
    assert driver.dispatched() == [1, 2, 3], "no turn is due any more: the oldest first"
    assert finish(driver, 4) == [5]


def test_a_turn_is_had_alone_so_that_no_other_strike_is_taken_for_it() -> None:
    driver = engine_of(4)
    driver.serve("a", "b")
    crash(driver)
    assert crash(driver) == [1]
    driver.ask("poison", body=b"poison")
    assert prove(driver, 1) == [3]
    assert crash(driver) == [2], "it struck for the first time, and nobody else was there"
    assert (driver.row()["quarantined"], driver.row()["on_probation"]) == (0, 1)
    assert prove(driver, 2) == [1, 3]
    assert crash(driver) == [1]
    assert prove(driver, 1) == [2]
    assert prove(driver, 2) == [3]
    driver.exit(signal="SIGSEGV")
    assert driver.errors() == {"poison": ErrorCode.QUARANTINED}


def test_a_new_request_that_may_not_be_resumed_waits_until_no_turn_is_due() -> None:
    driver = engine_of(4)
    driver.serve("a", "b")
    crash(driver)
    assert crash(driver) == [1]
    driver.ask("new", body=b"new", resume=False)
    assert prove(driver, 1) == [2]
    assert prove(driver, 2) == [1, 3]


def test_a_suspect_passes_each_place_of_its_crashes_alone() -> None:
    driver = engine_of(4)
    driver.serve("a", "b")
    for _ in range(APPROACH_TOKENS + 20):
        gain(driver, 1)
    crash(driver)
    driver.cancel("a")
    driver.row_left(1)
    [again] = driver.serve("a")
    for key in (2, again):
        driver.accept(key)
    for _ in range(4):
        gain(driver, again)
    assert crash(driver) == [2]
    assert prove(driver, 2) == [again]
    assert prove(driver, again) == [2], "past the second place, and far from the first one"
    assert (driver.row()["alone"], driver.row()["on_probation"]) == (None, 1)
    for _ in range(20 - PROBATION_TOKENS - 4 - 1):
        assert driver.told(CancelRow) == []
        gain(driver, again, 2)
    gain(driver, again, 2)
    assert [told.key for told in driver.told(CancelRow)] == [again, 2]
    driver.row_left(again)
    driver.row_left(2)
    assert driver.dispatched() == [again]
    for _ in range(APPROACH_TOKENS + PROBATION_TOKENS):
        assert driver.row()["alone"] == "a"
        gain(driver, again)
    assert driver.row()["on_probation"] == 0
    assert driver.dispatched() == [2]


def test_the_places_of_a_suspect_are_bounded() -> None:
    recovery, digest = Recovery(), Digest(b"d")
    rows = [Held(digest=digest, tokens=100 * n) for n in range(MAX_PLACES + 5)]
    for _ in range(2):
        recovery.judge(Evidence.ACCUSES, rows, 0.0)
    due = [one.tokens for one in rows if recovery.is_due(one)]
    assert due == [100 * n for n in range(5, MAX_PLACES + 5)]


def test_tokens_that_come_at_once_prove_nothing_before_their_time() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    assert crash(driver) == [1]
    for _ in range(50):
        driver.token(1)
        assert driver.told(CancelRow) == []
    driver.pass_time(2 * PROBATION_S)
    driver.token(1)
    assert driver.told(CancelRow) == [CancelRow(key=1)]


def test_the_time_of_a_turn_counts_afresh_in_each_life() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    crash(driver)
    driver.token(1)
    driver.pass_time(1.0)
    assert crash(driver, "SIGKILL") == [1]
    for _ in range(PROBATION_TOKENS):
        driver.token(1)
    assert driver.told(CancelRow) == []


def waits_for_a_row_that_may_not_be_resumed() -> Driver:
    """Suspect `long` (key 3) comes near its crash while `stays` (4) and `plain` (5) run."""
    driver = engine_of(4)
    driver.serve("long", "other")
    for _ in range(APPROACH_TOKENS + 1):
        driver.token(1)
    crash(driver)
    driver.cancel("other")
    driver.row_left(2)
    crash(driver)
    driver.cancel("long")
    driver.row_left(1)
    running = driver.serve("long")
    running += driver.serve("stays", resume=False)
    running += driver.serve("plain")
    for key in running:
        driver.accept(key)
    driver.token(*running)
    return driver


def test_a_row_that_may_not_be_resumed_holds_up_a_turn_and_nobody_else() -> None:
    driver = waits_for_a_row_that_may_not_be_resumed()
    assert [told.key for told in driver.told(CancelRow)] == [3]
    assert driver.row()["alone"] is None, "others run, too, until its row has left"
    driver.row_left(3)
    assert (driver.dispatched(), driver.row()["queued"]) == ([], 1)
    assert driver.serve("new") == [6]
    driver.token(4, 5, 6)
    assert driver.told(CancelRow) == []
    finish(driver, 4)
    assert [told.key for told in driver.told(CancelRow)] == [5, 6]


def test_a_crash_in_company_convicts_nobody_who_was_near_his_own() -> None:
    driver = waits_for_a_row_that_may_not_be_resumed()
    crash(driver)
    assert (driver.row()["quarantined"], driver.row()["on_probation"]) == (0, 4)


def test_newcomers_without_end_keep_no_suspect_from_its_turn() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    crash(driver)
    driver.ask("n3", body=b"n3")
    turns, running = [], prove(driver, 1)
    for number in range(4, 8):
        driver.ask(f"n{number}", body=b"n%d" % number)
        key = running[0]
        turns.append(key)
        running = prove(driver, key) if driver.row()["alone"] else finish(driver, key)
    assert turns == [3, 2, 1, 4], "one intake, one turn; then all by age"


def test_three_poisons_do_not_make_an_engine_broken_in_which_others_come_past_their_crash() -> None:
    driver = engine_of(8)
    poisons = {2, 4, 6}
    driver.serve(*"abcdefg")
    crash(driver)
    running = crash(driver)
    while driver.row()["on_probation"]:
        [key] = running
        running = crash(driver) if key in poisons else prove(driver, key)
    assert (driver.row()["state"], driver.row()["quarantined"]) == ("READY", 3)


def test_a_late_poison_among_the_suspects_is_found_within_three_crashes_of_its_own_P10() -> None:
    driver = engine_of(2)
    driver.serve("late", "other")
    crash(driver)
    assert crash(driver) == [1]
    assert prove(driver, 1) == [2]
    assert prove(driver, 2) == [1]
    driver.token(1, 2)
    assert crash(driver) == [1], "in company: nobody is convicted, and all take turns again"
    assert driver.row()["quarantined"] == 0
    assert prove(driver, 1) == [2]
    assert prove(driver, 2) == [1]
    crash(driver)
    assert driver.row()["alone"] == "late"
    crash(driver)
    assert [end.error["code"] for end in driver.terminals[b"alice", "late"]] == ["quarantined"]


# ---------------------------------------------------------------- what crosses the end of a turn


def yielding() -> Driver:
    """Suspects `a` and `b`; `a` has come past the crash, and its row has been asked to leave."""
    driver = engine_of(2)
    for key in driver.serve("a", "b"):
        driver.accept(key)
    crash(driver)
    crash(driver)
    for _ in range(PROBATION_TOKENS):
        gain(driver, 1)
    assert driver.told(CancelRow) == [CancelRow(key=1)]
    return driver


def test_tokens_that_cross_the_end_of_a_turn_are_delivered_once() -> None:
    driver = yielding()
    driver.token(1)
    assert len(driver.sent(Deltas)) == 1
    driver.row_left(1)
    finish(driver, 2)
    [dispatch] = driver.told(Dispatch)
    assert (dispatch.key, len(dispatch.resume.delivered)) == (1, 4 * (PROBATION_TOKENS + 1))


def test_an_end_that_crosses_the_end_of_a_turn_wins() -> None:
    driver = yielding()
    assert finish(driver, 1) == [2]
    [end] = driver.terminals[b"alice", "a"]
    assert end.finish_reason is FinishReason.STOP


def test_a_cancel_that_crosses_the_end_of_a_turn_is_answered_once() -> None:
    driver = yielding()
    driver.cancel("a")
    [end] = driver.terminals[b"alice", "a"]
    assert end.finish_reason is FinishReason.CANCELLED
    driver.row_left(1)
    assert driver.dispatched() == [2]
    assert driver.row()["queued"] == 0


def test_a_crash_that_crosses_the_end_of_a_turn_accuses_whom_it_held_and_convicts_nobody() -> None:
    driver = yielding()
    assert crash(driver) == [1]
    assert driver.row()["quarantined"] == 0
    assert driver.row()["alone"] == "a", "it has to come past this crash as well"


def test_a_kill_from_outside_takes_nobody_his_turn_and_convicts_nobody() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    crash(driver)
    assert crash(driver, "SIGKILL") == [1]
    assert (driver.row()["alone"], driver.row()["quarantined"]) == ("a", 0)


def test_a_row_is_asked_to_leave_once_whatever_happens_until_it_has_left() -> None:
    driver = yielding()
    driver.beat()
    assert driver.told(CancelRow) == []
    driver.ask("new", body=b"new")
    assert driver.told(CancelRow) == []
    driver.token(1)
    assert driver.told(CancelRow) == []


def test_a_turn_that_was_cancelled_lasts_until_its_row_has_left() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    assert crash(driver) == [1]
    driver.cancel("a")
    assert driver.dispatched() == [], "the engine may still die of it"
    driver.ask("new", body=b"new")
    assert driver.dispatched() == []
    driver.row_left(1)
    assert driver.dispatched() == [3]


def test_an_end_with_the_last_token_of_a_turn_asks_no_row_to_leave() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    crash(driver)
    for _ in range(PROBATION_TOKENS - 1):
        driver.token(1)
    assert finish(driver, 1) == [2]
    assert driver.told(CancelRow) == []


def test_a_turn_that_ended_leaves_no_limit_for_the_start_and_no_time_of_service() -> None:
    driver = engine_of(2)
    for round_ in range(2):
        driver.ask(f"a{round_}", body=b"a")
        driver.ask(f"b{round_}", body=b"b")
        crash(driver)
        driver.cancel(f"a{round_}")
        driver.cancel(f"b{round_}")
    for key in range(1, 5):
        driver.row_left(key)
    driver.ask("a", body=b"a", queue_timeout_s=5.0)
    driver.ask("b", body=b"b")
    driver.accept(5)
    assert prove(driver, 5) == [6]
    driver.pass_time(6.0)
    assert driver.row()["queued"] == 1
    assert prove(driver, 6) == [5]
    finish(driver, 5)
    assert driver.core._models.by_name["m"].service_s is None, "it ran in two pieces"


def test_a_drain_lets_the_suspect_on_its_turn_finish() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    crash(driver)
    driver.unload()
    assert driver.errors() == {"b": "unloaded"}
    for _ in range(PROBATION_TOKENS):
        driver.token(1)
    assert driver.told(CancelRow) == []
    finish(driver, 1)
    [end] = driver.terminals[b"alice", "a"]
    assert end.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("how", ["unload", "stop", "removed"])
def test_a_row_that_leaves_for_another_turn_while_the_model_goes_down_is_answered(how: str) -> None:
    driver = yielding()
    if how == "removed":
        driver.do(Reloaded(now=driver.now, settings=SETTINGS, models=()))
    else:
        getattr(driver, how)()
    driver.row_left(1)
    code = {"unload": "unloaded", "stop": "shutting_down", "removed": "unknown_model"}[how]
    assert driver.errors() == {"a": code}


# ---------------------------------------------------------------- what clears, and what does not


def test_cancelling_or_sending_again_does_not_clear_suspicion() -> None:
    driver = engine_of(4)
    for round_ in range(1, 3):
        driver.ask(f"try{round_}", body=b"poison")
        driver.cancel(f"try{round_}")
        crash(driver)
    driver.ask("try3", body=b"poison")
    assert driver.row()["alone"] == "try3"
    driver.cancel("try3")
    crash(driver)
    driver.ask("try4", body=b"poison")
    assert driver.errors() == {"try4": ErrorCode.QUARANTINED}, "found while its row was leaving"


def test_who_is_quarantined_is_refused_for_an_hour_wherever_it_waits() -> None:
    driver = engine_of(1)
    driver.ask("one", body=b"poison")
    driver.ask("two", body=b"poison")
    crash(driver)
    crash(driver)
    driver.ask("innocent", body=b"innocent")
    driver.exit(signal="SIGSEGV")
    assert driver.errors() == {"one": "quarantined", "two": "quarantined"}
    driver.come_up()
    assert driver.dispatched() == [3]
    driver.ask("three", body=b"poison")
    assert driver.errors() == {"three": ErrorCode.QUARANTINED}
    driver.pass_time(HOUR_S)
    driver.ask("four", body=b"poison")
    assert driver.errors() == {}


def test_a_completion_clears_and_so_does_an_hour() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    finish(driver, 1)
    assert driver.row()["suspects"] == 1
    driver.pass_time(HOUR_S)
    driver.serve("c")
    assert driver.row()["suspects"] == 0


def test_a_row_that_a_worker_ends_unasked_proves_nobody_innocent() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    driver.token(1, finish=FinishReason.CANCELLED)
    assert driver.row()["suspects"] == 2


def test_restart_and_a_changed_entry_lift_a_quarantine_and_an_unchanged_one_does_not() -> None:
    driver = engine_of(2)
    model = driver.core._models.by_name["m"]

    def quarantine(id: str) -> None:
        driver.serve(id)
        for _ in range(3):
            crash(driver)
        assert driver.row()["quarantined"] == 1

    quarantine("p")
    driver.do(Reloaded(now=driver.now, settings=SETTINGS, models=(model.life.settings,)))
    assert driver.row()["quarantined"] == 1
    changed = replace(model.life.settings, idle_unload_s=999.0)
    driver.do(Reloaded(now=driver.now, settings=SETTINGS, models=(changed,)))
    assert driver.row()["quarantined"] == 0
    quarantine("p2")
    driver.restart()
    assert driver.row()["quarantined"] == 0


# ---------------------------------------------------------------- rule 4


def quarantine_three(driver: Driver, *, completes_after: int = 99) -> None:
    for number in range(1, 4):
        key = driver.serve(f"p{number}")[0]
        driver.accept(key)
        crash(driver)
        crash(driver)
        driver.exit(signal="SIGSEGV")
        if driver.state() is not State.FAILED:
            driver.come_up()
        if number == completes_after:
            finish(driver, driver.serve(f"fine{key}")[0])


def test_a_third_quarantine_without_a_completion_means_that_the_engine_is_broken() -> None:
    driver = engine_of(2)
    quarantine_three(driver)
    assert driver.state() is State.FAILED
    assert "the engine is broken" in driver.row()["cause"]
    assert driver.row()["quarantined"] == 0
    assert driver.terminals[b"alice", "p3"][0].error["code"] == ErrorCode.WORKER_CRASHED
    driver.load()
    driver.come_up()
    assert driver.serve("p1") != [], "all three are lifted"


def test_nor_is_it_after_a_restart_which_lifts_what_there_was() -> None:
    driver = engine_of(2)
    for number in range(1, 5):
        driver.serve(f"p{number}")
        for _ in range(3):
            crash(driver)
        if number == 2:
            driver.restart(now=True)
            driver.exit(code=0)
            driver.come_up()
    assert driver.state() is State.READY
    assert driver.row()["quarantined"] == 2


def test_a_completion_in_between_shows_that_it_is_not() -> None:
    driver = engine_of(2)
    quarantine_three(driver, completes_after=2)
    assert driver.state() is State.READY
    assert driver.row()["quarantined"] == 3


def test_the_crash_that_finds_the_culprit_is_not_counted_in_the_window_P9() -> None:
    restart = RestartSettings(
        max_restarts=2, window_s=1000.0, backoff_initial_s=0.1, backoff_max_s=0.1
    )
    driver = Driver([entry(restart=restart)], SETTINGS)
    driver.load()
    driver.come_up()
    driver.serve("p")
    for _ in range(3):
        crash(driver)
    assert driver.state() is State.READY
    assert driver.row()["restarts"] == 3, "it is a crash all the same"
    driver.exit()
    assert driver.state() is State.FAILED, "two crashes had been counted before"


# ---------------------------------------------------------------- out of memory


def test_out_of_memory_halves_the_rows_and_accuses_nobody() -> None:
    driver = engine_of(4)
    driver.serve(*"abcd")
    assert crash(driver, code=75) == [1, 2]
    assert (driver.row()["row_limit"], driver.row()["suspects"]) == (2, 0)
    assert crash(driver, code=75) == [1]
    driver.exit(code=75)
    assert driver.errors() == {"a": ErrorCode.INSUFFICIENT_MEMORY}
    driver.pass_time(10.0)
    driver.come_up()
    assert driver.dispatched() == [2]
    driver.pass_time(HOUR_S)
    finish(driver, 2)
    assert driver.row()["row_limit"] == 4


def test_a_kill_over_the_memory_limit_is_taken_for_out_of_memory() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    driver.sample(1001)
    assert crash(driver, "SIGKILL") == [1]
    assert driver.row()["row_limit"] == 1
    driver.worker(Heartbeat(step=1, phase=WorkerPhase.DECODE, phase_s=0.0, active_bytes=2000))
    driver.exit(signal="SIGKILL")
    assert driver.errors() == {"a": ErrorCode.INSUFFICIENT_MEMORY}


def test_what_was_measured_of_a_process_says_nothing_of_the_next_one() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    before = driver.row()["pid"]
    driver.sample(1000)
    assert driver.row()["footprint_bytes"] == 1000
    driver.exit()
    driver.sample(1001, pid=before)
    assert driver.row()["footprint_bytes"] == 0
    driver.come_up(pid=before + 1)
    driver.sample(1001, pid=before)
    assert crash(driver, "SIGKILL") == [1, 2], "no kill for memory"


def test_nor_before_the_next_one_was_measured() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    driver.sample(1001)
    driver.exit(signal="SIGTERM")
    driver.come_up()
    assert crash(driver, "SIGKILL") == [1, 2], "no kill for memory"


def test_a_kill_under_the_limit_is_a_kill_from_outside() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    driver.sample(1000)
    assert crash(driver, "SIGKILL") == [1, 2]


def killed_holding(driver: Driver, footprint_bytes: int, machine_bytes: int) -> list[int]:
    """SIGKILL from outside, after a sample; returns what is dispatched afterwards."""
    driver.serve("a", "b")
    driver.sample(footprint_bytes, machine_bytes=machine_bytes)
    return crash(driver, "SIGKILL")


def test_the_limit_is_what_the_launch_says_where_no_other_is_set() -> None:
    launch = replace(LAUNCH, max_concurrency=4, memory_limit_bytes=1000)
    for footprint_bytes, dispatched in ((1001, [1]), (1000, [1, 2])):
        driver = Driver([entry(launch=launch)], SETTINGS)
        driver.load()
        driver.come_up()
        assert killed_holding(driver, footprint_bytes, 10_000) == dispatched


def test_without_a_limit_a_kill_of_who_fills_the_machine_is_out_of_memory() -> None:
    assert killed_holding(engine_of(4), 901, 1000) == [1]
    assert killed_holding(engine_of(4), 900, 1000) == [1, 2]


# ---------------------------------------------------------------- who waits, who is told


def test_a_suspect_that_comes_again_has_its_turn_between_others() -> None:
    driver = engine_of(4)
    driver.serve("suspect")
    driver.cancel("suspect")
    crash(driver)
    driver.ask("suspect", body=b"suspect")
    driver.cancel("suspect")
    crash(driver)
    [plain] = driver.serve("plain")
    driver.accept(plain)
    driver.ask("suspect", body=b"suspect")
    assert driver.dispatched() == []
    driver.token(plain)
    assert driver.told(CancelRow) == [CancelRow(key=plain)]
    driver.row_left(plain)
    assert driver.row()["alone"] == "suspect"
    [again] = driver.dispatched()
    assert finish(driver, again) == [plain]


def test_the_story_of_each_decision_is_told_in_events_and_in_the_status() -> None:
    driver = engine_of(2)
    driver.say(Subscribe(id="s"))
    driver.serve("p")
    notes = []
    for _ in range(3):
        driver.exit(signal="SIGSEGV")
        notes += [event.value["note"] for event in driver.sent(Event)]
        driver.pass_time(0.2)
        if driver.state() is State.LOADING:
            driver.come_up()
    assert any("1 request under suspicion" in note for note in notes)
    assert any("for the second time" in note for note in notes)
    assert any("quarantined" in note for note in notes)
    driver.say(StatusQuery(id="q", debug=True))
    [reply] = driver.sent(Reply)
    assert any("quarantined" in line for line in reply.value["stories"]["m"])


def test_digests_tell_models_and_bodies_apart_and_equal_requests_not() -> None:
    assert digest_of("m", b"x") == digest_of("m", b"x")
    assert len({digest_of("m", b"x"), digest_of("m", b"y"), digest_of("mx", b"")}) == 3


def test_a_turn_is_due_from_some_way_before_the_place_of_a_crash() -> None:
    recovery, place = Recovery(), 100
    suspect, other = Digest(b"suspect"), Digest(b"other")
    recovery.judge(Evidence.ACCUSES, [Held(digest=suspect, tokens=place), Held(digest=other)], 0.0)
    recovery.judge(Evidence.ACCUSES, [Held(digest=other)], 1.0)
    due = [n for n in range(120) if recovery.is_due(Held(digest=suspect, tokens=n))]
    assert due == list(range(place - APPROACH_TOKENS, 120))


def test_who_was_accused_again_is_forgotten_last() -> None:
    recovery, old = Recovery(), Held(digest=Digest(b"old"))
    recovery.judge(Evidence.ACCUSES, [old, Held(digest=Digest(b"older"))], 0.0)
    recovery.judge(Evidence.ACCUSES, [old, Held(digest=Digest(b"other"))], 1.0)
    many = [Held(digest=Digest(b"%d" % n)) for n in range(MAX_SUSPECTS - 2)]
    recovery.judge(Evidence.ACCUSES, many, 2.0)
    assert recovery.suspects == MAX_SUSPECTS
    assert recovery.is_suspect(old.digest)
    assert not recovery.is_suspect(Digest(b"older"))


def test_memory_of_suspects_and_quarantines_is_bounded() -> None:
    recovery = Recovery()
    many = [Digest(str(n).encode()) for n in range(MAX_SUSPECTS + 10)]
    recovery.judge(Evidence.ACCUSES, [Held(digest=digest) for digest in many], 0.0)
    assert recovery.suspects == MAX_SUSPECTS
    for number, digest in enumerate(many):
        recovery.completed(Digest(b"fine"))
        for _ in range(3):
            recovery.judge(Evidence.ACCUSES, [Held(digest=digest)], float(number) / 1000)
    assert recovery.quarantined == MAX_QUARANTINED


def test_a_dispatch_after_an_accusing_crash_resumes() -> None:
    driver = engine_of(2)
    driver.serve("a")
    driver.accept(1)
    driver.token(1)
    driver.exit(signal="SIGSEGV")
    driver.come_up()
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
