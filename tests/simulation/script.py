"""A world without dice, which does what it is asked for: a run follows from its events alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor.core.settings import (
    CoreSettings,
    ModelSettings,
    RestartSettings,
)

from .books import Ask
from .plan import LAYERS, MODELS, REPOSITORIES, Kind, Plan, Prompt, SteadyDice
from .world import World

# What a model needs without rows, in bytes.
SIZE = 3000


def steady_plan(
    *,
    count: int = 2,
    rows: int = 2,
    room: int = 0,
    takes: bool = False,
    pinned: bool = False,
    lacks: bool = False,
    max_restarts: int = 3,
    **settings: Any,
) -> Plan:
    """Return a plan without chance.

    Args:
        count: of models.
        rows: of each.
        room: so many models fit into the memory budget, and half of another one; 0: no budget.
        takes: whether rows take memory.
        pinned: whether the first model is pinned.
        lacks: whether the last one has to be downloaded first.
        max_restarts: of each in a minute.
        settings: of the core, that are not as usual.
    """
    restart = RestartSettings(
        max_restarts=max_restarts,
        window_s=60.0,
        stable_s=2.0,
        backoff_initial_s=0.2,
        backoff_max_s=0.8,
    )
    entries = [
        ModelSettings(
            name=ModelName(name),
            launch=LaunchSettings(
                path=f"/{name}", engine="fake", max_concurrency=rows, step_timeout_s=2.0
            ),
            preload=False,
            load_stall_timeout_s=6.0,
            restart=restart,
        )
        for name in MODELS[:count]
    ]
    if lacks:
        entries[-1] = replace(entries[-1], repo=REPOSITORIES[0].repo, download=REPOSITORIES[0])
    if pinned and room:
        entries[0] = replace(entries[0], pinned=True)
    usual: dict[str, Any] = {"queue_timeout_s": 0.0, "drain_timeout_s": 3.0, "min_run_s": 0.1}
    links = ("client_up", "client_down", "worker_up", "worker_down")
    plan = Plan(
        seed=0,
        kind=Kind.CALM,
        random=SteadyDice(),
        models=entries,
        settings=CoreSettings(**usual | settings),
        faults={},
        delays_s=dict.fromkeys(links, 0.01) | {"beat": 0.0},
        step_s=0.05,
        layers=LAYERS if takes else (),
        is_steady=True,
    )
    plan.needs = {entry.name: SIZE + plan.row_bytes for entry in entries}
    if room:
        plan.set_budget((SIZE + plan.row_bytes) * (2 * room + 1) // 2)
        plan.settings = replace(plan.settings, min_residency_s=0.5, swap_after_s=0.5)
    return plan


class Script:
    """A world that does what it is asked for, event by event."""

    def __init__(self, plan: Plan) -> None:
        self.world = World(plan, has_invariants=False)
        self.people = self.world.people
        self.say = self.people.command
        self.time_passes = self.world.time.pass_time
        self.people.resume_in_time()
        self.world.begin()

    def model(self, place: int) -> ModelName:
        entries = self.world.plan.models
        return entries[place % len(entries)].name

    def ask(self, model: int = 0, *, of: int = 0, length: int = 8, **more: Any) -> Ask:
        """Ask for an answer of `length` tokens; `more` of the request or of the prompt."""
        plan = self.world.plan
        plan.prompts += 1
        names = [name for name in more if name in Prompt.__dataclass_fields__]
        prompt = Prompt(
            number=plan.prompts,
            body=b"prompt %d" % plan.prompts,
            length=length,
            **{name: more.pop(name) for name in names},
        )
        client = self.people.clients[of]
        ask = Ask(
            connection=client.name,
            id=client.new_id(),
            model=self.model(model),
            prompt=prompt,
            **more,
        )
        self.people.send(client, ask)
        return ask

    def grow(self, model: int, size: int) -> None:
        """Let the process of a model hold so many bytes, if it serves."""
        for worker in self.world.workers.values():
            if worker.model == self.model(model) and worker.is_ready and worker.is_alive:
                self.world.machine.overgrown[worker.pid] = size

    def until_rows(self, count: int) -> None:
        """Let time pass until the only worker has so many rows that are being answered."""
        for _ in range(1000):
            batches = [worker.batch for worker in self.world.workers.values()]
            if sum(row.has_spoken for one in batches for row in one.rows.values()) == count:
                return
            self.time_passes(0.02)
        raise AssertionError(f"never {count} rows")

    def strike(self, fault: str) -> None:
        """Have a fault strike where it can next."""
        self.world.to_strike.append(fault)
