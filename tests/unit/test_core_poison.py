"""Test poison detection: suspects, probation, quarantine, out of memory; tests play the worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Failed
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat, PauseRow
from mlxsup.supervisor.core.events import Reloaded
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
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings, RestartSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.suspects import HOUR_S, SETTINGS, crash, engine_of, finish, gain, prove


def verdicts(driver: Driver) -> tuple[int, int]:
    """How many requests are suspects, and how many are quarantined."""
    return driver.row()["suspects"], driver.row()["quarantined"]


def sent_twice(driver: Driver, *ids: str) -> None:
    """Requests with these bodies are there in two crashes, and are cancelled each time."""
    for _ in range(2):
        keys = driver.serve(*ids)
        crash(driver)
        for id, key in zip(ids, keys, strict=True):
            driver.cancel(id)
            driver.row_left(key)


# Quarantine (P10)


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP"])
def test_poison_costs_three_crashes_and_no_other_request_P10(signal: str) -> None:
    driver = engine_of(8)
    keys = driver.serve(*"abcdefgh")
    poison = 5
    assert crash(driver, signal) == keys, "all resume together"
    assert driver.row()["suspects"] == 8
    running = crash(driver, signal)
    crashes = 2
    while running:
        [key] = running
        assert driver.row()["alone"] == "abcdefgh"[key - 1]
        if key == poison:
            crashes += 1
            running = crash(driver, signal)
        else:
            running = finish(driver, key)
    assert (crashes, verdicts(driver)) == (3, (0, 1))
    failed = {id for (_, id), [end] in driver.terminals.items() if isinstance(end, Failed)}
    assert {id for id in failed if len(id) == 1} == {"e"}
    assert driver.failure_of("e").error["code"] == ErrorCode.QUARANTINED


@pytest.mark.parametrize(("signal", "code"), [("SIGKILL", None), ("SIGTERM", None), ("", 72)])
def test_deaths_without_evidence_accuse_no_request(signal: str, code: int | None) -> None:
    driver = engine_of(4)
    driver.serve(*"abcd")
    for _ in range(5):
        assert crash(driver, signal, code) == [1, 2, 3, 4]
        driver.token(1, 2, 3, 4)
        assert verdicts(driver) == (0, 0)


def test_deaths_asked_for_and_while_loading_accuse_no_request() -> None:
    driver = engine_of(2)
    driver.serve("a")
    driver.restart(now=True)
    driver.exit(signal="SIGSEGV")
    driver.spawned()
    driver.exit(signal="SIGSEGV")
    assert driver.row()["suspects"] == 0


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


def test_quarantine_lasts_an_hour_and_ends_all_that_send_the_same() -> None:
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
    driver.now += HOUR_S - 1.0
    assert driver.row()["quarantined"] == 1
    driver.now += 1.0
    assert driver.row()["quarantined"] == 0, "the status of an idle model shows none that is over"
    driver.ask("four", body=b"poison")
    assert driver.errors() == {}


def test_a_completion_clears_and_so_does_an_hour_and_a_cancel_does_not() -> None:
    driver = engine_of(2)
    driver.serve("a", "b")
    crash(driver)
    driver.token(1, finish=FinishReason.CANCELLED)
    assert driver.row()["suspects"] == 2
    finish(driver, 2)
    assert driver.row()["suspects"] == 1
    driver.now += HOUR_S
    driver.serve("c")
    assert driver.row()["suspects"] == 0


@pytest.mark.parametrize("how", ["the same entry", "another entry", "restart"])
def test_restart_and_a_changed_entry_lift_a_quarantine(how: str) -> None:
    driver = engine_of(2)
    driver.serve("p")
    for _ in range(3):
        crash(driver)
    if how == "restart":
        driver.restart()
    else:
        same = driver.model().life.settings
        changed = replace(same, idle_unload_s=999.0) if how == "another entry" else same
        driver.do(Reloaded(now=driver.now, settings=SETTINGS, models=(changed,)))
    assert driver.row()["quarantined"] == (1 if how == "the same entry" else 0)


@pytest.mark.parametrize("between", ["nothing", "a completion", "a restart"])
def test_a_third_quarantine_in_a_row_means_that_the_engine_is_broken(between: str) -> None:
    driver = engine_of(2)
    for number in range(1, 4):
        driver.accept(driver.serve(f"p{number}")[0])
        crash(driver)
        crash(driver)
        driver.exit(signal="SIGSEGV")
        if driver.state() is not State.FAILED:
            driver.come_up()
        if number == 2 and between == "a restart":
            driver.restart(now=True)
            driver.exit(code=0)
            driver.come_up()
        elif number == 2 and between == "a completion":
            finish(driver, driver.serve("fine")[0])
    if between != "nothing":
        assert driver.state() is State.READY
        return
    assert driver.state() is State.FAILED
    assert "the engine is broken" in driver.row()["cause"]
    assert driver.row()["quarantined"] == 0
    assert driver.failure_of("p3").error["code"] == ErrorCode.WORKER_CRASHED
    driver.load()
    driver.come_up()
    assert driver.serve("p1") != [], "all three are lifted"


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


def test_memory_of_suspects_and_quarantines_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
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


# Out of memory


def test_out_of_memory_halves_the_rows() -> None:
    driver = engine_of(4)
    driver.serve(*"abcd")
    assert crash(driver, code=75) == [1, 2]
    assert (driver.row()["row_limit"], driver.row()["suspects"]) == (2, 0)
    assert crash(driver, code=75) == [1]
    assert crash(driver, code=75) == [1], "it tries once more"
    driver.exit(code=75)
    assert driver.errors() == {"a": ErrorCode.INSUFFICIENT_MEMORY}
    driver.pass_time(10.0)
    driver.come_up()
    assert driver.dispatched() == [2]
    driver.now += HOUR_S
    finish(driver, 2)
    assert driver.row()["row_limit"] == 4


@pytest.mark.parametrize(
    ("limit_bytes", "footprint_bytes", "machine_bytes", "rows"),
    [
        pytest.param(1000, 1001, 10_000, [1], id="over the limit of the launch"),
        pytest.param(1000, 1000, 10_000, [1, 2], id="at the limit"),
        pytest.param(None, 901, 1000, [1], id="over nine tenths of the machine"),
        pytest.param(None, 900, 1000, [1, 2], id="at nine tenths"),
    ],
)
def test_a_kill_over_the_memory_limit_is_taken_for_out_of_memory(
    limit_bytes: int | None, footprint_bytes: int, machine_bytes: int, rows: list[int]
) -> None:
    driver = engine_of(4, memory_limit_bytes=limit_bytes)
    driver.serve("a", "b")
    driver.sample(footprint_bytes, machine_bytes=machine_bytes)
    assert crash(driver, "SIGKILL") == rows
    assert driver.row()["row_limit"] == (4 if len(rows) == 2 else 1)


def test_what_a_worker_reports_counts_against_the_limit_too() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    beat = Heartbeat(step=1, phase=WorkerPhase.DECODE, phase_s=0.0, active_bytes=2000)
    driver.worker(beat)
    assert crash(driver, "SIGKILL") == [1]


def test_samples_of_an_earlier_process_do_not_count() -> None:
    driver = engine_of(4, memory_limit_bytes=1000)
    driver.serve("a", "b")
    before = driver.row()["pid"]
    driver.sample(1001)
    assert driver.row()["footprint_bytes"] == 1001
    driver.exit(signal="SIGTERM")
    driver.sample(1001, pid=before)
    assert driver.row()["footprint_bytes"] == 0
    driver.come_up(pid=before + 1)
    driver.sample(1001, pid=before)
    assert crash(driver, "SIGKILL") == [1, 2], "no kill for memory"


# Probation (P25)


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


@pytest.mark.parametrize("at", [0, 20])
def test_a_poison_that_is_sent_again_after_each_failure_costs_three_crashes_P10(at: int) -> None:
    """It strikes after so many tokens, while others run."""
    driver = engine_of(8)
    driver.serve(*"abcde")
    sends, crashes, is_open = 0, 0, False
    while crashes < 4:
        if not is_open:
            sends += 1
            driver.ask(f"poison{sends}", body=b"poison", resume=False)
            if driver.errors():
                break
            is_open = True
        running = list(driver.model().running.values())
        for request in running:
            if request.acceptance is None:
                driver.accept(request.key)
        if any(r.id.startswith("poison") and r.tokens_sent == at for r in running):
            crashes += 1
            is_open = False
            crash(driver)
            continue
        for request in running:
            gain(driver, request.key)
            for told in driver.told(PauseRow):
                driver.row_left(told.key)
    assert (sends, crashes) == (4, 3)
    assert driver.errors() == {"poison4": ErrorCode.QUARANTINED}
    assert driver.state() is State.READY
    assert all((b"alice", id) not in driver.terminals for id in "abcde")


def in_turns_with_a_newcomer() -> Driver:
    """Four suspects of two crashes, and a request that came while the model was loaded again."""
    driver = engine_of(4)
    driver.serve(*"abcd")
    crash(driver)
    driver.exit(signal="SIGSEGV")
    driver.pass_time(0.2)
    driver.ask("new", body=b"new")
    driver.come_up()
    assert driver.dispatched() == [5], "it came while the model loaded, and starts at READY"
    driver.accept(5)
    return driver


def test_a_new_request_starts_before_the_next_turn_and_waits_for_the_rest_P25() -> None:
    driver = in_turns_with_a_newcomer()
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


def test_a_new_request_starts_before_the_next_turn_in_an_engine_of_one_row() -> None:
    driver = engine_of(4)
    driver.serve("a", "b", "c")
    crash(driver)
    crash(driver)
    for number in range(6):
        driver.ask(f"n{number}", body=f"n{number}".encode())
    prove(driver, 1)
    crash(driver, signal="", code=75)
    assert driver.row()["row_limit"] == 1
    served = []
    for _ in range(4):
        [(key, request)] = driver.model().running.items()
        served.append(request.id)
        for _ in range(PROBATION_TOKENS + 2):
            gain(driver, key)
            if driver.told(PauseRow):
                driver.row_left(key)
                break
    assert served == ["n0", "b", "n1", "c"]


def test_unload_during_probation_ends_only_unbegun_requests() -> None:
    driver = in_turns_with_a_newcomer()
    gain(driver, 5)
    driver.row_left(5)
    assert driver.dispatched() == [1]
    driver.unload()
    assert driver.errors() == dict.fromkeys("bcd", ErrorCode.UNLOADED)
    assert finish(driver, 1) == [5], "the worker lives, and the answer had begun"
    finish(driver, 5)
    assert driver.state() is State.STOPPING


def test_a_suspect_that_comes_again_has_its_turn_between_others() -> None:
    driver = engine_of(4)
    sent_twice(driver, "suspect")
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


def test_a_turn_is_had_alone_so_that_no_other_strike_is_taken_for_it() -> None:
    driver = engine_of(4)
    driver.serve("a", "b")
    crash(driver)
    assert crash(driver) == [1]
    driver.ask("poison", body=b"poison")
    assert prove(driver, 1) == [3]
    assert crash(driver) == [2], "it struck for the first time, and it was alone"
    assert (driver.row()["quarantined"], driver.row()["on_probation"]) == (0, 1)
    assert prove(driver, 2) == [1, 3]
    assert crash(driver) == [1]
    assert prove(driver, 1) == [2]
    assert prove(driver, 2) == [3]
    driver.exit(signal="SIGSEGV")
    assert driver.errors() == {"poison": ErrorCode.QUARANTINED}


def test_a_turn_takes_tokens_near_the_place_of_its_crash_and_time() -> None:
    blame, place = Blame(), 200
    suspect, other = Digest(b"suspect"), Digest(b"other")
    blame.judge(Evidence.ACCUSES, [Held(digest=suspect, tokens=place), Held(digest=other)], 0.0)
    blame.judge(Evidence.ACCUSES, [Held(digest=other)], 1.0)
    assert not blame.gained(Held(digest=suspect, tokens=1), 2.0), "far from the place"
    past = place + PROBATION_TOKENS
    assert not blame.gained(Held(digest=suspect, tokens=past), 3.0), "the first token there"
    assert not blame.gained(Held(digest=suspect, tokens=past), 3.0 + 0.9 * PROBATION_S)
    assert blame.gained(Held(digest=suspect, tokens=past), 3.0 + 1.1 * PROBATION_S)


def test_the_places_of_a_suspect_are_bounded() -> None:
    blame, digest = Blame(), Digest(b"d")
    rows = [Held(digest=digest, tokens=100 * n) for n in range(MAX_PLACES + 5)]
    for _ in range(2):
        blame.judge(Evidence.ACCUSES, rows, 0.0)
    due = [one.tokens for one in rows if blame.is_due(one)]
    assert due == [100 * n for n in range(5, MAX_PLACES + 5)]


def turn() -> Driver:
    """Suspect `a` (key 1) has its turn; `b` (2) has the next one."""
    driver = engine_of(2)
    for key in driver.serve("a", "b"):
        driver.accept(key)
    crash(driver)
    assert crash(driver) == [1]
    return driver


def test_neither_time_nor_tokens_prove_anything_alone() -> None:
    driver = turn()
    driver.token(1)
    driver.now += HOUR_S / 2
    driver.token(1)
    assert (driver.row()["alone"], driver.dispatched()) == ("a", [])
    driver = turn()
    for _ in range(50):
        driver.token(1)
        assert driver.told(PauseRow) == []
    driver.pass_time(2 * PROBATION_S)
    driver.token(1)
    assert driver.told(PauseRow) == [PauseRow(key=RequestKey(1), keep=False)]


def test_the_time_of_a_turn_counts_afresh_in_each_life() -> None:
    driver = turn()
    driver.token(1)
    driver.pass_time(1.0)
    assert crash(driver, "SIGKILL") == [1]
    for _ in range(PROBATION_TOKENS):
        driver.token(1)
        assert driver.told(PauseRow) == []


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
    driver = turn()
    assert prove(driver, 1) == [2]
    assert prove(driver, 2) == [1]
    driver.token(1, 2)
    assert crash(driver) == [1], "in company: none is convicted, and all take turns again"
    assert driver.row()["quarantined"] == 0
    assert prove(driver, 1) == [2]
    assert prove(driver, 2) == [1]
    crash(driver)
    assert driver.row()["alone"] == "a"
    crash(driver)
    assert driver.failure_of("a").error["code"] == "quarantined"


# The end of a turn


def ending_turn() -> Driver:
    """`a` has come past the crash, and its row has been asked to leave."""
    driver = turn()
    for _ in range(PROBATION_TOKENS):
        gain(driver, 1)
    assert driver.told(PauseRow) == [PauseRow(key=RequestKey(1), keep=False)]
    return driver


def test_a_row_is_asked_to_leave_once_and_a_cancel_is_answered_once() -> None:
    driver = ending_turn()
    for event in (driver.beat, lambda: driver.ask("new"), lambda: driver.token(1)):
        event()
        assert driver.told(PauseRow) == []
    driver.cancel("new")
    driver.cancel("a")
    assert driver.result_of("a").finish_reason is FinishReason.CANCELLED
    driver.row_left(1)
    assert (driver.dispatched(), driver.row()["queued"]) == ([2], 0)


def test_a_crash_at_the_end_of_a_turn_accuses_its_rows_and_convicts_none() -> None:
    driver = ending_turn()
    assert crash(driver) == [1]
    assert driver.row()["quarantined"] == 0
    assert driver.row()["alone"] == "a", "it has to come past this crash as well"


def test_a_turn_that_was_cancelled_lasts_until_its_row_has_left() -> None:
    driver = turn()
    driver.cancel("a")
    assert driver.dispatched() == [], "the engine may still die of it"
    driver.ask("new", body=b"new")
    assert driver.dispatched() == []
    driver.row_left(1)
    assert driver.dispatched() == [3]


@pytest.mark.parametrize("limit", ["resume", "queue_timeout_s"])
def test_a_suspect_that_waits_after_its_turn_had_begun(limit: str) -> None:
    driver = engine_of(2)
    sent_twice(driver, "a", "b")
    driver.ask("a", body=b"a", resume=limit != "resume", queue_timeout_s=5.0)
    driver.ask("b", body=b"b")
    driver.accept(5)
    assert prove(driver, 5) == [6], "it may be asked to leave, because a crash accuses it"
    if limit == "resume":
        driver.exit(signal="SIGKILL")
        assert driver.errors() == {"a": ErrorCode.WORKER_CRASHED}
    else:
        driver.pass_time(6.0)
        assert driver.row()["queued"] == 1, "it was started in time"
        assert prove(driver, 6) == [5]


# Turns and requests that may not resume


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
    assert [told.key for told in driver.told(PauseRow)] == [3]
    assert driver.row()["alone"] is None, "others run, too, until its row has left"
    return driver


def test_unresumable_rows_delay_only_the_turn_and_do_not_overlap() -> None:
    driver = waits_for_a_row_that_may_not_be_resumed()
    driver.row_left(3)
    assert (driver.dispatched(), driver.row()["queued"]) == ([], 1)
    assert driver.serve("next", resume=False) == [], "a turn is due, and 6 would hold it up again"
    assert driver.serve("new") == [7]
    driver.token(4, 5, 7)
    assert driver.told(PauseRow) == []
    finish(driver, 4)
    assert [told.key for told in driver.told(PauseRow)] == [5, 7]
    for key in (5, 7):
        driver.row_left(key)
    assert driver.dispatched() == [3]
    assert finish(driver, 3) == [5, 6, 7], "no turn is due any longer"


def test_unresumable_request_starts_while_no_turn_is_near() -> None:
    driver = waits_for_a_row_that_may_not_be_resumed()
    driver.row_left(3)
    driver.cancel("long")
    assert driver.serve("long") == [6]
    assert driver.row()["on_probation"] == 2
    assert driver.serve("next", resume=False) == [7]


def test_crash_in_company_convicts_no_suspect() -> None:
    driver = waits_for_a_row_that_may_not_be_resumed()
    crash(driver)
    assert (driver.row()["quarantined"], driver.row()["on_probation"]) == (0, 4)


def test_a_limit_that_a_client_reaches_elsewhere_calls_its_suspects_turn_off() -> None:
    clients = {"ann": ClientSettings(max_running=1), "bob": ClientSettings()}
    limits = CoreSettings(max_queue=99, max_queue_per_client=9, clients=clients)
    launch = replace(LAUNCH, max_concurrency=4)
    restart = RestartSettings(backoff_initial_s=0.1, backoff_max_s=0.1)
    driver = Driver([entry(name, launch=launch, restart=restart) for name in ("m", "n")], limits)
    for name in ("m", "n"):
        driver.load(name)
        driver.come_up(name)
    [suspect] = driver.serve("suspect", client="ann")
    driver.accept(suspect)
    driver.exit(signal="SIGSEGV")
    driver.come_up()
    driver.accept(suspect)
    driver.exit(signal="SIGSEGV")
    driver.pass_time(0.2)  # of its back-off
    [first] = driver.serve("first", model="n", client="ann")
    driver.come_up()
    assert driver.dispatched() == [], "its client may run one request, which runs elsewhere"
    assert driver.row()["on_probation"] == 1
    assert driver.serve("new", client="bob") == [3]
    driver.accept(first, "n")
    driver.token(first, model="n", finish=FinishReason.STOP)
    assert driver.serve("waits", client="bob", resume=False) == [], "the turn is due"
    assert driver.row()["running"] == ["new"]
    driver.serve("second", model="n", client="ann")
    assert driver.row("n")["running"] == ["second"]
    assert driver.row()["running"] == ["new", "waits"]
