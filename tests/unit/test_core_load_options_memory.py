"""A load with another context length is refused before it changes anything if it can never fit."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.client_messages import Load
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.actions import AdoptLaunch, AppraiseLaunch
from mlxsup.supervisor.core.events import Appraised
from mlxsup.supervisor.core.memory.need import Figure, Need, Source

from support.core_driver import entry
from support.core_memory import GIB, MemoryDriver, limited, states

A = ModelName("a")


def need_of(gib: float, raised_gib: float = 0) -> Need:
    """A model that needs so much, and what running out of memory has raised that by."""
    return Need(
        weights=Figure(size_bytes=0, source=Source.MEASURED),
        own=Figure(size_bytes=int(gib * GIB), source=Source.MEASURED),
        layers=(),
        layers_source=Source.MEASURED,
        context_tokens=100,
        least_tokens=100,
        max_rows=2,
        raised_bytes=int(raised_gib * GIB),
    )


def models(pinned: str = "", raised_gib: float = 0, **changes: Any) -> MemoryDriver:
    """`a`, `b` and `c` need 4 GiB each of 16; `b` more if its processes ran out of memory."""
    entries = [entry(name, pinned=name in pinned) for name in "abc"]
    driver = MemoryDriver(entries, limited(16 * GIB, **changes))
    needs = {ModelName(name): need_of(4) for name in "abc"}
    needs[ModelName("b")] = need_of(4, raised_gib)
    driver.do(Appraised(now=driver.now, needs=needs))
    return driver


def load_longer(driver: MemoryDriver, gib: float) -> RequestId:
    """Loads `a` with a context with which it needs so much."""
    driver.say(Load(id=RequestId("longer"), model=A, context_length=4096))
    [asked] = driver.of(AppraiseLaunch)
    driver.do(asked.answered(need_of(gib), now=driver.now))
    return RequestId("longer")


def refusal(driver: MemoryDriver) -> str:
    """Why the load was refused; nothing of it may be left."""
    error = driver.failure_of("longer").error
    assert error["code"] == ErrorCode.INSUFFICIENT_MEMORY
    assert driver.model("a").life.launch.context_length == 0
    assert driver.row("a")["needed_bytes"] == 4 * GIB
    assert driver.of(AdoptLaunch) == []
    return str(error["message"])


@pytest.mark.parametrize("pinned", ["", "a"])
def test_what_is_larger_than_the_budget_leaves_everything_as_it_is(pinned: str) -> None:
    driver = models(pinned)
    driver.bring_up("a", "b", "c")
    [key] = driver.serve("r1", model="a")
    load_longer(driver, 40)
    assert refusal(driver) == (
        "a cannot be loaded: it needs 40.00 GiB, and the memory budget is 16.00 GiB"
    )
    assert states(driver) == [State.READY] * 3
    assert driver.reserved() == 12 * GIB
    driver.row_ends("a", key)
    assert driver.errors() == {}


def test_a_model_that_is_not_loaded_can_still_be_loaded_as_configured() -> None:
    driver = models()
    load_longer(driver, 17)
    refusal(driver)
    assert driver.state("a") is State.STOPPED
    driver.load("a")
    assert driver.state("a") is State.LOADING


def test_next_to_what_is_pinned_it_must_fit_too() -> None:
    driver = models("bc")
    load_longer(driver, 9)
    assert refusal(driver) == (
        "a cannot be loaded: it needs 9.00 GiB of 16.00 GiB: b is pinned and holds 4.00 GiB;"
        " c is pinned and holds 4.00 GiB"
    )


def test_next_to_a_process_that_cannot_be_ended_it_must_fit_too() -> None:
    driver = models()
    driver.bring_up("b")
    driver.unload("b")
    driver.pass_time(100.0)
    load_longer(driver, 13)
    assert "b has a process that cannot be ended and holds 4.00 GiB" in refusal(driver)


def test_what_fits_is_reserved_and_the_shell_keeps_it() -> None:
    driver = models("b")
    load_longer(driver, 12)
    [adopted] = driver.of(AdoptLaunch)
    assert (adopted.model, adopted.launch.context_length) == ("a", 4096)
    assert adopted.need == need_of(12)
    assert driver.state("a") is State.LOADING
    assert driver.reserved() == 16 * GIB


def test_what_was_raised_for_a_pinned_model_gives_way() -> None:
    driver = models("b", raised_gib=6)
    assert driver.row("b")["reserved_bytes"] == 10 * GIB
    load_longer(driver, 11)
    assert driver.state("a") is State.LOADING
    assert driver.row("b")["reserved_bytes"] == 5 * GIB


def test_without_a_budget_nothing_is_refused() -> None:
    driver = models(budget=None)
    load_longer(driver, 400)
    assert driver.state("a") is State.LOADING
