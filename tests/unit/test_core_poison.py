"""Test poison detection: suspects, probation, quarantine, out of memory; tests play the worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Failed
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat, PauseRow
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.poison import (
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
from support.core.scripts import play
from support.core.suspects import HOUR_S, SETTINGS, crash, engine_of, finish, gain, prove


def suspecting(driver: Driver, script: str) -> Driver:
    """Plays a script in which engines die and suspects prove themselves."""
    return play(driver, script, crash, finish, gain, prove, again)


def again(driver: Driver, *ids: str) -> None:
    """Requests with these bodies are there in a crash, and are cancelled then."""
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
    assert (crashes, driver.row()["suspects"], driver.row()["quarantined"]) == (3, 0, 1)
    failed = {id for (_, id), [end] in driver.terminals.items() if isinstance(end, Failed)}
    assert {id for id in failed if len(id) == 1} == {"e"}
    assert driver.failure_of("e").error.code == ErrorCode.QUARANTINED


@pytest.mark.parametrize("death", ["signal=SIGKILL", "signal=SIGTERM", "signal= code=72"])
def test_deaths_without_evidence_accuse_no_request(death: str) -> None:
    round_ = f"crash {death} -> returns=[1, 2] & suspects=0 & quarantined=0; token 1 2;"
    suspecting(engine_of(4), f"serve a b; {3 * round_}")


def test_deaths_asked_for_and_while_loading_accuse_no_request() -> None:
    suspecting(
        engine_of(2),
        "serve a; restart now=True; exit signal=SIGSEGV; spawned; exit signal=SIGSEGV;"
        " -> suspects=0",
    )


def test_cancelling_or_sending_again_does_not_clear_suspicion() -> None:
    suspecting(
        engine_of(4),
        "ask try1 body=poison; cancel try1; crash; ask try2 body=poison; cancel try2; crash;"
        " ask try3 body=poison -> alone=try3; cancel try3; crash;"
        " ask try4 body=poison -> errors={try4: quarantined}",
    )


def test_quarantine_lasts_an_hour_and_ends_all_that_send_the_same() -> None:
    driver = engine_of(1)
    driver.ask("one", body=b"poison")
    driver.ask("two", body=b"poison")
    driver.ask("paused", body=b"poison")
    driver.pause("paused")
    crash(driver)
    crash(driver)
    driver.ask("innocent", body=b"innocent")
    driver.exit(signal="SIGSEGV")
    assert driver.errors() == dict.fromkeys(("one", "two", "paused"), "quarantined")
    driver.come_up()
    assert driver.dispatched() == [4]
    driver.ask("three", body=b"poison")
    [failed] = driver.sent(Failed)
    assert failed.error.code == ErrorCode.QUARANTINED
    assert failed.error.detail == {"model": "m", "tokens_sent": 0, "lifted_in_s": HOUR_S}
    driver.now += HOUR_S - 1.0
    assert driver.row()["quarantined"] == 1
    driver.now += 1.0
    assert driver.row()["quarantined"] == 0, "the status of an idle model shows none that is over"
    driver.ask("four", body=b"poison")
    assert driver.errors() == {}


def test_quarantine_is_for_one_adapter() -> None:
    driver = engine_of(1, adapters={"sql": "/sql", "poet": "/poet"})
    driver.ask("one", "m:sql")
    for _ in range(3):
        crash(driver)
    driver.ask("same", "m:sql")
    assert driver.errors() == {"same": "quarantined"}
    driver.ask("other", "m:poet")
    driver.ask("model")
    assert driver.errors() == {}


def test_a_completion_clears_and_so_does_an_hour_and_a_cancel_does_not() -> None:
    suspecting(
        engine_of(2),
        "serve a b; crash; token 1 finish=cancelled -> suspects=2; finish 2 -> suspects=1;"
        f" now {HOUR_S}; serve c -> suspects=0",
    )


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
    assert driver.failure_of("p3").error.code == ErrorCode.WORKER_CRASHED
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
    assert driver.row()["quarantined"] == 1
    driver.load()
    assert driver.row()["quarantined"] == 0, "it begins anew"


def test_a_place_further_on_must_still_be_passed_after_an_earlier_crash() -> None:
    blame, digest = Blame(), Digest(b"d")
    for now, tokens in ((0.0, 200), (1.0, 10)):
        blame.judge(Evidence.ACCUSES, [Held(digest=digest, tokens=tokens)], now)
    past = Held(digest=digest, tokens=10 + PROBATION_TOKENS)
    assert [blame.gained(past, now) for now in (2.0, 3.0)] == [False, True]
    assert not blame.is_due(past)
    assert blame.is_due(Held(digest=digest, tokens=200))


def test_memory_of_suspects_and_quarantines_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxsup.supervisor.core.poison.MAX_SUSPECTS", 60)
    monkeypatch.setattr("mlxsup.supervisor.core.poison.MAX_QUARANTINED", 50)
    blame = Blame()
    many = [Digest(str(n).encode()) for n in range(70)]
    blame.judge(Evidence.ACCUSES, [Held(digest=digest) for digest in many], 0.0)
    assert len(blame.suspects) == 60
    for number, digest in enumerate(many):
        blame.completed(Digest(b"fine"))
        for _ in range(3):
            blame.judge(Evidence.ACCUSES, [Held(digest=digest)], float(number) / 1000)
    assert blame.quarantined == 50


# Out of memory


def test_out_of_memory_halves_the_rows() -> None:
    suspecting(
        engine_of(4),
        "serve a b c d; crash code=75 -> returns=[1, 2] & row_limit=2 & suspects=0;"
        " crash code=75 -> returns=[1]; crash code=75 -> returns=[1];"  # it tries once more
        " exit code=75 -> errors={a: insufficient_memory}; wait 10; up -> dispatched=[2];"
        f" now {HOUR_S}; finish 2 -> row_limit=4",
    )


@pytest.mark.parametrize("limit", ["rows", "probation"])
def test_who_waits_starts_an_hour_later_though_nothing_else_happens(limit: str) -> None:
    driver = engine_of(4)
    keys = driver.serve("a", "b", queue_timeout_s=0.0)
    if limit == "rows":
        crash(driver, code=75)
    else:
        crash(driver)
        crash(driver)
    end = driver.now + HOUR_S
    driver.is_checked = False
    while driver.now < end - 2.0:
        driver.beat(requests=1)
        driver.pass_time(2.0)
    assert list(driver.model().batch.running) == keys[:1]
    driver.pass_time(2.4)
    assert list(driver.model().batch.running) == keys


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


@pytest.mark.parametrize("at", [0, 9])
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
        running = list(driver.model().batch.running.values())
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


IN_TURNS = (
    "serve a b c d; crash; exit signal=SIGSEGV; wait 0.2; ask new; up -> dispatched=[5]; accept 5;"
)
"""Four suspects of two crashes; a request that came meanwhile starts at READY."""

TURNS: dict[str, tuple[int, str]] = {
    "a new request starts before the next turn and waits for the rest P25": (
        4,
        IN_TURNS + "ask newer -> dispatched=[]; gain 5 -> pauses=[5];"
        " row_left 5 -> dispatched=[1] & alone=a; prove 1 -> returns=[6]; accept 6; gain 6;"
        " row_left 6 -> dispatched=[2]; prove 2 -> returns=[3]; prove 3 -> returns=[4];"
        " gain 4; gain 4 -> dispatched=[]; gain 4 -> dispatched=[1, 2, 3];"  # no turn is due
        " finish 4 -> returns=[5]",
    ),
    "a new request that may not be resumed waits for all turns": (
        2,
        "serve a b; crash; exit signal=SIGSEGV; wait 0.2; ask new resume=False;"
        " up -> dispatched=[1]; prove 1 -> returns=[2]; prove 2 -> returns=[1];"
        " finish 2 -> returns=[3]",
    ),
    "an unload ends only requests that have not begun": (
        4,
        IN_TURNS + "gain 5; row_left 5 -> dispatched=[1];"
        " unload -> errors={b: unloaded, c: unloaded, d: unloaded};"
        " finish 1 -> returns=[5]; finish 5 -> STOPPING",
    ),
    "a suspect that comes again has its turn between others": (
        4,
        "again suspect; again suspect; serve plain; accept 3; ask suspect -> dispatched=[];"
        " token 3 -> pauses=[3]; row_left 3 -> dispatched=[4] & alone=suspect;"
        " finish 4 -> returns=[3]",
    ),
    "a turn is had alone, so that no other strike is taken for it": (
        4,
        "serve a b; crash; crash -> returns=[1]; ask poison; prove 1 -> returns=[3];"
        " crash -> returns=[2] & quarantined=0 & on_probation=1; prove 2 -> returns=[1, 3];"
        " crash -> returns=[1]; prove 1 -> returns=[2]; prove 2 -> returns=[3];"
        " exit signal=SIGSEGV -> errors={poison: quarantined}",
    ),
    "time proves nothing": (
        2,
        f"serve a b; crash; crash; token 1; now {HOUR_S / 2}; token 1 -> alone=a & dispatched=[]",
    ),
    "tokens that come at once prove nothing before their time": (
        2, "serve a b; crash; crash;" + 30 * "token 1 -> told=[];"
        + f"wait {2 * PROBATION_S}; token 1 -> pauses=[1]",
    ),
    "the time of a turn counts afresh in each life": (
        2, "serve a b; crash; crash; token 1; wait 1; crash SIGKILL -> returns=[1];"
        + PROBATION_TOKENS * "token 1 -> told=[];",
    ),
    "a late poison is found within three crashes of its own P10": (
        2,
        "serve late other; crash; crash -> returns=[1]; prove 1 -> returns=[2];"
        " prove 2 -> returns=[1]; token 1 2; crash -> returns=[1] & quarantined=0;"  # in company
        " prove 1 -> returns=[2]; prove 2 -> returns=[1]; crash -> alone=late; exit signal=SIGSEGV;"
        " -> errors={late: quarantined}",
    ),
    "a row is asked to leave once, and its cancel is answered once": (
        2,
        "serve a b; crash; crash; gain 1; gain 1; gain 1 -> pauses=[1];"
        " beat -> told=[]; ask new -> told=[]; token 1 -> told=[]; cancel new;"
        " cancel a -> done={a: cancelled}; row_left 1 -> dispatched=[2] & queued=0",
    ),
    "a crash at the end of a turn accuses its rows and convicts none": (
        2,
        "serve a b; crash; crash; gain 1; gain 1; gain 1 -> pauses=[1];"
        " crash -> returns=[1] & quarantined=0 & alone=a",
    ),
    "a turn that was cancelled lasts until its row has left": (
        2,
        "serve a b; crash; crash; cancel a -> dispatched=[]; ask new -> dispatched=[];"
        " row_left 1 -> dispatched=[3]",
    ),
    "who waits after its turn and may not be resumed ends with its worker": (
        2,
        "again a b; again a b; ask a resume=False; ask b; accept 5; prove 5 -> returns=[6];"
        " exit signal=SIGKILL -> errors={a: worker_crashed}",
    ),
    "who waits after its turn was started in time": (
        2,
        "again a b; again a b; ask a queue_timeout_s=5; ask b; accept 5; prove 5 -> returns=[6];"
        " wait 6 -> queued=1; prove 6 -> returns=[5]",
    ),
}  # fmt: skip
"""The rows of each engine, and its script: suspects take turns and prove themselves."""


@pytest.mark.parametrize("rule", TURNS)
def test_turns_of_suspects(rule: str) -> None:
    rows, script = TURNS[rule]
    suspecting(engine_of(rows), script)


def test_a_new_request_starts_before_the_next_turn_in_an_engine_of_one_row() -> None:
    driver = suspecting(
        engine_of(4),
        "serve a b c; crash; crash; ask n0; ask n1; ask n2; prove 1; crash signal= code=75;"
        " -> row_limit=1",
    )
    served = []
    for _ in range(4):
        [(key, request)] = driver.model().batch.running.items()
        served.append(request.id)
        for _ in range(PROBATION_TOKENS + 2):
            gain(driver, key)
            if driver.told(PauseRow):
                driver.row_left(key)
                break
    assert served == ["n0", "b", "n1", "c"]


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


# Turns and requests that may not resume


NEAR = (
    "serve long other;"
    + (APPROACH_TOKENS + 1) * "token 1;"
    + "crash; cancel other; row_left 2; crash;"
    " cancel long; row_left 1; serve long; serve stays resume=False; serve plain;"
    " accept 3; accept 4; accept 5; token 3 4 5 -> alone=None & pauses=[3];"
)  # fmt: skip
"""Suspect `long` (key 3) comes near its crash while `stays` (4) and `plain` (5) run."""

UNRESUMABLE = {
    "they delay only the turn and do not overlap": (
        "row_left 3 -> dispatched=[] & queued=1; serve next resume=False -> returns=[];"
        " serve new -> returns=[7]; token 4 5 7 -> told=[]; finish 4 -> pauses=[5, 7];"
        " row_left 5; row_left 7 -> dispatched=[3]; finish 3 -> returns=[5, 6, 7]"
    ),
    "they start while no turn is near": (
        "row_left 3; cancel long; serve long -> returns=[6] & on_probation=2;"
        " serve next resume=False -> returns=[7]"
    ),
    "a crash in company convicts no suspect": "crash -> quarantined=0 & on_probation=4",
}


@pytest.mark.parametrize("rule", UNRESUMABLE)
def test_turns_beside_requests_that_may_not_resume(rule: str) -> None:
    suspecting(engine_of(4), NEAR + UNRESUMABLE[rule])


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
