"""Engines whose deaths accuse requests, and suspects that prove themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import PauseRow
from mlxsup.supervisor.core.poison import PROBATION_S, PROBATION_TOKENS
from mlxsup.supervisor.core.settings import CoreSettings, RestartSettings

from support.core.driver import LAUNCH, Driver, entry

SETTINGS = CoreSettings(max_queue=64, max_queue_per_client=64, drain_timeout_s=5.0)
HOUR_S = 3600.0


def engine_of(rows: int, **changes: Any) -> Driver:
    """A READY model with that many rows and room for many crashes; `changes` of its launch."""
    restart = RestartSettings(
        max_restarts=50, stable_s=10.0, backoff_initial_s=0.1, backoff_max_s=0.1
    )
    launch = replace(LAUNCH, max_concurrency=rows, **changes)
    driver = Driver([entry("m", launch=launch, restart=restart)], SETTINGS)
    driver.load()
    driver.come_up()
    return driver


def crash(driver: Driver, signal: str = "SIGSEGV", code: int | None = None) -> list[RequestKey]:
    """The worker dies and comes back; returns the keys that are dispatched at once."""
    driver.exit(signal=signal, code=code)
    if driver.state() is State.BACKOFF:
        driver.pass_time(0.2)
    driver.come_up()
    return driver.dispatched()


def finish(driver: Driver, key: int) -> list[RequestKey]:
    """A request completes; returns the keys that are dispatched then."""
    driver.token(key, finish=FinishReason.STOP)
    return driver.dispatched()


def gain(driver: Driver, *keys: int) -> None:
    """A step, some time after the last one, gives each row a token; it had been accepted."""
    for key in keys:
        driver.accept(key)
    driver.pass_time(PROBATION_S)
    driver.token(*keys)


def prove(driver: Driver, key: int) -> list[RequestKey]:
    """A suspect comes past the crash and leaves the batch; returns what is dispatched then."""
    for _ in range(PROBATION_TOKENS):
        assert driver.told(PauseRow) == []
        gain(driver, key)
    started = driver.dispatched()
    if driver.told(PauseRow):
        driver.row_left(key)
        started += driver.dispatched()
    return started
