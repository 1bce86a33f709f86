"""Suspects that take turns in an engine with memory for one row only."""

from __future__ import annotations

from mlxsup.protocol.worker_messages import PauseRow
from mlxsup.supervisor.core.health.blame import PROBATION_TOKENS

from support.suspects import crash, engine_of, gain, prove


def test_a_new_request_starts_before_the_next_turn_in_an_engine_of_one_row() -> None:
    driver = engine_of(4)
    driver.serve("a", "b", "c")
    crash(driver)
    crash(driver)
    for number in range(6):
        driver.ask(f"n{number}", body=f"n{number}".encode())
    prove(driver, 1)
    crash(driver, signal="", code=75)
    assert driver.row()["row_limit"] == 1
    served = []
    for _ in range(4):
        [(key, request)] = driver.model().running.items()
        served.append(request.id)
        for _ in range(PROBATION_TOKENS + 2):
            gain(driver, key)
            if driver.told(PauseRow):
                driver.row_left(key)
                break
    assert served == ["n0", "b", "n1", "c"]
