"""Steps of a load as progress: each renews the limit of a load that stalls, unless there is no end
of them."""

from __future__ import annotations

from itertools import pairwise

from mlxsup.protocol.states import LoadPhase, State
from mlxsup.protocol.worker_messages import LoadProgress
from mlxsup.worker.engines.mlx.load_steps import HALF, MOST, LoadSteps

from support.core_driver import Driver, entry

BEGIN = 0.9


def shown(calls: int) -> list[float]:
    """The progress that so many steps show."""
    shares: list[float] = []
    steps = LoadSteps(shares.append, BEGIN)
    for _ in range(calls):
        steps()
    return shares


def test_each_step_is_further_than_the_one_before_and_none_is_the_last() -> None:
    shares = shown(MOST)
    assert shares[0] == BEGIN
    assert shares[HALF] == (BEGIN + 1.0) / 2
    assert all(before < after for before, after in pairwise(shares))
    assert shares[-1] < 1.0


def test_steps_without_an_end_are_no_progress() -> None:
    assert len(set(shown(MOST + 20)[MOST:])) == 1


def test_a_load_whose_steps_take_as_long_as_the_limit_together_does_not_stall() -> None:
    """With CUDA each of them may compile a kernel for half a minute."""
    driver = Driver([entry()])
    driver.load()
    driver.spawned()
    driver.hello()
    for share in shown(9):
        driver.worker(LoadProgress(phase=LoadPhase.WARMUP, progress=share))
        driver.pass_time(entry().load_stall_timeout_s / 3)
    assert driver.state() is State.LOADING
    driver.pass_time(entry().load_stall_timeout_s)
    assert driver.state() is State.STOPPING, "no step takes that long"
