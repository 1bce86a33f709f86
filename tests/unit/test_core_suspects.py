"""Suspects take turns alone, and new requests start between the turns (F10, P10, P25)."""

from __future__ import annotations

import pytest

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import State
from mlxsup.protocol.worker_messages import PauseRow
from mlxsup.supervisor.core.health.blame import (
    APPROACH_TOKENS,
    MAX_PLACES,
    PROBATION_S,
    PROBATION_TOKENS,
    Blame,
    Digest,
    Evidence,
    Held,
)

from support.core_driver import Driver
from support.suspects import HOUR_S, crash, engine_of, finish, gain, prove


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
    ends = [driver.result_of(id) for id in "abcdefgh"]
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
        model = driver.model()
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
            if driver.told(PauseRow):
                for told in driver.told(PauseRow):
                    driver.row_left(told.key)
    assert (sends, crashes) == (4, 3)
    assert driver.errors() == {"poison4": ErrorCode.QUARANTINED}
    assert driver.row()["state"] == "READY"
    assert all((b"alice", id) not in driver.terminals for id in "abcde"), keys


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
    assert driver.told(PauseRow) == []
    gain(driver, 3)
    assert driver.told(PauseRow) == [PauseRow(key=RequestKey(3), keep=False)]


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
        assert (driver.row()["alone"], driver.told(PauseRow)) == (None, [])
    driver.token(again, new)
    assert [told.key for told in driver.told(PauseRow)] == [again, new]
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


def in_turns_with_a_newcomer() -> Driver:
    """Four suspects of two crashes, and a request that came while the model was loaded again."""
    driver = engine_of(4)
    driver.serve(*"abcd")
    crash(driver)
    driver.exit(signal="SIGSEGV")
    driver.pass_time(0.2)
    driver.ask("new", body=b"new")
    driver.come_up()
    return driver


def test_a_new_request_starts_before_the_next_turn_and_waits_for_the_rest_P25() -> None:
    driver = in_turns_with_a_newcomer()
    assert driver.dispatched() == [5], "it came while the model loaded, and starts at READY"
    driver.accept(5)
    driver.ask("newer", body=b"newer")
    assert driver.dispatched() == [], "a turn is next"
    gain(driver, 5)
    assert driver.told(PauseRow) == [PauseRow(key=RequestKey(5), keep=False)]
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
    assert driver.dispatched() == [1, 2, 3], "no further turn is due: the oldest first"
    assert finish(driver, 4) == [5]


def test_an_unload_ends_who_waits_while_others_take_turns_but_no_answer_that_was_paused() -> None:
    driver = in_turns_with_a_newcomer()
    driver.accept(5)
    gain(driver, 5)
    driver.row_left(5)
    assert driver.dispatched() == [1]
    driver.unload()
    assert driver.errors() == dict.fromkeys("bcd", ErrorCode.UNLOADED)
    assert finish(driver, 1) == [5], "the worker lives, and the answer had begun"
    finish(driver, 5)
    assert driver.state() is State.STOPPING


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
        assert driver.told(PauseRow) == []
        gain(driver, again, 2)
    gain(driver, again, 2)
    assert [told.key for told in driver.told(PauseRow)] == [again, 2]
    driver.row_left(again)
    driver.row_left(2)
    assert driver.dispatched() == [again]
    for _ in range(APPROACH_TOKENS + PROBATION_TOKENS):
        assert driver.row()["alone"] == "a"
        gain(driver, again)
    assert driver.row()["on_probation"] == 0
    assert driver.dispatched() == [2]


def test_the_places_of_a_suspect_are_bounded() -> None:
    recovery, digest = Blame(), Digest(b"d")
    rows = [Held(digest=digest, tokens=100 * n) for n in range(MAX_PLACES + 5)]
    for _ in range(2):
        recovery.judge(Evidence.ACCUSES, rows, 0.0)
    due = [one.tokens for one in rows if recovery.is_due(one)]
    assert due == [100 * n for n in range(5, MAX_PLACES + 5)]


def test_who_has_come_past_its_crashes_is_on_probation_no_more_for_those_of_others() -> None:
    recovery = Blame()
    one, two, three = (Held(digest=Digest(name)) for name in (b"1", b"2", b"3"))
    for _ in range(2):
        recovery.judge(Evidence.ACCUSES, [one, two], 0.0)
    recovery.gained(Held(digest=one.digest, tokens=1), 0.0)
    assert recovery.gained(Held(digest=one.digest, tokens=PROBATION_TOKENS), PROBATION_S)
    recovery.judge(Evidence.ACCUSES, [two, three], 1.0)
    assert (recovery.suspects, recovery.on_probation) == (3, 2)


def test_tokens_that_come_at_once_prove_nothing_before_their_time() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    assert crash(driver) == [1]
    for _ in range(50):
        driver.token(1)
        assert driver.told(PauseRow) == []
    driver.pass_time(2 * PROBATION_S)
    driver.token(1)
    assert driver.told(PauseRow) == [PauseRow(key=RequestKey(1), keep=False)]


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
    assert driver.told(PauseRow) == []


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
    assert driver.failure_of("late").error["code"] == "quarantined"
