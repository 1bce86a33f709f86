"""A core whose model is in a given state."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.states import State

from support.core.driver import RESTART, Driver, entry

WITH_PROCESS = (State.LOADING, State.READY, State.DRAINING)
"""States whose process is there and was not told to end."""


def in_state(state: State, **changes: Any) -> Driver:
    """A driver whose model `m` is in a given state, reached along the table's own edges.

    `changes` replace fields of the model's entry. In READY and DRAINING request `r1` (key 1) runs,
    accepted, unless the state is reached without one.
    """
    driver = Driver([entry(**changes)])
    if state is State.STOPPED:
        return driver
    if state is State.PENDING:
        blocker = Driver([entry("z"), entry(**changes)])
        blocker.load("z")
        blocker.spawned("z", 5)
        blocker.load()
        return blocker
    driver.load()
    if state is State.LOADING:
        driver.spawned()
        driver.hello()
        return driver
    driver.come_up()
    if state in (State.READY, State.DRAINING):
        driver.ask()
        driver.accept(1)
        if state is State.DRAINING:
            driver.unload()
    elif state is State.STOPPING:
        driver.unload()
    elif state is State.BACKOFF:
        driver.exit()
        driver.come_up()
        driver.exit()
    elif state is State.FAILED:
        driver.exit()
        for _ in range(RESTART.max_restarts):
            driver.pass_time(10.0)
            driver.spawned()
            driver.exit()
    assert driver.state() is state, (state, driver.state())
    return driver
