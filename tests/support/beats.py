"""A worker that serves under the watchdog's eyes, and beats as a test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.states import State, WorkerPhase
from mlxsup.supervisor.core.actions import LookAtWorker, WorkerSignal

from .core_driver import LAUNCH, Driver, entry

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
