"""Test what one event costs the core, in calls of functions."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from mlxsup.protocol.ids import ModelName, RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, Priority, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat, RowDelta, Step
from mlxsup.supervisor.core import fleet
from mlxsup.supervisor.core.actions import Deadlines
from mlxsup.supervisor.core.events import Reloaded, WorkerSaid
from mlxsup.supervisor.core.memory_plan import Plan, plan
from mlxsup.supervisor.core.memory_view import MemoryView
from mlxsup.supervisor.core.model import Model
from mlxsup.supervisor.core.prefill_slots import PrefillSlots
from mlxsup.supervisor.core.serving import Serving
from mlxsup.supervisor.core.settings import ClientSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.memory import MemoryDriver, limited, sized
from support.core.rows import FIXED, ONE_ROW, RowsDriver

OTHERS = "abcdefghijkl"


def serving(rows: int, *, waiting: int = 0, accounts: int = 100, others: int = 0) -> MemoryDriver:
    """A model with that many rows and waiting requests, and that many other READY models."""
    launch = replace(LAUNCH, max_concurrency=rows, memory_limit_bytes=1)
    models = [entry(launch=launch), *(sized(name, 1) for name in OTHERS[:others])]
    limits = limited(len(models), max_queue=10**6, max_queue_per_client=10**6)
    driver = MemoryDriver(models, limits)
    driver.is_checked = False
    driver.bring_up(*(model.name for model in models))
    classes = tuple(Priority)
    for number in range(rows + waiting):
        driver.ask(
            f"r{number}", process=f"process {number % accounts}@1", priority=classes[number % 3]
        )
    for key in list(driver.model().batch.running):
        driver.accept(key)
    for _ in range(3):  # the first token of a row costs more than the others
        driver.core.handle(step(driver))
    return driver


def step(driver: Driver, *, ends: bool = False) -> WorkerSaid:
    """A step that gives each row a token, and may end the first."""
    driver.now += 0.01
    keys = list(driver.model().batch.running)
    rows = [
        RowDelta(
            key=RequestKey(key), text="x", tokens=pack_tokens([9]),
            finish=FinishReason.STOP if ends and key == keys[0] else None,
        )
        for key in keys
    ]  # fmt: skip
    message = Step(step=1, rows=rows, took_s=0.01, decode_s=0.01)
    return WorkerSaid(
        now=driver.now, model=ModelName("m"), generation=driver.generation(), message=message
    )


def calls_of(function: Callable[[], object]) -> int:
    """Return the number of calls, those of the interpreter included.

    The garbage collector is held meanwhile: it runs when it likes, and calls what others gave it.
    """
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count


def calls_of_step(driver: Driver, *, ends: bool = False) -> int:
    event = step(driver, ends=ends)
    return calls_of(lambda: driver.core.handle(event))


def test_a_step_costs_the_same_however_many_wait_and_however_many_models_there_are() -> None:
    alone = calls_of_step(serving(4))
    assert calls_of_step(serving(4, others=12)) == alone
    assert calls_of_step(serving(4, waiting=500)) == alone


def test_a_token_looks_at_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = serving(4)
    looks: list[float | None] = []
    earliest = Deadlines.earliest

    def noted(self: Deadlines) -> float | None:
        looks.append(earliest(self))
        return looks[-1]

    monkeypatch.setattr(Deadlines, "earliest", noted)
    driver.core.handle(step(driver))
    assert looks == []
    driver.ask("more")
    assert looks, "its limit may be the next"


def test_the_end_of_a_client_with_max_running_touches_the_others_once() -> None:
    """From then on, a token touches none again."""
    driver = serving(4, others=12)
    held = replace(driver.core.fleet.settings, clients={"r": ClientSettings(max_running=1)})
    models = tuple(model.life.settings for model in driver.core.fleet)
    driver.core.handle(Reloaded(now=driver.now, settings=held, models=models))
    before = calls_of_step(driver)
    driver.ask("held", "a", client="r")
    driver.cancel("held")
    assert calls_of_step(driver) == before


def test_a_step_costs_the_same_for_each_of_its_rows() -> None:
    one, two, many = (calls_of_step(serving(rows)) for rows in (1, 2, 32))
    assert many - one == 31 * (two - one)


def beat(driver: Driver) -> WorkerSaid:
    driver.now += 0.5
    watch = driver.model().process.watch
    assert watch is not None
    message = Heartbeat(
        step=1, phase=WorkerPhase.DECODE, phase_s=0.0, requests=driver.model().batch.rows,
        sent=watch.heard, received=watch.told,
    )  # fmt: skip
    return WorkerSaid(
        now=driver.now, model=ModelName("m"), generation=driver.generation(), message=message
    )


def calls_of_beat(driver: Driver) -> int:
    event = beat(driver)
    return calls_of(lambda: driver.core.handle(event))


def test_a_beat_costs_the_same_however_much_there_is_to_do() -> None:
    """It moves the deadline of its process, and nothing else; forgetting times that were replaced
    takes a few calls, now and then."""
    alone = calls_of_beat(serving(4))
    among = (serving(4, others=12), serving(4, waiting=500), serving(16))
    assert max(map(calls_of_beat, among)) < alone + 8


def test_the_progress_of_a_load_asks_for_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MemoryDriver([sized("a", 1)], limited(1))
    driver.load("a")
    plans: list[object] = []

    def noted(view: MemoryView) -> Plan:
        plans.append(view)
        return plan(view)

    monkeypatch.setattr(fleet, "plan", noted)
    driver.spawned("a")
    driver.hello("a")
    driver.progress(0.5, "a")
    before = len(plans)
    driver.ready("a")
    assert (before, len(plans) > 0) == (0, True)


def test_an_end_next_to_twelve_models_costs_not_one_call_for_each() -> None:
    """No request waits for a load, and none is read, so no other model is looked at."""
    alone, among = (calls_of_step(serving(4, others=others), ends=True) for others in (0, 12))
    assert among < alone + 12


def test_nothing_is_granted_when_requests_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = serving(4, others=3)
    granted: list[object] = []
    grant = PrefillSlots.grant

    def noted(self: PrefillSlots, *arguments: Any) -> list[Model]:
        granted.append(arguments)
        return grant(self, *arguments)

    monkeypatch.setattr(PrefillSlots, "grant", noted)
    driver.ask("more")
    driver.core.handle(step(driver, ends=True))
    assert granted == []
    driver.unload("a")
    assert granted, "a model takes part no longer"


def test_an_end_and_the_next_dispatch_cost_little_more_in_a_line_of_thousands() -> None:
    """By the logarithm of how many accounts wait."""

    def in_line(waiting: int) -> int:
        driver = serving(1, waiting=waiting, accounts=waiting // 4)
        calls = []
        for number in range(24):
            driver.ask(f"more {number}", process=f"process {number % 8}@1")
            calls.append(calls_of_step(driver, ends=True))
        return sum(calls)

    assert in_line(512) <= 1.2 * in_line(64)


def test_a_step_looks_for_no_room_while_a_request_waits_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows only grow until one ends, so all that may change is whose turn it is."""
    driver = RowsDriver("a", FIXED + ONE_ROW)
    driver.bring_up("a")
    running = driver.begin("a", "r1", 3000)
    driver.gain("a", running, 1)
    [short] = driver.serve("r2", model="a")
    driver.short("a", short)
    looks: list[Model] = []
    dispatch = Serving.dispatch

    def noted(self: Serving, model: Model, now: float) -> None:
        looks.append(model)
        dispatch(self, model, now)

    monkeypatch.setattr(Serving, "dispatch", noted)
    driver.gain("a", running, 1)
    assert (driver.model("a").batch.held_back, looks) == (short, [])
    driver.ask("r3", "a")
    assert looks
