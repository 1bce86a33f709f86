"""The signs of life of one process, judged at the borders of each limit."""

from __future__ import annotations

import pytest

from mlxsup.protocol.clock import PULSE_S
from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat
from mlxsup.supervisor.core.health.watchdog import (
    PREDICTIONS,
    RECHECK_S,
    SILENCE_S,
    SLACK_S,
    UNLINKED_S,
    Alarm,
    Watch,
)

LIMIT_S = 10.0
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


def test_the_limits_are_those_that_are_promised() -> None:
    assert (SILENCE_S, RECHECK_S, SLACK_S, PREDICTIONS, UNLINKED_S) == (2.5, 1.0, 0.75, 4.0, 2.0)


def test_a_late_beat_comes_within_the_slack_and_the_slack_within_the_second_of_P6() -> None:
    assert PULSE_S < SLACK_S < 1.0
    assert SILENCE_S == 5 * PULSE_S


def test_a_process_that_has_just_started_is_left_alone_until_it_is_silent() -> None:
    watch = Watch.over(100.0)
    assert watch.deadline(LIMIT_S) == watch.deadline(None) == 102.5
    for limit_s in (LIMIT_S, None):
        assert watch.judge(102.4, limit_s, 0) is Alarm.NONE
    assert watch.judge(102.5, None, 0) is Alarm.LOOK
    assert Watch.over(100.0).judge(102.5, LIMIT_S, 0) is Alarm.LOOK


def test_it_is_looked_at_once_and_again_after_a_second() -> None:
    watch = Watch.over(0.0)
    assert watch.judge(2.5, None, 0) is Alarm.LOOK
    assert watch.deadline(None) == 3.5
    assert watch.judge(3.4, None, 0) is Alarm.NONE
    assert watch.judge(3.5, None, 0) is Alarm.LOOK
    assert watch.deadline(None) == 4.5
    watch.said(4.0)
    assert (watch.deadline(None), watch.judge(6.4, None, 0)) == (6.5, Alarm.NONE)
    assert watch.judge(6.5, None, 0) is Alarm.LOOK


def test_it_is_stopped_if_it_was_seen_so_twice_with_nothing_between() -> None:
    watch = Watch.over(0.0)
    watch.looked(is_stopped=True, now=3.0)
    assert (watch.is_stopped, watch.judge(3.0, None, 0)) == (False, Alarm.LOOK)
    watch.looked(is_stopped=False, now=4.0)
    watch.looked(is_stopped=True, now=5.0)
    assert watch.judge(5.0, None, 0) is Alarm.LOOK
    watch.said(5.5)
    watch.looked(is_stopped=True, now=9.0)
    assert not watch.is_stopped
    watch.looked(is_stopped=True, now=10.0)
    assert watch.judge(10.0, None, 0) is Alarm.STOPPED
    assert watch.judge(10.0, LIMIT_S, 1) is Alarm.STOPPED
    watch.looked(is_stopped=False, now=11.0)
    assert watch.judge(11.0, None, 0) is not Alarm.STOPPED
    watch.looked(is_stopped=True, now=12.0)
    watch.looked(is_stopped=True, now=13.0)
    watch.beat(beat(WorkerPhase.IDLE), 0, 13.5)
    assert watch.judge(13.5, None, 0) is Alarm.NONE


def test_a_look_that_saw_it_stopped_does_not_say_that_it_runs() -> None:
    watch = Watch.over(0.0)
    watch.looked(is_stopped=False, now=10.5)
    watch.looked(is_stopped=True, now=11.0)
    assert watch.judge(11.0, LIMIT_S, 1) is Alarm.LOOK


def test_a_connection_that_has_ended_is_given_two_seconds_from_the_first_word_of_it() -> None:
    watch = Watch.over(0.0)
    watch.unlinked(5.0)
    watch.unlinked(6.0)
    for limit_s in (LIMIT_S, None):
        assert watch.deadline(limit_s) == 7.0
        assert watch.judge(6.9, limit_s, 1) is Alarm.NONE
        assert watch.judge(7.0, limit_s, 1) is Alarm.BROKEN
    assert watch.describe(7.0) == "its connection has ended, though the process lives"


@pytest.mark.parametrize("phase", WORKS)
def test_work_is_stuck_after_its_limit_and_four_predictions(phase: WorkerPhase) -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(phase, phase_s=0.5, predicted_s=2.0), 1, 20.0)
    assert watch.stuck_at(LIMIT_S) == 19.5 + LIMIT_S + 4 * 2.0
    watch.looked(is_stopped=False, now=37.4)
    assert watch.judge(37.4, LIMIT_S, 1) is not Alarm.STUCK
    assert watch.judge(37.5, LIMIT_S, 1) is Alarm.STUCK


@pytest.mark.parametrize("phase", sorted(set(WorkerPhase) - {*WORKS, WorkerPhase.WAITING}))
def test_whoever_loads_or_waits_is_not_stuck(phase: WorkerPhase) -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(phase, phase_s=0.5), 0, 1.0)
    assert watch.stuck_at(LIMIT_S) is None


def test_nothing_is_known_of_a_step_after_the_one_that_has_ended() -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(WorkerPhase.DECODE, step=4), 1, 1.0)
    assert watch.stuck_at(LIMIT_S) == 11.0
    watch.stepped(5, 2.0)
    assert watch.stuck_at(LIMIT_S) is None
    watch.beat(beat(WorkerPhase.DECODE, step=5, phase_s=0.5), 1, 3.0)
    assert watch.stuck_at(LIMIT_S) == 12.5


def test_the_same_work_has_begun_when_it_was_first_said_to_whatever_the_beats_say_later() -> None:
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
@pytest.mark.parametrize("limit_s", [0.1, 1.0, 1.7, 2.0, 2.4, 3.1, 10.0, 30.4])
def test_whoever_asks_when_it_is_due_finds_what_is_stuck_in_time_P6(
    limit_s: float, predicted_s: float, has_beats: bool
) -> None:
    """Not only after the next look: a step may be due between two of them."""
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


def test_nobody_asks_again_and_again_while_a_look_is_awaited_or_has_seen_it_stopped() -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(WorkerPhase.DECODE), 1, 0.0)
    assert watch.judge(2.5, 2.6, 1) is Alarm.LOOK
    assert watch.deadline(2.6) == 3.5
    watch.looked(is_stopped=True, now=2.5)
    assert watch.deadline(2.6) == 3.5
    late = Watch.over(0.0)
    late.looked(is_stopped=False, now=2.5)
    assert late.judge(12.0, LIMIT_S, 1) is Alarm.LOOK
    assert late.deadline(LIMIT_S) == 13.0, (
        "its limit is past, and the look of long ago says nothing"
    )


def test_it_is_asked_again_when_the_first_of_both_limits_comes() -> None:
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


# ---------------------------------------------------------------- what it was given


def counted(watch: Watch, requests: int, given: int, now: float) -> None:
    """A beat that counts when nothing is under way."""
    message = Heartbeat(
        step=0, phase=WorkerPhase.IDLE, phase_s=0.0, requests=requests, sent=watch.heard,
        received=watch.told,
    )  # fmt: skip
    watch.beat(message, given, now)


def test_what_a_worker_holds_less_than_it_was_given_is_lost() -> None:
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


def test_a_worker_that_waits_though_it_was_given_work_waits_in_vain_after_the_limit() -> None:
    watch = Watch.over(0.0)
    watch.said(1.0)
    watch.was_told(2.0)
    watch.beat(beat(WorkerPhase.IDLE, sent=9), 1, 3.0)
    for now in (5.0, 8.0, 11.0, 12.0):
        watch.beat(beat(WorkerPhase.IDLE, phase_s=now - 2.0, sent=9), 1, now)
    assert watch.idle_for_s(12.0) == 9.0
    assert watch.judge(13.0, LIMIT_S, 1) is Alarm.NONE, "nothing is known since its latest beat"
    assert watch.judge(15.0, LIMIT_S, 1) is Alarm.LOOK, "nothing is known of one that is silent"
    watch.beat(beat(WorkerPhase.IDLE, phase_s=11.0, sent=9), 1, 13.0)
    assert watch.judge(13.0, LIMIT_S, 0) is Alarm.NONE
    assert watch.judge(13.0, LIMIT_S, 1) is Alarm.BROKEN
    assert watch.describe(13.0) == "it holds requests, and nothing moved for 10.0 s"
    watch.was_told(15.0)
    assert watch.idle_for_s(16.0) == 1.0


def test_the_preparation_of_a_prompt_has_ten_limits_more() -> None:
    watch = Watch.over(0.0)
    for now in range(1, 111):
        message = beat(WorkerPhase.IDLE, phase_s=now - 1.0, preparing=1, sent=9)
        watch.beat(message, 1, float(now))
    assert watch.judge(110.9, LIMIT_S, 1) is Alarm.NONE
    watch.beat(beat(WorkerPhase.IDLE, phase_s=110.0, preparing=1, sent=9), 1, 111.0)
    assert watch.judge(111.0, LIMIT_S, 1) is Alarm.BROKEN
    watch.beat(beat(WorkerPhase.IDLE, phase_s=100.0, preparing=0, sent=9), 1, 60.0)
    assert watch.judge(60.0, LIMIT_S, 1) is Alarm.BROKEN


def test_who_works_does_not_wait() -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(WorkerPhase.DECODE), 1, 1.0)
    assert watch.idle_for_s(500.0) == 0.0


# ---------------------------------------------------------------- in words


def test_what_the_matter_is_is_said_in_one_phrase() -> None:
    watch = Watch.over(0.0)
    watch.beat(beat(WorkerPhase.DECODE, step=41), 1, 1.0)
    assert watch.describe(3.4) == "step 42 (decode) did not end in 2.4 s"
    assert watch.describe(3.5) == "no sign of life for 2.5 s, though the process runs"
    watch.beat(beat(WorkerPhase.PREFILL, step=41), 1, 1.0)
    assert watch.describe(2.5) == "step 42 (prefill) did not end in 1.5 s"
    watch.beat(beat(WorkerPhase.ROWS, step=41), 1, 1.0)
    assert watch.describe(2.5) == "what follows step 41 (rows) did not end in 1.5 s"
    watch.beat(beat(WorkerPhase.IDLE, step=41), 1, 1.0)
    assert watch.describe(2.5) == "it holds requests, and nothing moved for 1.5 s"
