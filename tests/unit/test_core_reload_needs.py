"""A reload applies what models need together with the budget, the pins and the entries."""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.events import Appraised, Reloaded
from mlxsup.supervisor.core.memory.need import Need

from support.core_driver import LAUNCH, entry
from support.core_memory import GIB, MemoryDriver, limited, states
from support.needs import need

LONGER = replace(LAUNCH, context_length=4096)


def needs_of(**gib: int) -> dict[ModelName, Need]:
    return {ModelName(name): need(size * GIB, layers=()) for name, size in gib.items()}


def serving(pinned: str = "", **gib: int) -> MemoryDriver:
    """Models that need so much of 8 GiB."""
    driver = MemoryDriver([entry(name, pinned=name in pinned) for name in gib], limited(8 * GIB))
    driver.do(Appraised(now=driver.now, needs=needs_of(**gib)))
    return driver


def reload(driver: MemoryDriver, budget_gib: int, *, pinned: str = "", **gib: int) -> None:
    """The first of these models has a longer context now, and they need so much."""
    first = next(iter(gib))
    models = tuple(
        entry(name, pinned=name in pinned, launch=LONGER if name == first else LAUNCH)
        for name in gib
    )
    settings = limited(budget_gib * GIB)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models, needs=needs_of(**gib)))


def test_who_waits_is_planned_with_the_new_need_and_the_new_budget_at_once() -> None:
    driver = serving(b=5, a=4)
    driver.bring_up("a")
    driver.serve("r1", model="a")
    driver.ask("r2", "b")
    assert driver.state("b") is State.PENDING
    reload(driver, 24, b=14, a=4)
    assert driver.errors() == {}
    assert (driver.state("b"), driver.row("b")["needed_bytes"]) == (State.LOADING, 14 * GIB)
    assert driver.reserved() == 18 * GIB


def test_nobody_is_evicted_for_a_pin_that_grows_with_the_budget() -> None:
    driver = serving("p", p=4, a=4)
    driver.bring_up("p", "a")
    driver.serve("r1", model="p")
    reload(driver, 16, pinned="p", p=10, a=4)
    assert states(driver, "pa") == [State.DRAINING, State.READY]
    assert driver.reserved() == 14 * GIB


def test_a_model_that_is_new_is_planned_with_what_it_needs() -> None:
    driver = serving(a=4)
    driver.bring_up("a")
    reload(driver, 8, b=3, a=4)
    assert driver.row("b")["needed_bytes"] == 3 * GIB


def test_what_no_file_can_be_read_of_any_longer_is_not_known() -> None:
    driver = serving(a=4)
    settings, models = limited(8 * GIB), (entry("a"),)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models, needs={}))
    assert driver.row("a")["needed_bytes"] == 0
