"""A worker that waits for a lease is stuck only if nothing keeps it from reading (P23)."""

from __future__ import annotations

import pytest

from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat
from mlxsup.supervisor.core.health.watchdog import Alarm, Watch

LIMIT_S = 10.0


def waits(phase_s: float = 0.0, *, step: int = 0) -> Heartbeat:
    return Heartbeat(step=step, phase=WorkerPhase.WAITING, phase_s=phase_s, requests=1)


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


def test_its_turn_may_come_as_late_as_it_likes() -> None:
    watch = waiting()
    for second in range(1, 3600):
        watch.beat(waits(float(second)), 1, 100.0 + second)
        assert judged(watch, 100.0 + second) is Alarm.NONE
    assert watch.stuck_at(LIMIT_S) is None


def test_the_limit_of_a_step_counts_from_the_lease() -> None:
    watch = waiting()
    watch.beat(waits(50.0), 1, 150.0)
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


def test_who_has_not_asked_waits_for_nothing() -> None:
    watch = Watch.over(100.0)
    watch.beat(waits(), 1, 101.0)
    watch.beat(waits(9.9), 1, 110.9)
    assert judged(watch, 110.9) is Alarm.NONE
    watch.beat(waits(10.0), 1, 111.0)
    assert judged(watch, 111.0) is Alarm.STUCK


def test_a_wait_that_began_after_the_last_lease_counts_from_its_own_beginning() -> None:
    watch = waiting()
    watch.got_lease(101.0)
    watch.said(103.0)
    watch.stepped(1, 103.0)
    assert watch.stuck_at(LIMIT_S) is None, "its step has ended"
    watch.beat(waits(step=1), 1, 104.0)
    watch.beat(waits(10.0, step=1), 1, 114.0)
    assert watch.stuck_at(LIMIT_S) == 114.0


def test_a_step_with_a_lease_is_judged_from_its_own_beginning() -> None:
    watch = waiting()
    watch.got_lease(150.0)
    prefill = Heartbeat(step=0, phase=WorkerPhase.PREFILL, phase_s=1.0, predicted_s=2.0)
    watch.beat(prefill, 1, 155.0)
    assert watch.stuck_at(LIMIT_S) == pytest.approx(154.0 + LIMIT_S + 4 * 2.0)


def test_while_it_waits_it_must_give_signs_of_life_P23() -> None:
    watch = waiting()
    assert watch.judge(102.4, LIMIT_S, 1) is Alarm.NONE
    assert watch.judge(102.5, LIMIT_S, 1) is Alarm.LOOK
    watch.looked(is_stopped=True, now=102.5)
    watch.looked(is_stopped=True, now=103.5)
    assert watch.judge(103.5, LIMIT_S, 1) is Alarm.STOPPED


def test_while_it_waits_it_must_hold_its_requests_P23() -> None:
    watch = waiting()
    lost = Heartbeat(step=0, phase=WorkerPhase.WAITING, phase_s=1.0, requests=0, sent=1)
    watch.beat(lost, 1, 101.0)
    assert watch.judge(101.0, LIMIT_S, 1) is Alarm.BROKEN
