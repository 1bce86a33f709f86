"""What a model needs for an answer that has begun counts as long as that answer is open."""

from __future__ import annotations

import pytest

from mlxsup.protocol.client_messages import Failed
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.events import Reloaded

from support.core_looks import ALICE
from support.core_memory import limited, states
from support.core_rows import FIXED, ONE_ROW, RowsDriver, bytes_for, served
from support.core_shortage import ShortageDriver

MODEL = FIXED + ONE_ROW
LONG = 5000
WITH_LONG = FIXED + bytes_for(1, LONG + 1 + 256)


def after_long_stream(budget_bytes: int) -> RowsDriver:
    """`p` is pinned; it was loaded again for a long answer, which has ended since."""
    driver = RowsDriver("pm", budget_bytes, pinned="p")
    driver.bring_up("p")
    key = driver.begin("p", "r1", LONG)
    driver.gain("p", key, 1)
    driver.exit("p")
    assert driver.row("p")["needed_bytes"] == WITH_LONG
    driver.come_up("p")
    driver.end("p", key)
    driver.confirm("p")
    return driver


def test_a_pinned_model_keeps_no_memory_for_an_answer_that_has_ended() -> None:
    driver = after_long_stream(2 * MODEL)
    assert driver.row("p")["needed_bytes"] == MODEL
    assert driver.foresees("m")["outcome"] == "fits"
    driver.ask("r2", "m")
    assert driver.errors() == {}
    driver.confirm("p")
    driver.measure()
    assert driver.state("m") is State.LOADING
    assert driver.reserved() == 2 * MODEL


def test_nor_does_it_once_it_is_unloaded() -> None:
    driver = after_long_stream(2 * MODEL)
    driver.unload("p")
    driver.exit("p", code=0)
    assert (driver.state("p"), driver.reserved()) == (State.STOPPED, MODEL)
    assert driver.foresees("p")["needed_bytes"] == MODEL


@pytest.mark.parametrize("crashes", [1, 2])
def test_after_a_crash_a_model_keeps_what_its_answers_need(crashes: int) -> None:
    """They have grown since it was loaded; the second time it waits for a while."""
    driver = RowsDriver("a", 2 * WITH_LONG)
    driver.bring_up("a")
    for _ in range(crashes - 1):
        driver.exit("a")
        driver.come_up("a")
    key = driver.begin("a", "r1", LONG)
    driver.gain("a", key, 1)
    driver.exit("a")
    assert driver.state("a") is (State.LOADING if crashes == 1 else State.BACKOFF)
    assert driver.reserved() == WITH_LONG


def test_who_could_not_return_with_its_answer_stays() -> None:
    """As it was loaded, the one that has been there for longest would fit."""
    driver = ShortageDriver("ab")
    driver.start("a", "r1", LONG)
    driver.start("b", "r2", 100)
    driver.now += 20.0
    models = tuple(served(name) for name in "ab")
    settings = limited(WITH_LONG - 1, min_residency_s=0.0)
    assert settings.budget is not None
    driver.do(
        Reloaded(now=driver.now, settings=settings, models=models, needs=driver.core.fleet.needs)
    )
    driver.measure()
    assert states(driver, "ab") == [State.READY, State.DRAINING]
    assert not [one for one in driver.terminals.get((ALICE, "r1"), []) if isinstance(one, Failed)]
