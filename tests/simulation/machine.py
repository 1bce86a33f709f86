"""A world that does what it is asked for, and rules that let Hypothesis ask for anything.

No dice decide anything here: a run follows from its events alone, so that a failing one shrinks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mlxsup.protocol import client_messages as client
from mlxsup.protocol.client_messages import PauseRequest, ResumeRequest
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.core.events import ShutdownAsked
from mlxsup.supervisor.core.settings import (
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)

from .books import Ask
from .clients import ACCOUNTS
from .plan import LAYERS, MODELS, REPOSITORIES, Kind, Plan, Prompt, SteadyDice
from .world import World

FAULTS = (
    "kill", "term", "segv", "raise_70", "gpu_72", "oom_75", "oom_kill", "stop", "stall", "blocked",
    "mute", "garbage", "link_drops", "row_lost", "idle_dies", "unkillable", "spawn_fails",
    "load_dies", "load_raises", "load_lacks_memory", "load_stalls", "bad_model", "other_version",
)  # fmt: skip
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

    def __init__(self, plan: Plan, *, has_invariants: bool = False) -> None:
        self.world = World(plan, has_invariants=has_invariants)
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
        return self._send(of, model=self.model(model), prompt=prompt, **more)

    def again(self, ask: Ask) -> Ask:
        """Send the same request once more."""
        return self._send(0, model=ask.model, prompt=ask.prompt, may_resume=ask.may_resume)

    def _send(self, of: int, **fields: Any) -> Ask:
        client = self.people.clients[of]
        ask = Ask(connection=client.name, id=client.new_id(), **fields)
        self.people.send(client, ask)
        return ask

    def open(self, place: int, *, paused: bool | None = None) -> Ask | None:
        """Return an open request, or None."""
        found = [ask for ask in self.people.asked if ask.is_open]
        found = [ask for ask in found if paused is None or ask.is_put_aside is paused]
        return found[place % len(found)] if found else None

    def cancel(self, ask: Ask) -> None:
        """Cancel a request in its client's name."""
        for one in self.people.clients:
            if one.name == ask.connection:
                self.people.say(one, client.Cancel(id=RequestId(ask.id)))

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


which = st.integers(0, 3)
models = st.integers(0, 2)
classes = st.sampled_from(list(Priority))
ODD = (
    {"poison_at": 0}, {"poison_at": 3}, {"is_refused": True}, {"is_too_large": True},
    {"is_long": True}, {"total_s": 1.0}, {"first_token_s": 0.5}, {"queue_s": 0.3},
)  # fmt: skip


class WorldMachine(RuleBasedStateMachine):
    """Any events in any order; the record judges what the core makes of them."""

    script: Script

    @initialize(
        count=st.integers(1, 3),
        rows=st.integers(1, 3),
        room=st.integers(0, 2),
        takes=st.booleans(),
        pinned=st.booleans(),
        lacks=st.booleans(),
        idle_s=st.sampled_from([0.0, 2.5]),
        settings=st.fixed_dictionaries(
            {
                "aging_s": st.sampled_from([0.0, 2.3]),
                "max_parallel_prefills": st.sampled_from([None, 1]),
                "parallel_loads": st.integers(1, 2),
                "queue_timeout_s": st.sampled_from([0.0, 4.0]),
                "max_queue": st.sampled_from([100, 4]),
                "clients": st.sampled_from(
                    [{}, {"ann": ClientSettings(weight=3.0, max_running=1)}]
                ),
            }
        ),
    )
    def start(self, idle_s: float, settings: dict[str, Any], **plan: Any) -> None:
        made = steady_plan(**plan, **settings)
        made.models = [replace(one, idle_unload_s=idle_s) for one in made.models]
        self.script = Script(made, has_invariants=True)

    @rule(
        model=models,
        of=st.integers(0, 2),
        length=st.sampled_from([1, 8, 40]),
        tokens=st.sampled_from([0, 0, 800]),
        may_resume=st.sampled_from([True, True, True, False]),
        priority=st.none() | classes,
        client=st.sampled_from([None, *ACCOUNTS]),
        wants_notices=st.booleans(),
    )
    def ask(self, **more: Any) -> None:
        self.script.ask(**more)

    @rule(model=models, what=st.sampled_from(ODD))
    def ask_oddly(self, model: int, what: dict[str, Any]) -> None:
        self.script.ask(model, **what)

    @rule(place=which)
    def ask_again(self, place: int) -> None:
        if asked := self.script.people.asked:
            self.script.again(asked[-1 - place % len(asked)])

    @rule(place=which, by_another=st.booleans())
    def cancel(self, place: int, by_another: bool) -> None:
        if ask := self.script.open(place):
            (self.script.people.cancel_by_name if by_another else self.script.cancel)(ask)

    @rule(place=which, resume=st.booleans())
    def pause(self, place: int, resume: bool) -> None:
        if ask := self.script.open(place, paused=resume):
            self.script.people.tell(ResumeRequest if resume else PauseRequest, ask)

    @rule(place=which, priority=classes)
    def prioritize(self, place: int, priority: Priority) -> None:
        if ask := self.script.open(place):
            self.script.say(client.Prioritize, request=RequestId(ask.id), priority=priority)

    @rule(place=which, count=st.sampled_from([1, 1, 9]))
    def attach(self, place: int, count: int) -> None:
        if ask := self.script.open(place):
            for _ in range(count):
                self.script.people.join(ask)

    @rule(place=st.integers(0, 2), is_slow=st.booleans())
    def leave(self, place: int, is_slow: bool) -> None:
        people = self.script.people
        if is_slow:
            people.be_slow(people.clients[place])
        else:
            people.leave(place)

    @rule(model=models, dry_run=st.booleans())
    def load(self, model: int, dry_run: bool) -> None:
        self.script.say(client.Load, model=self.script.model(model), dry_run=dry_run)

    @rule(model=models)
    def unload(self, model: int) -> None:
        self.script.say(client.Unload, model=self.script.model(model))

    @rule(model=models, now=st.booleans())
    def restart(self, model: int, now: bool) -> None:
        self.script.say(client.Restart, model=self.script.model(model), now=now)

    @rule()
    def status(self) -> None:
        self.script.say(client.StatusQuery)

    @rule(
        model=models,
        change=st.sampled_from(["gone", "rows", "idle", "as before"]),
        dry_run=st.booleans(),
    )
    def reload(self, model: int, change: str, dry_run: bool) -> None:
        entries = list(self.script.world.plan.models)
        place = model % len(entries)
        entry = entries[place]
        if change == "gone":
            del entries[place]
        elif change == "rows":
            rows = entry.launch.max_concurrency % 3 + 1
            entries[place] = replace(entry, launch=replace(entry.launch, max_concurrency=rows))
        elif change == "idle":
            entries[place] = replace(entry, idle_unload_s=4.0)
        self.script.people.entries = entries
        self.script.say(client.Reload, dry_run=dry_run)

    @precondition(lambda self: len(self.script.people.asked) > 4)
    @rule(is_now=st.booleans(), by_signal=st.booleans())
    def stop(self, is_now: bool, by_signal: bool) -> None:
        world = self.script.world
        if by_signal:
            world.handle(ShutdownAsked(now=world.time.now, is_immediate=is_now))
        else:
            self.script.say(client.Stop, now=is_now, timeout_s=None)

    @rule(fault=st.sampled_from(FAULTS))
    def strike(self, fault: str) -> None:
        self.script.strike(fault)

    @rule(model=models, size=st.sampled_from([4000, 6000]))
    def grow(self, model: int, size: int) -> None:
        self.script.grow(model, size)

    @rule(share=st.sampled_from([0.0, 1.2, 1.6, 2.1]))
    def others_take_memory(self, share: float) -> None:
        self.script.world.machine.take(share)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.1, 0.6, 3.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.script.time_passes(seconds)

    def teardown(self) -> None:
        """Let everything come to its end."""
        if hasattr(self, "script") and not self.script.world.is_broken:
            self.script.world.finish()
