"""The clock that steps are timed with."""

from __future__ import annotations

from mlxsup.worker.clock import TOLERANCE_S, Clock
from mlxsup.worker.heartbeat import BEAT_INTERVAL_S


class Monotonic:
    """A monotonic clock that stands until it is moved."""

    def __init__(self) -> None:
        self.value = 100.0

    def __call__(self) -> float:
        return self.value


def test_a_long_step_counts_whole_if_the_beats_have_asked_meanwhile() -> None:
    monotonic = Monotonic()
    clock = Clock(monotonic)
    began = clock.now()
    for _ in range(100):
        monotonic.value += BEAT_INTERVAL_S + TOLERANCE_S
        clock.now()
    assert clock.now() - began == 100 * (BEAT_INTERVAL_S + TOLERANCE_S)


def test_while_the_process_was_stopped_no_step_took_time_whoever_asks_first_P7() -> None:
    monotonic = Monotonic()
    clock = Clock(monotonic)
    began = clock.now()
    monotonic.value += 3600.0
    assert clock.now() - began == BEAT_INTERVAL_S
    monotonic.value += 0.25
    assert clock.now() - began == BEAT_INTERVAL_S + 0.25


def test_each_stop_is_left_out_but_for_one_beat() -> None:
    monotonic = Monotonic()
    clock = Clock(monotonic)
    said = []
    for gap_s in (1.0, 1.25, 10.0, 0.0, 1.0):
        monotonic.value += gap_s
        said.append(clock.now())
    assert said == [101.0, 101.5, 102.0, 102.0, 103.0]
