"""How often and how soon a crashed worker is started again (F2), as numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxsup.protocol.states import State
from mlxsup.supervisor.core.lifecycle.restart_policy import NOW, GiveUp, RestartPolicy

from support.core_driver import RESTART, Driver

PATIENT = replace(RESTART, max_restarts=20, window_s=10_000.0)


class Longest(random.Random):
    """Draws the upper end of every range."""

    def uniform(self, a: float, b: float) -> float:
        return b


def delays(policy: RestartPolicy, count: int, *, every_s: float = 1.0) -> list[float]:
    found = [policy.after_crash(number * every_s) for number in range(count)]
    assert not any(isinstance(delay, GiveUp) for delay in found)
    return [float(delay) for delay in found if not isinstance(delay, GiveUp)]


def test_delays_double_from_the_first_to_the_most_behind_one_restart_at_once_F2() -> None:
    policy = RestartPolicy(settings=PATIENT, random=Longest())
    assert delays(policy, 6) == [NOW, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_random_half_is_taken_off_so_that_models_do_not_come_back_together_F2() -> None:
    longest = delays(RestartPolicy(settings=PATIENT, random=Longest()), 6)
    drawn = [
        delays(RestartPolicy(settings=PATIENT, random=random.Random(seed)), 6) for seed in range(20)
    ]
    for one in drawn:
        assert all(most / 2 <= delay <= most for delay, most in zip(one, longest, strict=True))
    assert len({one[1] for one in drawn}) == len(drawn), "all different"
    shares = [one[1] / longest[1] for one in drawn]
    assert min(shares) < 0.6
    assert max(shares) > 0.9


def test_a_stable_time_starts_the_delay_afresh_and_forgives_no_crash_F2() -> None:
    policy = RestartPolicy(settings=replace(PATIENT, max_restarts=3), random=Longest())
    assert delays(policy, 2) == [NOW, 1.0]
    policy.was_stable()
    assert policy.after_crash(2.0) == NOW
    policy.was_stable()
    assert policy.after_crash(3.0) == GiveUp(reason="crashed 4 times within 10000 s")


def test_crashes_count_for_the_window_and_no_longer_F2() -> None:
    policy = RestartPolicy(settings=replace(RESTART, max_restarts=2), random=Longest())
    assert RESTART.window_s == 100.0
    assert [policy.after_crash(at) for at in (0.0, 50.0)] == [NOW, 1.0]
    assert policy.after_crash(100.0) == 2.0, "the first is a whole window ago"
    assert isinstance(policy.after_crash(149.0), GiveUp)


@pytest.mark.parametrize("how", ["load", "restart", "restart now", "a request"])
def test_a_person_clears_what_a_failed_model_is_held_to_and_a_request_does_not_F2(
    how: str,
) -> None:
    driver = Driver()
    driver.load()
    starts = 0
    while driver.state() is not State.FAILED:
        driver.come_up()
        starts += 1
        driver.exit()
        driver.pass_time(4.0)
    assert starts == RESTART.max_restarts + 1
    asked: dict[str, Callable[[], object]] = {
        "load": driver.load,
        "restart": driver.restart,
        "restart now": lambda: driver.restart(now=True),
        "a request": driver.ask,
    }
    asked[how]()
    if how == "a request":
        assert driver.state() is State.FAILED
        assert driver.errors() == {"r1": "model_failed"}
        return
    driver.come_up()
    driver.exit()
    assert driver.state() is State.LOADING, "the first crash again: at once"
