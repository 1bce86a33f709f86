"""Test the watchdog: stalls, silence, lost connections and requests; the tests play the worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.clock import PULSE_S
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import Generation, ModelName, RequestKey
from mlxsup.protocol.states import HAS_PROCESS, FinishReason, LoadPhase, State, WorkerPhase
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    WORKER_TO_SUPERVISOR,
    Acceptance,
    Accepted,
    Dying,
    Heartbeat,
    Hello,
    LoadProgress,
    PrefillProgress,
    RankState,
    Ready,
    Rejected,
    Rendered,
    RowDelta,
    Step,
    WorkerMessage,
)
from mlxsup.supervisor.core.actions import LookAtWorker, WorkerSignal
from mlxsup.supervisor.core.watchdog import (
    PREDICTIONS,
    SILENCE_S,
    SLACK_S,
    UNLINKED_S,
    Alarm,
    Watch,
)

from support.core.driver import LAUNCH, Driver, entry
from support.core.scripts import play
from support.core.states import WITH_PROCESS, in_state

LIMIT_S = 10.0


def serving(step_timeout_s: float = LIMIT_S) -> Driver:
    """A READY model that runs one request, its first beat just heard."""
    driver = Driver([entry(launch=replace(LAUNCH, step_timeout_s=step_timeout_s))])
    driver.load()
    driver.come_up()
    driver.ask()
    driver.accept(1)
    driver.beat(WorkerPhase.IDLE)
    return driver


def seen_running(driver: Driver) -> list[WorkerSignal]:
    """Answers a look at the process, if there was one: it is not stopped."""
    if driver.of(LookAtWorker):
        driver.seen(is_stopped=False)
    return driver.signals()


def beats(driver: Driver, seconds: int, **beat: Any) -> list[WorkerSignal]:
    """A beat each second that says the same; returns the signals sent meanwhile."""
    signals = []
    phase_s = float(beat.pop("phase_s", 0.0))
    for _ in range(seconds):
        driver.pass_time(1.0)
        signals += seen_running(driver)
        if driver.state() is not State.READY:
            break
        phase_s += 1.0
        driver.beat(phase_s=phase_s, **beat)
        signals += seen_running(driver)
    return signals


def silence(driver: Driver, most_s: float, *, is_stopped: bool = False) -> int:
    """No beat comes until the process is ended, in time; returns how often it was looked at."""
    start, state, looks = driver.now, driver.state(), 0
    while driver.state() is state:
        driver.pass_time(0.25)
        if driver.of(LookAtWorker):
            looks += 1
            driver.seen(is_stopped=is_stopped)
        assert driver.now - start <= most_s
    return looks


def last_exit(driver: Driver) -> tuple[str, int]:
    """Why the process ended at last, and how many requests are suspects since."""
    driver.exit()
    return driver.row()["last_exit"]["reason"], driver.row()["suspects"]


# Signs of life of one process

WORKS = (WorkerPhase.PREFILL, WorkerPhase.DECODE, WorkerPhase.ROWS, WorkerPhase.CLOSING)


def beat(
    phase: WorkerPhase,
    *,
    phase_s: float = 0.0,
    step: int = 0,
    predicted_s: float = 0.0,
    preparing: int = 0,
    sent: int = 0,
) -> Heartbeat:
    return Heartbeat(
        step=step,
        phase=phase,
        phase_s=phase_s,
        predicted_s=predicted_s,
        requests=1,
        preparing=preparing,
        sent=sent,
    )


def test_stopped_needs_two_looks_without_a_sign_between() -> None:
    watch = Watch.over(0.0)
    watch.looked(is_stopped=True, now=3.0)
    assert (watch.silence.is_stopped, watch.judge(3.0, None, 0)) == (False, Alarm.LOOK)
    watch.looked(is_stopped=False, now=4.0)
    watch.looked(is_stopped=True, now=5.0)
    assert watch.judge(5.0, None, 0) is Alarm.LOOK
    watch.said(5.5)
    watch.looked(is_stopped=True, now=9.0)
    assert not watch.silence.is_stopped
    watch.looked(is_stopped=True, now=10.0)
    assert watch.judge(10.0, None, 0) is Alarm.STOPPED
    assert watch.judge(10.0, LIMIT_S, 1) is Alarm.STOPPED
    watch.looked(is_stopped=False, now=11.0)
    assert watch.judge(11.0, None, 0) is not Alarm.STOPPED
    watch.looked(is_stopped=True, now=12.0)
    watch.looked(is_stopped=True, now=13.0)
    watch.beat(beat(WorkerPhase.IDLE), 0, 13.5)
    assert watch.judge(13.5, None, 0) is Alarm.NONE


@pytest.mark.parametrize("phase", WORKS)
def test_work_is_stuck_after_its_limit_and_four_predictions(phase: WorkerPhase) -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(phase, phase_s=0.5, predicted_s=2.0), 1, 20.0)
    assert watch.stuck_at(LIMIT_S) == 19.5 + LIMIT_S + 4 * 2.0
    watch.looked(is_stopped=False, now=37.4)
    assert watch.judge(37.4, LIMIT_S, 1) is not Alarm.STUCK
    assert watch.judge(37.5, LIMIT_S, 1) is Alarm.STUCK


def test_step_that_does_not_end_names_the_ranks_that_are_behind() -> None:
    watch = Watch.over(0.0)
    ranks = [
        RankState(rank=1, name="rank 1 (near)"),
        RankState(rank=2, name="rank 2 (far)", is_behind=True),
    ]
    watch.beat(replace(beat(WorkerPhase.DECODE, phase_s=5.0), ranks=ranks), 1, 20.0)
    said = "step 1 (decode) did not end in 5.0 s; it waits for rank 2 (far)"
    assert watch.describe(20.0) == said


def test_step_begins_at_its_first_beat() -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(WorkerPhase.DECODE, step=1, phase_s=2.0), 1, 10.0)
    assert watch.stuck_at(LIMIT_S) == 18.0
    watch.beat(beat(WorkerPhase.DECODE, step=1, phase_s=9.0), 1, 11.0)
    assert watch.stuck_at(LIMIT_S) == 18.0, "no earlier than it was"
    watch.beat(beat(WorkerPhase.DECODE, step=1, phase_s=0.5), 1, 12.0)
    assert watch.stuck_at(LIMIT_S) == 21.5, "it has advanced since"
    watch.beat(beat(WorkerPhase.DECODE, step=1, phase_s=-7.0), 1, 13.0)
    assert watch.stuck_at(LIMIT_S) == 23.0, "it cannot begin in the future"
    watch.beat(beat(WorkerPhase.DECODE, step=1, predicted_s=-7.0), 1, 14.0)
    assert watch.stuck_at(LIMIT_S) == 24.0
    watch.beat(beat(WorkerPhase.DECODE, step=2, phase_s=9.0), 1, 15.0)
    assert watch.stuck_at(LIMIT_S) == 24.0, "another step: after the last sign of the one before"
    watch.beat(beat(WorkerPhase.PREFILL, step=2, phase_s=9.0), 1, 16.0)
    assert watch.stuck_at(LIMIT_S) == 25.0, "another phase: so too"


def test_silence_beyond_the_limit_of_a_step_is_stuck_if_the_process_was_seen_to_run() -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(WorkerPhase.IDLE, predicted_s=2.0), 0, 1.0)
    assert watch.silent_at(LIMIT_S) == 1.0 + LIMIT_S + 8.0 + 0.75
    watch.looked(is_stopped=False, now=19.25)
    assert watch.judge(19.65, LIMIT_S, 0) is Alarm.LOOK
    assert watch.judge(19.75, LIMIT_S, 0) is Alarm.STUCK
    assert watch.judge(20.15, LIMIT_S, 0) is Alarm.STUCK
    assert watch.judge(20.25, LIMIT_S, 0) is Alarm.NONE, "seen a second ago; asked 0.6 s ago"
    assert watch.judge(20.65, LIMIT_S, 0) is Alarm.LOOK
    short = Watch.over(0.0)
    assert short.silent_at(1.75) == 2.5
    assert short.silent_at(2.0) == 2.75


@pytest.mark.parametrize("has_beats", [False, True])
@pytest.mark.parametrize("predicted_s", [0.0, 0.3])
@pytest.mark.parametrize("limit_s", [0.1, 1.7, 2.4, 10.0])
def test_deadline_finds_a_stuck_step_in_time_P6(
    limit_s: float, predicted_s: float, has_beats: bool
) -> None:
    """Not only after the next look: a step may be due between two of them."""
    assert PULSE_S < SLACK_S < 1.0
    watch = Watch.over(0.0)
    watch.beat(beat(WorkerPhase.DECODE, predicted_s=predicted_s), 1, 0.0)
    if not has_beats:
        watch.stepped(0, 0.0)
    now, asked = 0.0, 0
    while (alarm := watch.judge(now, limit_s, 1)) is not Alarm.STUCK:
        asked += 1
        assert asked < 100, "it asks in vain"
        if alarm is Alarm.LOOK:
            watch.looked(is_stopped=False, now=now)
            continue
        now = watch.deadline(limit_s)
    limit_s += PREDICTIONS * predicted_s
    assert now == (limit_s if has_beats else max(limit_s + SLACK_S, SILENCE_S))


def test_deadline_is_the_first_of_both_limits() -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(WorkerPhase.DECODE), 1, 1.0)
    assert watch.deadline(LIMIT_S) == 3.5
    assert watch.deadline(0.5) == 1.5
    assert watch.judge(2.0, 0.5, 1) is Alarm.LOOK
    assert watch.deadline(0.5) == 3.5, "it was due before, and the process is being looked at"
    assert watch.judge(4.0, LIMIT_S, 1) is Alarm.LOOK
    assert watch.deadline(LIMIT_S) == 5.0
    assert watch.deadline(3.5) == 5.0
    assert watch.deadline(4.0) == 5.0


def counted(watch: Watch, requests: int, given: int, now: float) -> None:
    """A beat that counts when nothing is under way."""
    message = Heartbeat(
        step=0, phase=WorkerPhase.IDLE, phase_s=0.0, requests=requests, sent=watch.heard,
        received=watch.told,
    )  # fmt: skip
    watch.beat(message, given, now)


def test_requests_that_a_worker_no_longer_holds_are_lost() -> None:
    watch = Watch.over(0.0)
    watch.was_told(0.0)
    watch.said(0.5)
    assert (watch.told, watch.heard) == (1, 1)
    counted(watch, requests=1, given=3, now=1.0)
    assert (watch.lost, watch.judge(1.0, LIMIT_S, 3)) == (2, Alarm.BROKEN)
    assert watch.describe(1.0) == "it has lost 2 of its requests"
    assert watch.judge(1.0, LIMIT_S, 0) is Alarm.NONE, "those were answered since"
    assert watch.judge(1.0, None, 3) is Alarm.NONE, "it loads"
    counted(watch, requests=5, given=3, now=2.0)
    assert (watch.lost, watch.judge(2.0, LIMIT_S, 3)) == (0, Alarm.NONE)


@pytest.mark.parametrize(("sent", "received"), [(0, 1), (1, 0), (0, 0), (2, 1), (1, 2)])
def test_nothing_is_lost_while_anything_may_be_under_way(sent: int, received: int) -> None:
    watch = Watch.over(0.0)
    watch.was_told(0.0)
    watch.said(0.5)
    counted(watch, requests=0, given=3, now=1.0)
    assert watch.lost == 3
    message = Heartbeat(
        step=0, phase=WorkerPhase.IDLE, phase_s=0.0, requests=0, sent=sent, received=received
    )
    watch.beat(message, 3, 1.5)
    assert watch.lost == 0


# Waiting for a prefill slot


def waits(phase_s: float = 0.0, *, step: int = 0) -> Heartbeat:
    return beat(WorkerPhase.WAITING, phase_s=phase_s, step=step)


def waiting(now: float = 100.0) -> Watch:
    """A worker that has asked, and says that it waits."""
    watch = Watch.over(now)
    watch.said(now)
    watch.asked_for_lease()
    watch.beat(waits(), 1, now)
    return watch


def judged(watch: Watch, now: float) -> Alarm:
    """The verdict, after a look at the process has seen it run."""
    verdict = watch.judge(now, LIMIT_S, 1)
    if verdict is Alarm.LOOK:
        watch.looked(is_stopped=False, now=now)
        verdict = watch.judge(now, LIMIT_S, 1)
    return verdict


def test_the_limit_of_a_step_counts_from_the_lease() -> None:
    watch = waiting()
    for second in range(1, 51):
        watch.beat(waits(float(second)), 1, 100.0 + second)
        assert judged(watch, 100.0 + second) is Alarm.NONE, "waiting has no limit"
    watch.got_lease(150.0)
    watch.beat(waits(59.9), 1, 159.9)
    assert watch.stuck_at(LIMIT_S) is None
    assert judged(watch, 159.9) is Alarm.NONE
    assert judged(watch, 162.3) is Alarm.NONE, "it may have begun since"
    watch.beat(waits(60.0), 1, 160.0)
    assert watch.stuck_at(LIMIT_S) == 160.0
    assert judged(watch, 160.0) is Alarm.STUCK
    said = "it waits for a lease, and nothing has kept it from reading for 10.0 s"
    assert watch.describe(160.0) == said


def test_a_later_wait_and_a_step_with_a_lease_count_from_their_own_beginning() -> None:
    watch = waiting()
    watch.got_lease(101.0)
    watch.said(103.0)
    watch.stepped(1, 103.0)
    assert watch.stuck_at(LIMIT_S) is None, "its step has ended"
    watch.beat(waits(step=1), 1, 104.0)
    watch.beat(waits(10.0, step=1), 1, 114.0)
    assert watch.stuck_at(LIMIT_S) == 114.0
    watch = waiting()
    watch.got_lease(150.0)
    watch.beat(beat(WorkerPhase.PREFILL, phase_s=1.0, predicted_s=2.0), 1, 155.0)
    assert watch.stuck_at(LIMIT_S) == pytest.approx(154.0 + LIMIT_S + 4 * 2.0)


# Stalls


@pytest.mark.parametrize("phase", WORKS)
def test_work_that_does_not_end_is_found_dumped_and_killed_F5_P6_P23(phase: WorkerPhase) -> None:
    driver = serving()
    start = driver.now
    assert beats(driver, 9, phase=phase) == []
    assert beats(driver, 3, phase=phase, phase_s=9.0)[:1] == [WorkerSignal.DUMP]
    assert driver.now - start <= LIMIT_S + 1.0
    driver.pass_time(0.6)
    assert driver.signals() == [WorkerSignal.KILL]
    assert last_exit(driver) == ("stall", 1), "our own kill accuses"
    assert "did not end" in driver.row()["last_exit"]["detail"]
    driver.come_up()
    assert driver.dispatched() == [1]


def stepped(driver: Driver, step: int) -> None:
    driver.worker(Step(step=step))


GIB = 2**30
SIGNS: dict[str, tuple[float, str]] = {
    "a predicted long step is given four times its prediction P7": (
        LIMIT_S,
        "beats 49 phase=prefill predicted_s=10 -> returns=[] & READY;"
        " beats 3 phase=prefill predicted_s=10 -> STOPPING",
    ),
    "long honest work in many steps is never killed P7": (
        LIMIT_S,
        "".join(f"beats 9 phase=prefill step={n}; stepped {n + 1} -> READY;" for n in range(8)),
    ),
    "a stale beat does not make the next step look long": (
        LIMIT_S,
        "beats 9 phase=decode; stepped 1; beat decode step=0 phase_s=9.5; wait 2;"
        " beat idle step=1; beats 7 phase=idle step=1 -> returns=[] & READY",
    ),
    "a pause of the whole machine makes no step long P7": (
        LIMIT_S,
        "wait 1; beat decode step=1 phase_s=61 -> READY;"
        " beats 8 phase=decode step=1 phase_s=61 -> returns=[]",
    ),
    "silence with the interpreter held is found F6 P6": (
        LIMIT_S, "beat decode; silence 12.5 -> signals=[DUMP]; exit -> suspects=1",
    ),
    "a process that is stopped after a beat is not accused F7": (
        1.0, "wait 1; beat decode; silence 6 is_stopped=True -> signals=[KILL]; exit -> suspects=0",
    ),
    "a late beat kills no worker P5 P7": (
        60.0, 12 * "wait 4.5; seen is_stopped=False; beat idle -> READY;",
    ),
    "a look counts only without a sign before the next": (
        LIMIT_S, 2 * "wait 3.1; seen is_stopped=True; beat -> READY;",
    ),
    "a silent worker is looked at before it is killed": (
        LIMIT_S, "beat; wait 300 -> READY; seen is_stopped=False -> STOPPING",
    ),
    "a beat during the look ends the suspicion of growth P7": (
        30.0,
        f"sample {10 * GIB}; wait 2; sample {20 * GIB}; beat prefill phase_s=2;"
        " seen is_stopped=False -> READY",
    ),
    "a worker that steps without beats is alive until a step is stuck P6 P7": (
        LIMIT_S,
        "".join(f"wait 0.1; stepped {n} -> READY;" for n in range(1, 101))
        + f"silence {LIMIT_S + SLACK_S + 1} -> signals=[DUMP]",
    ),
    # It holds the interpreter in its first step: its last beat is older than its work.
    "a worker that has said idle before its work is stuck P6 P10": (
        1.0, f"wait 1.5; stepped 1; silence {SILENCE_S + 1} -> signals=[DUMP]; exit -> suspects=1",
    ),
}  # fmt: skip
"""The limit of a step of a worker with one request, and the script."""


@pytest.mark.parametrize("rule", SIGNS)
def test_signs_of_life(rule: str) -> None:
    limit_s, script = SIGNS[rule]
    play(serving(limit_s), script, beats, silence, stepped)


def test_a_beat_from_the_load_says_nothing_of_a_worker_that_is_ready() -> None:
    driver = Driver([entry()])
    driver.load()
    driver.spawned()
    driver.hello()
    driver.beat(WorkerPhase.LOADING, phase_s=3.0)
    assert (driver.row()["phase"], driver.row()["phase_s"]) == ("loading", 3.0)
    driver.ready()
    assert (driver.row()["phase"], driver.row()["phase_s"]) == (None, None)
    driver.beat(WorkerPhase.LOADING, phase_s=4.0)  # sent before, on the other socket
    assert driver.row()["phase"] is None
    driver.beat(WorkerPhase.IDLE)
    assert driver.row()["phase"] == "idle"


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.DRAINING])
def test_stopped_process_is_killed_without_accusation_F7_P5(state: State) -> None:
    driver = serving()
    if state is State.LOADING:
        driver.restart(now=True)
        driver.exit(code=0)
        driver.spawned()
        driver.hello()
    elif state is State.DRAINING:
        driver.restart()
    driver.beat(WorkerPhase.DECODE)
    silence(driver, 6.0, is_stopped=True)
    assert driver.signals() == [WorkerSignal.KILL]
    assert last_exit(driver) == ("stall", 0)


def test_a_look_means_nothing_while_a_process_ends_F7() -> None:
    look = "seen is_stopped=True;"
    play(in_state(State.STOPPING), f"{look} {look} -> STOPPING & signals=[]")


def silent_growth(driver: Driver, gib_per_s: float, seconds: int) -> None:
    """No beat comes while each sample, one a second, shows the process larger."""
    for second in range(1, seconds + 1):
        driver.pass_time(1.0)
        seen_running(driver)
        driver.sample(int((10 + second * gib_per_s) * GIB))
        seen_running(driver)
        if driver.state() is State.STOPPING:
            break


@pytest.mark.parametrize(("gib_per_s", "within_s"), [(1.5, (0.0, 2.5)), (0.3, (4.0, 6.0))])
def test_a_silent_worker_that_grows_is_killed_long_before_its_time_is_up_P6(
    gib_per_s: float, within_s: tuple[float, float]
) -> None:
    driver = serving(step_timeout_s=30.0)
    driver.sample(10 * GIB)
    start = driver.now
    silent_growth(driver, gib_per_s, 30)
    assert driver.state() is State.STOPPING
    assert within_s[0] <= driver.now - start <= within_s[1]
    driver.pass_time(0.6)
    assert last_exit(driver)[1] == 1
    if gib_per_s == 1.5:
        assert "while the process grew by 3.00 GiB" in driver.row()["last_exit"]["detail"]


@pytest.mark.parametrize("has_beats", [True, False], ids=["it beats", "it grew before its beat"])
def test_growth_alone_is_honest_P7(has_beats: bool) -> None:
    driver = serving(step_timeout_s=30.0)
    driver.sample(10 * GIB)
    driver.pass_time(1.4)
    driver.beat(WorkerPhase.PREFILL, phase_s=1.4)
    for second in range(10):
        driver.pass_time(1.0)
        driver.sample((10 + 3 * second) * GIB if has_beats else 20 * GIB)
        seen_running(driver)
        if has_beats:
            driver.pass_time(0.4)
            driver.beat(WorkerPhase.PREFILL, phase_s=1.4 * second)
    assert driver.state() is State.READY


def test_a_load_that_grows_in_silence_has_its_own_limits_P7() -> None:
    driver = Driver([entry()])
    driver.load()
    driver.spawned()
    driver.hello()
    silent_growth(driver, 4.0, 5)
    assert driver.state() is State.LOADING


# Lost connections and requests (P23)


@pytest.mark.parametrize("state", WITH_PROCESS)
def test_a_process_that_outlives_its_connection_is_killed_P23(state: State) -> None:
    driver = play(
        in_state(state),
        f"unlinked; wait {UNLINKED_S - 0.1} -> {state}; unlinked;"  # it may be about to die
        " wait 0.2 -> STOPPING & signals=[KILL]; exit",
    )
    assert "connection" in driver.row()["last_exit"]["detail"]


@pytest.mark.parametrize("seconds", [UNLINKED_S / 2, 9.0], ids=["before our kill", "crossing it"])
@pytest.mark.parametrize(
    ("code", "signal", "suspects"),
    [(70, "", 1), (None, "SIGSEGV", 1), (None, "SIGTERM", 0), (71, "", 0), (None, "SIGKILL", 0)],
)
def test_a_death_after_its_connection_keeps_its_own_verdict(
    code: int | None, signal: str, suspects: int, seconds: float
) -> None:
    """The kernel frees its memory for long: the signal changes nothing of how it ended."""
    driver = serving()
    driver.unlinked()
    driver.pass_time(seconds)
    assert driver.state() is (State.STOPPING if seconds == 9.0 else State.READY)
    driver.exit(code=code, signal=signal)
    assert (driver.row()["suspects"], driver.row()["last_exit"]["code"]) == (suspects, code)
    is_ours = signal == "SIGKILL" and seconds == 9.0
    assert ("connection" in driver.row()["last_exit"]["detail"]) is is_ours


def test_a_death_that_crosses_another_end_of_ours() -> None:
    driver = serving()
    silence(driver, 6.0, is_stopped=True)
    play(driver, "exit signal=SIGSEGV -> suspects=1")
    assert driver.row()["last_exit"]["reason"] == "crash"
    driver = serving()
    play(
        driver,
        f"unlinked; wait {UNLINKED_S}; restart; exit code=70 -> LOADING & suspects=0 & restarts=0",
    )


LOST = {
    "out of memory is judged so though our kill crosses it": (
        "READY", "ask r2; unlinked; wait 9; exit code=75 -> row_limit=1",
    ),
    "a bad model is judged so though our kill crosses it": (
        "LOADING", "unlinked; wait 9; exit code=65 -> FAILED",
    ),
    "a worker without a connection gets no dispatch": (
        "READY", "unlinked; ask r2 -> dispatched=[]; wait 9; exit; up -> dispatched=[1, 2]",
    ),
    "a request that the worker does not hold was lost P23": (
        "READY", "beat requests=1 -> READY; beat requests=0 -> signals=[KILL] & STOPPING;"
        " exit -> suspects=0; up -> dispatched=[1]",
    ),
    "a lost row that was leaving holds no drain open P23": (
        "READY", "cancel; unload -> DRAINING; beat requests=0 -> signals=[KILL]; exit -> STOPPED",
    ),
}  # fmt: skip
"""In which state each begins, and its script."""


@pytest.mark.parametrize("rule", LOST)
def test_lost_connections_and_requests(rule: str) -> None:
    state, script = LOST[rule]
    play(in_state(State(state)), script)


def test_messages_under_way_are_not_lost_P7() -> None:
    driver = in_state(State.READY)
    watch = driver.model().process.watch
    assert watch is not None
    before = beat(WorkerPhase.DECODE, sent=watch.heard)
    counted_before = replace(before, received=watch.told)
    driver.ask("r2")  # a beat that counted before the worker took this one
    driver.worker(counted_before)
    assert driver.state() is State.READY
    # The worker has ended r1, and its beat overtakes the step that says so.
    ended = replace(
        before, step=1, phase=WorkerPhase.IDLE, sent=before.sent + 1,
        received=counted_before.received + 1,
    )  # fmt: skip
    driver.worker(ended)
    assert driver.state() is State.READY
    driver.token(1, finish=FinishReason.STOP)
    driver.worker(ended)
    assert driver.state() is State.READY


@pytest.mark.parametrize(("preparing", "limit_s"), [(0, LIMIT_S), (1, 11 * LIMIT_S)])
def test_a_worker_that_waits_though_it_has_a_request_is_replaced_P7_P23(
    preparing: int, limit_s: float
) -> None:
    """Something was lost on the way; the preparation of a prompt has the limit of the text."""
    driver = serving()
    start = driver.now
    assert beats(driver, int(limit_s) - 1, phase=WorkerPhase.IDLE, preparing=preparing) == []
    beats(driver, 3, phase=WorkerPhase.IDLE, preparing=preparing, phase_s=limit_s - 1)
    assert limit_s <= driver.now - start <= limit_s + 1.0
    assert driver.state() is State.STOPPING
    assert last_exit(driver) == ("crash", 0)
    assert "made no progress" in driver.row()["last_exit"]["detail"]


def test_a_worker_that_waits_with_nothing_to_do_is_left_alone_P7() -> None:
    driver = Driver([entry()])
    driver.load()
    driver.come_up()
    for second in range(60):
        driver.pass_time(1.0)
        driver.beat(WorkerPhase.IDLE, phase_s=second, requests=0)
    driver.ask()
    driver.beat(WorkerPhase.IDLE, phase_s=60.0)  # counted before the request came
    assert driver.state() is State.READY


# Hostile workers


@pytest.mark.parametrize("state", WITH_PROCESS)
def test_a_hello_of_another_version_at_any_time_ends_as_failed(state: State) -> None:
    driver = in_state(state)
    driver.hello(version="9.9.9")
    assert (driver.state(), driver.signals()) == (State.STOPPING, [WorkerSignal.TERM])
    driver.hello(version="9.9.9")
    driver.exit(code=143)
    assert driver.row()["last_exit"]["reason"] == "version"
    is_wanted = state is not State.DRAINING
    assert driver.state() is (State.FAILED if is_wanted else State.STOPPED)


@pytest.mark.parametrize("step", [-1, 0, 3, 10**9])
def test_a_worker_that_counts_its_steps_wrongly_is_killed(step: int) -> None:
    driver = serving()
    driver.worker(Step(step=1))
    driver.worker(Step(step=1))
    assert driver.state() is State.READY, "what was cancelled between two steps has its number"
    driver.worker(Step(step=step))
    assert driver.signals() == [WorkerSignal.KILL]
    driver.exit(signal="SIGKILL")
    assert f"counted step {step} after step 1)" in "\n".join(driver.model().life.story)


def messages(key: RequestKey) -> list[WorkerMessage]:
    """Every message of a worker, also in forms that make no sense; two of most."""
    acceptance = Acceptance(prompt_tokens=b"\1", opening="", parameters={}, seed=-1, fingerprint="")
    hello = Hello(model=ModelName("m"), generation=Generation(1), token="t", pid=1, version=VERSION)
    odd = Heartbeat(
        step=-5,
        phase=WorkerPhase.LOADING,
        phase_s=-1e14,
        predicted_s=-1e14,
        requests=-1,
        preparing=-1,
        sent=-1,
        received=-1,
    )
    delta = RowDelta(key=key, text="x", tokens=b"\1\0\0\0", finish=FinishReason.STOP)
    found: list[WorkerMessage] = [
        hello,
        replace(hello, version="9.9.9"),
        replace(hello, generation=Generation(7), version=""),
        LoadProgress(phase=LoadPhase.SPAWN, progress=-1.0),
        LoadProgress(phase=LoadPhase.WARMUP, progress=1e14),
        Ready(context_length=-1, fingerprint="", backend="", active_bytes=-1),
        Accepted(key=key, acceptance=acceptance, tokenize_s=-1.0),
        Accepted(key=RequestKey(99), acceptance=acceptance, tokenize_s=-1.0),
        Rejected(key=key, error=RemoteError(ErrorCode.WORKER_CRASHED, "m")),
        Step(step=-1),
        Step(step=0, rows=[delta, delta], prefill=[PrefillProgress(key=key, done=-1, total=0)]),
        Step(step=1, rows=[RowDelta(key=RequestKey(99), finish=FinishReason.CANCELLED)]),
        odd,
        Heartbeat(step=10**9, phase=WorkerPhase.DECODE, phase_s=1e14, predicted_s=1e14),
        Rendered(number=-1, bodies=[]),
        Rendered(number=1, bodies=[b""]),
        Dying(code=-1, message=""),
    ]
    assert {type(message) for message in found} == set(WORKER_TO_SUPERVISOR)
    return found


@pytest.mark.parametrize("state", sorted(HAS_PROCESS))
@pytest.mark.parametrize("number", range(len(messages(RequestKey(1)))))
def test_every_message_at_every_time_has_a_rule(state: State, number: int) -> None:
    """The core is strict: a pair without a rule raises. Afterwards the model can be used.

    Each state has its part of the pairs; over the states, every pair.
    """
    every = messages(RequestKey(1))
    first, states = every[number], sorted(HAS_PROCESS)
    for second in every[(number + states.index(state)) % len(states) :: len(states)]:
        driver = in_state(state)
        for message in (first, second, first):
            if driver.state() in HAS_PROCESS:
                driver.worker(message)
            driver.pass_time(0.1)
        for _ in range(2):  # another version ends as FAILED whatever was asked for
            driver.restart(now=True)
            if driver.state() is State.STOPPING:
                driver.exit()
        driver.come_up()
        assert driver.state() is State.READY, (state, first, second)


def test_a_process_that_never_says_anything_is_looked_at_while_it_loads() -> None:
    driver = Driver()
    driver.load()
    driver.spawned()
    driver.pass_time(SILENCE_S)
    assert len(driver.of(LookAtWorker)) == 1
