"""Prompts that come together begin together: which wait, for which, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, RowState, WorkerPhase
from mlxsup.protocol.worker_messages import (
    CancelRow,
    Exit,
    Heartbeat,
    PauseRow,
    RowDelta,
    Step,
)
from mlxsup.supervisor.core.watchdog import Alarm, Watch
from mlxsup.worker.coalescing import BURST, BURST_QUIET_S, MOST_S, QUIET_S, Coalescing

from support.worker.turn_bench import STEP_TIMEOUT_S, A, B, Bench, C, D, x

DEAR_PASS_S = 0.02

Keys = tuple[RequestKey, ...]


# ---------------------------------------------------------------- alone, on a played clock
def gathering() -> tuple[Coalescing, SimpleNamespace]:
    clock = SimpleNamespace(now=50.0)
    made = Coalescing(lambda: clock.now)
    made.arrived()
    return made, clock


def test_a_lone_request_waits_for_two_milliseconds_from_its_arrival() -> None:
    made, clock = gathering()
    clock.now += 0.0005  # it was tokenised meanwhile
    assert made.is_on(pass_s=DEAR_PASS_S, is_preparing=False)
    assert made.left_s == pytest.approx(0.0015)
    clock.now += 0.0015
    assert not made.is_on(pass_s=DEAR_PASS_S, is_preparing=False)
    assert made.left_s is None


def test_each_arrival_extends_the_wait_and_so_does_a_preparation_up_to_a_limit() -> None:
    made, clock = gathering()
    for _ in range(31):
        assert made.is_on(pass_s=DEAR_PASS_S, is_preparing=False)
        clock.now += 0.0015
        made.arrived()
    assert made.is_on(pass_s=DEAR_PASS_S, is_preparing=True)
    assert made.left_s == pytest.approx(MOST_S - 31 * 0.0015), "its preparation ends by itself"
    clock.now = 50.0 + MOST_S
    made.arrived()
    assert not made.is_on(pass_s=DEAR_PASS_S, is_preparing=True)


@pytest.mark.parametrize(
    ("arrivals", "interval_s", "pass_s", "quiet_s"),
    [
        (BURST - 1, 0.0005, DEAR_PASS_S, QUIET_S),
        (BURST, 0.0005, DEAR_PASS_S, BURST_QUIET_S),
        (BURST, 0.0059, DEAR_PASS_S, BURST_QUIET_S),
        (BURST, 0.0061, DEAR_PASS_S, QUIET_S),
        (BURST, 0.0005, 0.005, 0.005),
    ],
)
def test_a_longer_pause_is_no_end_of_a_burst_unless_a_pass_costs_less(
    arrivals: int, interval_s: float, pass_s: float, quiet_s: float
) -> None:
    made, clock = gathering()
    for _ in range(arrivals - 1):
        clock.now += interval_s
        made.arrived()
    assert made.is_on(pass_s=pass_s, is_preparing=False)
    assert made.left_s == pytest.approx(quiet_s)
    clock.now += quiet_s
    assert not made.is_on(pass_s=pass_s, is_preparing=False)


@pytest.mark.parametrize(("pass_s", "waits"), [(0.0, False), (0.0039, False), (0.0041, True)])
def test_cheap_passes_are_not_waited_for(pass_s: float, waits: bool) -> None:
    made, _ = gathering()
    assert made.is_on(pass_s=pass_s, is_preparing=True) is waits
    assert (made.left_s is not None) is waits


# ---------------------------------------------------------------- in the loop
@pytest.fixture
def bench() -> Bench:
    made = Bench(places=4)
    made.engine.pass_s = DEAR_PASS_S
    return made


def test_a_burst_is_inserted_together_and_is_one_step(bench: Bench) -> None:
    for key in (A, B, C):
        bench.dispatch(key)
        bench.prepare(key)
        bench.turn()
        bench.now += 0.001
    assert (bench.engine.rows, bench.engine.made) == ({}, [])
    bench.now += 0.001
    bench.turn()
    assert (list(bench.engine.rows), bench.engine.made) == ([A, B, C], ["step"])


def test_the_loop_waits_no_longer_than_the_rows(bench: Bench) -> None:
    bench.dispatch(A)
    bench.prepare(A)
    bench.now += 0.0005
    bench.turn()
    assert bench.loop.wait_s() == pytest.approx(0.0015)
    bench.now += 1.0
    bench.around.flushes = [False]
    bench.turn()
    assert bench.loop.wait_s() is None, "while the supervisor does not read, nothing is looked at"
    bench.dispatch(B)
    bench.turn()
    assert bench.loop.wait_s() == pytest.approx(MOST_S)


@pytest.mark.parametrize(
    ("dispatched", "prepared", "is_running"),
    [((A, B, C, D, RequestKey(5)), (A, B, C, D), False), ((B, C), (B,), True)],
    ids=["a full batch", "beside rows that run"],
)
def test_nothing_is_waited_for_by(
    bench: Bench, dispatched: Keys, prepared: Keys, is_running: bool
) -> None:
    if is_running:
        bench.start(A)
        bench.now += QUIET_S
        bench.turn()
    bench.dispatch(*dispatched)
    bench.prepare(*prepared)
    bench.turn()
    assert list(bench.engine.rows) == [A] * is_running + list(prepared)


def test_no_burst_waits_for_a_prompt_that_is_mostly_tokens(bench: Bench) -> None:
    bench.engine.cheap_tokens = 3
    bench.start(A, B)
    assert not bench.engine.rows
    bench.engine.cheap_tokens = 2
    bench.turn()
    assert list(bench.engine.rows) == [A, B]


@pytest.mark.parametrize("message", [CancelRow(key=A), PauseRow(key=A, keep=True)], ids=repr)
def test_a_waiting_row_leaves_at_once_D2(bench: Bench, message: CancelRow | PauseRow) -> None:
    bench.start(A, B)
    is_cancel = isinstance(message, CancelRow)
    left = RowDelta(
        key=A,
        finish=FinishReason.CANCELLED if is_cancel else None,
        paused=None if is_cancel else RowState.DROPPED,
    )
    assert bench.turn(message) == [Step(step=0, rows=[left], between_steps=1)]
    bench.now += QUIET_S
    bench.turn()
    assert list(bench.engine.rows) == [B]


def test_an_exit_ends_the_wait(bench: Bench) -> None:
    bench.start(A, B)
    bench.turn(Exit())
    assert (bench.loop.is_exit_asked, bench.engine.rows) == (True, {})


def test_the_watchdog_sees_requests_that_are_all_there_F5(bench: Bench) -> None:
    """While they wait nothing is lost, stuck or idle for too long."""
    bench.dispatch(A, B)
    bench.prepare(A)
    bench.around.received = 2
    beats: list[Heartbeat] = []
    bench.around.on_wait = lambda: beats.append(bench.board.beat())
    bench.run()
    assert bench.around.waited_s == [pytest.approx(MOST_S)]
    [beat] = beats
    watch = Watch.over(bench.now)
    for _ in (A, B):
        watch.was_told(bench.now)
    watch.said(bench.now)  # A was accepted
    assert (beat.phase, beat.requests, beat.preparing) == (WorkerPhase.IDLE, 2, 1)
    now = bench.now + MOST_S
    watch.beat(beat, 2, now)
    assert (beat.sent, beat.received) == (watch.heard, watch.told), "so its count is believed"
    assert watch.judge(now, STEP_TIMEOUT_S, 2) is Alarm.NONE


# ---------------------------------------------------------------- any order of things
@given(st.lists(st.one_of(
    st.sampled_from(["arrive", "prepare", "end"]), st.integers(1, 9000)
), max_size=60))  # fmt: skip
def test_rows_wait_within_the_limits_in_any_order_of_events(events: list[str | int]) -> None:
    """Integers are microseconds that pass. What is due is known from what was done to the loop."""
    bench = Bench(places=3)
    bench.engine.pass_s = DEAR_PASS_S
    preparing: list[RequestKey] = []
    ready_at: dict[RequestKey, float] = {}
    arrived_at, last = 0.0, 0
    for event in [*events, *["prepare"] * 60, 9000, 9000, 9000]:
        match event:
            case "arrive" if len(bench.loop.open_keys) < 3:
                last += 1
                arrived_at = bench.now
                preparing.append(RequestKey(last))
                bench.dispatch(RequestKey(last))
            case "prepare" if preparing:
                ready_at[preparing[0]] = bench.now
                bench.prepare(preparing.pop(0))
            case "end" if bench.engine.rows:
                bench.give(x(next(iter(bench.engine.rows)), FinishReason.LENGTH))
            case int():
                bench.now += event / 1e6
        had_rows = bool(bench.engine.rows)
        bench.loop.turn()
        waiting = [key for key in ready_at if key in bench.loop.open_keys - {*bench.engine.rows}]
        ready_at = {key: ready_at[key] for key in waiting}
        if waiting:
            assert not had_rows, "none waits beside rows that run"
            assert len(waiting) < 3
            assert bench.now < min(ready_at.values()) + MOST_S
            assert preparing or bench.now < arrived_at + QUIET_S
    assert not ready_at
