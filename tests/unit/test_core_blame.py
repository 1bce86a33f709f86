"""Evidence, suspects, quarantine, out of memory: who pays for a crash, and who does not (F10)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Event, Failed, Notice, Reply, StatusQuery, Subscribe
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import FinishReason, NoticeKind, State
from mlxsup.protocol.worker_messages import Dispatch, PauseRow
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.health.blame import (
    APPROACH_TOKENS,
    MAX_QUARANTINED,
    MAX_SUSPECTS,
    PROBATION_S,
    PROBATION_TOKENS,
    Blame,
    Digest,
    Evidence,
    Held,
    digest_of,
)
from mlxsup.supervisor.core.settings import RestartSettings

from support.core_driver import Driver, entry
from support.suspects import HOUR_S, SETTINGS, crash, engine_of, finish

ACCUSING = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")


# ---------------------------------------------------------------- rules 1 to 3


@pytest.mark.parametrize("signal", ACCUSING)
def test_poison_costs_three_crashes_and_nobody_else_fails_P10(signal: str) -> None:
    driver = engine_of(8)
    assert driver.serve(*"abcdefgh") == [1, 2, 3, 4, 5, 6, 7, 8]
    poison = 5
    assert crash(driver, signal) == [1, 2, 3, 4, 5, 6, 7, 8], "all resume together"
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
    failed = {id for (_, id), [end] in driver.terminals.items() if isinstance(end, Failed)}
    assert {id for id in failed if len(id) == 1} == {"e"}
    assert driver.failure_of("e").error["code"] == ErrorCode.QUARANTINED
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
    failed = {id for (_, id), [end] in driver.terminals.items() if isinstance(end, Failed)}
    assert failed == {"b", "c"}


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
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == ErrorCode.QUARANTINED
    assert failed.error["detail"] == {"model": "m", "tokens_sent": 0, "lifted_in_s": HOUR_S}
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
    model = driver.model()

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
    assert driver.failure_of("p3").error["code"] == ErrorCode.WORKER_CRASHED
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


# ---------------------------------------------------------------- who waits, who is notified


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
    assert driver.told(PauseRow) == [PauseRow(key=plain, keep=False)]
    driver.row_left(plain)
    assert driver.row()["alone"] == "suspect"
    [again] = driver.dispatched()
    assert finish(driver, again) == [plain]


def test_the_story_of_each_decision_is_told_in_events_and_in_the_status() -> None:
    driver = engine_of(2)
    driver.say(Subscribe(id=RequestId("s")))
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
    driver.say(StatusQuery(id=RequestId("q"), debug=True))
    [reply] = driver.sent(Reply)
    verdicts = [one["verdict"] for one in reply.value["flight"] if one["kind"] == "worker_died"]
    assert "quarantined" in verdicts[-1]


def test_digests_tell_models_and_bodies_apart_and_equal_requests_not() -> None:
    m, mx = ModelName("m"), ModelName("mx")
    assert digest_of(m, b"x") == digest_of(m, b"x")
    assert len({digest_of(m, b"x"), digest_of(m, b"y"), digest_of(mx, b"")}) == 3


def test_a_turn_is_due_from_some_way_before_the_place_of_a_crash() -> None:
    blame, place = Blame(), 100
    suspect, other = Digest(b"suspect"), Digest(b"other")
    blame.judge(Evidence.ACCUSES, [Held(digest=suspect, tokens=place), Held(digest=other)], 0.0)
    blame.judge(Evidence.ACCUSES, [Held(digest=other)], 1.0)
    due = [n for n in range(120) if blame.is_due(Held(digest=suspect, tokens=n))]
    assert due == list(range(place - APPROACH_TOKENS, 120))


def test_tokens_before_a_turn_is_due_do_not_shorten_it() -> None:
    blame, place = Blame(), 200
    suspect, other = Digest(b"suspect"), Digest(b"other")
    blame.judge(Evidence.ACCUSES, [Held(digest=suspect, tokens=place), Held(digest=other)], 0.0)
    blame.judge(Evidence.ACCUSES, [Held(digest=other)], 1.0)
    assert not blame.gained(Held(digest=suspect, tokens=1), 2.0), "far from the place"
    past = place + PROBATION_TOKENS
    assert not blame.gained(Held(digest=suspect, tokens=past), 3.0), "the first token there"
    assert not blame.gained(Held(digest=suspect, tokens=past), 3.0 + 0.9 * PROBATION_S)
    assert blame.gained(Held(digest=suspect, tokens=past), 3.0 + 1.1 * PROBATION_S)


def test_who_is_quarantined_is_not_told_of_an_interruption() -> None:
    driver = engine_of(2)
    [key] = driver.serve("poison", notices=True)
    driver.accept(key)
    told = []
    for _ in range(3):
        driver.exit(signal="SIGSEGV")
        told.append([notice.kind for notice in driver.sent(Notice)])
        if not driver.errors():
            driver.pass_time(0.2)
            driver.come_up()
    assert driver.errors() == {"poison": ErrorCode.QUARANTINED}
    assert [kinds.count(NoticeKind.INTERRUPTED) for kinds in told] == [1, 1, 0]


def test_who_was_accused_again_is_forgotten_last() -> None:
    blame, old = Blame(), Held(digest=Digest(b"old"))
    blame.judge(Evidence.ACCUSES, [old, Held(digest=Digest(b"older"))], 0.0)
    blame.judge(Evidence.ACCUSES, [old, Held(digest=Digest(b"other"))], 1.0)
    many = [Held(digest=Digest(b"%d" % n)) for n in range(MAX_SUSPECTS - 2)]
    blame.judge(Evidence.ACCUSES, many, 2.0)
    assert blame.suspects == MAX_SUSPECTS
    assert blame.is_suspect(old.digest)
    assert not blame.is_suspect(Digest(b"older"))


def test_memory_of_suspects_and_quarantines_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (MAX_SUSPECTS, MAX_QUARANTINED) == (4096, 4096)
    monkeypatch.setattr("mlxsup.supervisor.core.health.blame.MAX_SUSPECTS", 60)
    monkeypatch.setattr("mlxsup.supervisor.core.health.blame.MAX_QUARANTINED", 50)
    blame = Blame()
    many = [Digest(str(n).encode()) for n in range(70)]
    blame.judge(Evidence.ACCUSES, [Held(digest=digest) for digest in many], 0.0)
    assert blame.suspects == 60
    for number, digest in enumerate(many):
        blame.completed(Digest(b"fine"))
        for _ in range(3):
            blame.judge(Evidence.ACCUSES, [Held(digest=digest)], float(number) / 1000)
    assert blame.quarantined == 50


def test_a_dispatch_after_an_accusing_crash_resumes() -> None:
    driver = engine_of(2)
    driver.serve("a")
    driver.accept(1)
    driver.token(1)
    driver.exit(signal="SIGSEGV")
    driver.come_up()
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
