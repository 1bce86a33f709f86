"""A core with a memory budget, and models that need a part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.client_messages import Event, Load, Reply
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import FinishReason, State
from mlxsup.supervisor.core.budget import Budget
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core.driver import LAUNCH, Driver, entry

GIB = 2**30
SUBSCRIPTION = RequestId("s")


def budget(size_bytes: int) -> Budget:
    """A budget that the configuration gives."""
    return Budget(size_bytes=size_bytes, machine_bytes=100 * GIB, reason="memory_budget")


def sized(name: str, needed_bytes: int, **changes: Any) -> ModelSettings:
    """A model whose entry says how much memory it takes."""
    launch = replace(LAUNCH, memory_limit_bytes=needed_bytes)
    return entry(name, launch=launch, **changes)


def limited(budget_bytes: int, **changes: Any) -> CoreSettings:
    """Settings with a memory budget; models stay for ten seconds."""
    settings = CoreSettings(
        max_queue=8,
        max_queue_per_client=4,
        drain_timeout_s=5.0,
        min_residency_s=10.0,
        budget=budget(budget_bytes),
    )
    return replace(settings, **changes)


class MemoryDriver(Driver):
    """Plays workers whose pids are their models' letters, and whose loads take a second."""

    def come_up(self, model: str = "m", pid: int = 0) -> None:
        """From the spawn to READY, in a second."""
        self.spawned(model, pid or ord(model))
        self.hello(model)
        self.now += 1.0
        self.ready(model)

    def bring_up(self, *models: str) -> None:
        """Loads models by command, one after the other."""
        for model in models:
            self.load(model)
            self.come_up(model)

    def use(self, model: str, id: str) -> None:
        """One whole request, of a model that is READY."""
        for key in self.serve(id, model=model):
            self.accept(key, model)
            self.token(key, model=model, finish=FinishReason.STOP)

    def foresees(self, model: str) -> dict[str, Any]:
        """`mlxsup load --dry-run`; empty if it failed."""
        load = Load(id=RequestId(f"dry-{model}"), model=ModelName(model), dry_run=True)
        self.say(load)
        return self.sent(Reply)[0].value if self.sent(Reply) else {}

    def row_ends(self, model: str, key: int) -> None:
        """The one row of a model ends."""
        self.accept(key, model)
        self.token(key, model=model, finish=FinishReason.STOP)

    def reserved(self) -> int:
        """What the status says is reserved."""
        value: int = self.core.status(self.now)["memory"]["reserved_bytes"]
        return value


def pair_and_more(*more: ModelSettings) -> MemoryDriver:
    """`a` and `b` of 4 GiB each are READY and fill the budget; `c` of 4 GiB is not loaded."""
    models = [sized("a", 4 * GIB), sized("b", 4 * GIB), sized("c", 4 * GIB), *more]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.bring_up("a", "b")
    assert driver.reserved() == 8 * GIB
    return driver


def states(driver: Driver, names: str = "abc") -> list[State]:
    """The states of models with these letters."""
    return [driver.state(name) for name in names]


def notes(driver: Driver) -> list[str]:
    """What the latest event said to a subscriber about each change."""
    return [event.value["note"] for event in driver.sent(Event)]
