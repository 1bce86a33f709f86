"""The clock that deadlines are measured with."""

from __future__ import annotations

from mlxsup.protocol.clock import PULSE_S, TOLERANCE_S, Clock


class Monotonic:
    """A monotonic clock that stands until it is moved."""

    def __init__(self) -> None:
        self.value = 100.0

    def __call__(self) -> float:
        return self.value


def test_clock_goes_like_the_monotonic_one() -> None:
    monotonic = Monotonic()
    clock = Clock(monotonic)
    start = clock.now()
    for _ in range(100):
        monotonic.value += PULSE_S + TOLERANCE_S / 2
        clock.now()
    assert clock.now() - start == 100 * (PULSE_S + TOLERANCE_S / 2)


def test_more_than_a_second_is_a_pause_P7() -> None:
    monotonic = Monotonic()
    clock = Clock(monotonic)
    assert clock.now() == 100.0
    said = []
    for gap_s in (1.0, 1.25, 10.0, 0.0, 1.0):
        monotonic.value += gap_s
        said.append(clock.now())
    assert said == [101.0, 101.5, 102.0, 102.0, 103.0]
    assert [clock.delay_until(when) for when in (102.0, 103.0, 103.25)] == [0.0, 0.0, 0.25]
