"""The clock that deadlines are measured with."""

from __future__ import annotations

from mlxsup.supervisor.clock import PULSE_S, TOLERANCE_S, Clock


class Monotonic:
    """A monotonic clock that stands until it is moved."""

    def __init__(self) -> None:
        self.value = 100.0

    def __call__(self) -> float:
        return self.value


def test_it_goes_like_the_monotonic_one_while_somebody_asks() -> None:
    monotonic = Monotonic()
    clock = Clock(monotonic)
    start = clock.now()
    for _ in range(100):
        monotonic.value += PULSE_S + TOLERANCE_S / 2
        clock.now()
    assert clock.now() - start == 100 * (PULSE_S + TOLERANCE_S / 2)


def test_a_pause_of_the_process_does_not_count_P7() -> None:
    monotonic = Monotonic()
    clock = Clock(monotonic)
    start = clock.now()
    monotonic.value += 3600.0
    assert clock.now() - start == PULSE_S
    monotonic.value += 1.0
    assert clock.now() - start == PULSE_S + 1.0


def test_the_delay_until_a_time_is_real_and_never_negative() -> None:
    monotonic = Monotonic()
    clock = Clock(monotonic)
    monotonic.value += 60.0
    now = clock.now()
    assert clock.delay_until(now + 5.0) == 5.0
    assert clock.delay_until(now - 5.0) == 0.0
