"""When the core looks for models that may load: while any waits, and once anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxsup.protocol.states import FinishReason, State
from mlxsup.supervisor.core import load_looks
from mlxsup.supervisor.core.events import Reloaded, Sampled
from mlxsup.supervisor.core.loading import next_steps

from support.core_driver import Driver
from support.core_memory import GIB, MemoryDriver, limited, pair_and_more, sized, states


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What each look has found."""
    found: list[object] = []

    def noted(*arguments: Any) -> object:
        found.append(next_steps(*arguments))
        return found[-1]

    monkeypatch.setattr(load_looks, "next_steps", noted)
    return found


def whole_answer(driver: Driver) -> None:
    [key] = driver.serve("r", model="a")
    driver.accept(key, "a")
    driver.token(key, model="a")
    driver.beat(model="a")
    driver.token(key, model="a", finish=FinishReason.STOP)


def test_requests_that_come_and_go_are_no_reason_to_look(looks: list[object]) -> None:
    driver = MemoryDriver([sized("a", GIB), sized("b", GIB)], limited(2 * GIB))
    driver.bring_up("a", "b")
    whole_answer(driver)
    assert looks[-1] is None, "nothing was found, once what came before had settled"
    looks.clear()
    for _ in range(3):
        whole_answer(driver)
    assert looks == []


def test_while_a_model_waits_each_event_is_a_reason_to_look(looks: list[object]) -> None:
    driver = pair_and_more()
    driver.serve("r", model="a")
    driver.ask("s", "b")
    driver.load("c")
    assert states(driver) == [State.READY, State.READY, State.PENDING]
    looks.clear()
    for count, id in enumerate("tuv", 1):
        driver.ask(id, "a")
        assert len(looks) == count


def measure(driver: MemoryDriver, **footprints: int) -> None:
    """What the processes of models with these letters hold, in GiB."""
    footprint = {ord(name): size * GIB for name, size in footprints.items()}
    driver.do(Sampled(now=driver.now, footprint_bytes=footprint, machine_bytes=99 * GIB))


CHANGES: dict[str, Callable[[MemoryDriver], object]] = {
    "a load": lambda driver: driver.load("c"),
    "an unload": lambda driver: driver.unload("a"),
    "a crash": lambda driver: driver.exit("a"),
    "a measurement": lambda driver: measure(driver, a=5),
    "a reload": lambda driver: driver.do(
        Reloaded(
            now=driver.now,
            settings=limited(4 * GIB),
            models=(sized("a", 4 * GIB), sized("b", 4 * GIB)),
            caller=None,
            later=(),
        )
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_load_depends_on_is_a_reason_to_look(change: str, looks: list[object]) -> None:
    driver = pair_and_more()
    driver.use("a", "first")
    driver.use("a", "second")
    looks.clear()
    driver.use("b", "third")
    assert looks == []
    CHANGES[change](driver)
    assert looks


def test_a_model_that_grows_while_it_is_busy_goes_once_it_is_idle() -> None:
    """More is reserved than there is, and nothing else happens than that its request ends."""
    driver = pair_and_more()
    [key] = driver.serve("r", model="a")
    [other] = driver.serve("s", model="b")
    driver.accept(key, "a")
    driver.accept(other, "b")
    driver.now += 20.0
    measure(driver, a=6, b=4)
    driver.now += 20.0
    measure(driver, a=6, b=4)
    assert states(driver, "ab") == [State.READY, State.READY]
    driver.row_ends("a", key)
    assert driver.state("a") is State.STOPPING
