"""The world's events as rules of one Hypothesis machine, which shrinks what seeds only find.

No dice decide anything here: a run follows from its rules alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mlxsup.protocol.client_messages import (
    Cancel,
    Load,
    Prioritize,
    Reload,
    Restart,
    StatusQuery,
    Stop,
    Unload,
)
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.request_messages import PauseRequest, ResumeRequest
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.core.events import ShutdownAsked
from mlxsup.supervisor.core.settings import (
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)

from .books import Ask, Place
from .plan import LAYERS, MODELS, Kind, Plan, Prompt, SteadyDice, budget_of
from .requests import ACCOUNTS, Listener
from .shell import REPOSITORIES
from .world import World

FAULTS = (
    "kill", "term", "segv", "raise_70", "gpu_72", "oom_75", "oom_kill", "stop", "stall", "blocked",
    "mute", "garbage", "link_drops", "row_lost", "idle_dies", "unkillable", "spawn_fails",
    "load_dies", "load_raises", "load_lacks_memory", "load_stalls", "bad_model", "other_version",
)  # fmt: skip
"""One of them strikes where it can; those that dice strike in seeds."""

SIZE = 3000
"""What a model needs without rows, in bytes."""

which = st.integers(0, 3)
models = st.integers(0, 2)
classes = st.sampled_from(list(Priority))


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
    entries = [_entry(name, rows, max_restarts) for name in MODELS[:count]]
    if lacks:
        entries[-1] = replace(entries[-1], repo=REPOSITORIES[0].repo, download=REPOSITORIES[0])
    if pinned and room:
        entries[0] = replace(entries[0], pinned=True)
    usual: dict[str, Any] = {"queue_timeout_s": 0.0, "drain_timeout_s": 3.0, "min_run_s": 0.1}
    plan = Plan(
        seed=0,
        kind=Kind.CALM,
        random=SteadyDice(),
        models=entries,
        settings=CoreSettings(**usual | settings),
        faults={},
        delays_s=dict.fromkeys(("client_up", "client_down", "worker_up", "worker_down"), 0.01)
        | {"beat": 0.0},
        step_s=0.05,
        is_limited=False,
        poison_share=0.0,
        long_share=0.0,
        kept_share=1.0,
        layers=LAYERS if takes else (),
        is_steady=True,
    )
    plan.needs = {entry.name: SIZE + plan.row_bytes for entry in entries}
    if room:
        plan.budget_bytes = (SIZE + plan.row_bytes) * (2 * room + 1) // 2
        plan.settings = replace(
            plan.settings,
            budget=budget_of(plan.budget_bytes),
            min_residency_s=0.5,
            swap_after_s=0.5,
        )
    return plan


def _entry(name: str, rows: int, max_restarts: int) -> ModelSettings:
    return ModelSettings(
        name=ModelName(name),
        launch=LaunchSettings(
            path=f"/{name}", engine="fake", max_concurrency=rows, step_timeout_s=2.0
        ),
        preload=False,
        load_stall_timeout_s=6.0,
        restart=RestartSettings(
            max_restarts=max_restarts,
            window_s=60.0,
            stable_s=2.0,
            backoff_initial_s=0.2,
            backoff_max_s=0.8,
        ),
    )


class Script:
    """A world that does what it is asked for, event by event."""

    def __init__(self, plan: Plan, *, has_invariants: bool = False) -> None:
        self.world = World(plan, has_invariants=has_invariants)
        self.people = self.world.people
        self.people.hands.begin()
        self.world.begin()

    def model(self, place: int) -> ModelName:
        """Return the name of a model."""
        entries = self.world.plan.models
        return entries[place % len(entries)].name

    def ask(self, model: int = 0, *, of: int = 0, length: int = 8, **more: Any) -> Ask:
        """Ask for an answer of `length` tokens; `more` of the request or of the prompt."""
        plan, client = self.world.plan, self.people.clients[of]
        plan.prompts += 1
        names = [name for name in more if name in Prompt.__dataclass_fields__]
        prompt = Prompt(
            number=plan.prompts,
            body=b"prompt %d" % plan.prompts,
            length=length,
            **{name: more.pop(name) for name in names},
        )
        ask = Ask(
            connection=client.name,
            id=self.people.new_id(client),
            model=self.model(model),
            prompt=prompt,
            **more,
        )
        self.people.send(client, ask)
        return ask

    def again(self, ask: Ask) -> Ask:
        """Send the same request once more."""
        client = self.people.clients[0]
        copy = Ask(
            connection=client.name,
            id=self.people.new_id(client),
            model=ask.model,
            prompt=ask.prompt,
            may_resume=ask.may_resume,
        )
        self.people.send(client, copy)
        return copy

    def open(self, place: int, *, paused: bool | None = None) -> Ask | None:
        """Return an open request, or None."""
        found = [ask for ask in self.people.asked if ask.is_open]
        if paused is not None:
            found = [a for a in found if (a.is_pausing or a.place is Place.PAUSED) is paused]
        return found[place % len(found)] if found else None

    def cancel(self, ask: Ask) -> None:
        """Cancel a request in its client's name."""
        for client in self.people.clients:
            if client.name == ask.connection:
                self.people.say(client, Cancel(id=RequestId(ask.id)))

    def say(self, message: Any, **fields: Any) -> None:
        """Send a command."""
        self.people.command(lambda id: message(id=id, **fields))

    def load(self, model: int = 0, *, dry_run: bool = False) -> None:
        """Load a model, or ask what that would do."""
        self.say(Load, model=self.model(model), dry_run=dry_run)

    def grow(self, model: int, size: int) -> None:
        """Let the process of a model hold so many bytes, if it serves."""
        for worker in self.world.living():
            if worker.model == self.model(model) and worker.is_ready and worker.is_alive:
                self.world.machine.overgrown[worker.pid] = size

    def join(self, ask: Ask) -> Listener:
        """Join the stream of a request."""
        return self.people.join(ask)

    def time_passes(self, seconds: float) -> None:
        """Let what is due within these seconds happen."""
        self.world.time.pass_time(seconds)

    def until_rows(self, count: int) -> None:
        """Let time pass until the only worker has so many rows that are being answered."""
        for _ in range(1000):
            rows = [r for w in self.world.living() for r in w.batch.rows.values() if r.has_spoken]
            if len(rows) == count:
                return
            self.time_passes(0.02)
        raise AssertionError(f"never {count} rows")

    def strike(self, fault: str) -> None:
        """Have a fault strike where it can next."""
        self.world.to_strike.append(fault)

    def finish(self) -> None:
        """Let everything come to its end, and see that it does."""
        self.world.finish()


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
        """Start a daemon."""
        made = steady_plan(**plan, **settings)
        made.models = [replace(one, idle_unload_s=idle_s) for one in made.models]
        self.script = Script(made, has_invariants=True)

    def say(self, message: Any, **fields: Any) -> None:
        """Send a command."""
        self.script.say(message, **fields)

    # ------------------------------------------------------------ clients

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
        """Ask for an ordinary answer."""
        self.script.ask(**more)

    @rule(
        model=models,
        what=st.sampled_from(
            [
                {"poison_at": 0},
                {"poison_at": 3},
                {"is_refused": True},
                {"is_too_large": True},
                {"is_long": True},
                {"total_s": 1.0},
                {"first_token_s": 0.5},
                {"queue_s": 0.3},
            ]
        ),
    )
    def ask_oddly(self, model: int, what: dict[str, Any]) -> None:
        """Ask for what is not ordinary."""
        self.script.ask(model, **what)

    @rule(place=which)
    def ask_again(self, place: int) -> None:
        """Send a request again, open or ended."""
        if asked := self.script.people.asked:
            self.script.again(asked[-1 - place % len(asked)])

    @rule(place=which, by_another=st.booleans())
    def cancel(self, place: int, by_another: bool) -> None:
        """Cancel a request."""
        ask = self.script.open(place)
        if ask is not None and by_another:
            self.script.people.cancel_by_name(ask)
        elif ask is not None:
            self.script.cancel(ask)

    @rule(place=which, resume=st.booleans())
    def pause(self, place: int, resume: bool) -> None:
        """Pause a request, or resume a paused one."""
        ask = self.script.open(place, paused=resume)
        if ask is not None:
            self.script.people.hands.tell(ResumeRequest if resume else PauseRequest, ask)

    @rule(place=which, priority=classes)
    def prioritize(self, place: int, priority: Priority) -> None:
        """Give a request another class."""
        ask = self.script.open(place)
        if ask is not None:
            self.say(Prioritize, request=RequestId(ask.id), priority=priority)

    @rule(place=which, count=st.sampled_from([1, 1, 9]))
    def attach(self, place: int, count: int) -> None:
        """Join a stream."""
        ask = self.script.open(place)
        for _ in range(count if ask is not None else 0):
            assert ask is not None
            self.script.join(ask)

    @rule(place=st.integers(0, 2), is_slow=st.booleans())
    def leave(self, place: int, is_slow: bool) -> None:
        """A client leaves, or no longer reads."""
        people = self.script.people
        if is_slow:
            people.be_slow(people.clients[place])
        else:
            people.leave(place)

    # ------------------------------------------------------------ operators

    @rule(model=models, dry_run=st.booleans())
    def load(self, model: int, dry_run: bool) -> None:
        """Load a model, or ask what that would do."""
        self.script.load(model, dry_run=dry_run)

    @rule(model=models)
    def unload(self, model: int) -> None:
        """Unload a model."""
        self.say(Unload, model=self.script.model(model))

    @rule(model=models, now=st.booleans())
    def restart(self, model: int, now: bool) -> None:
        """Restart a model."""
        self.say(Restart, model=self.script.model(model), now=now)

    @rule()
    def status(self) -> None:
        """Ask for the status."""
        self.say(StatusQuery)

    @rule(model=models, change=st.sampled_from(["gone", "rows", "idle", "as before"]))
    def reload(self, model: int, change: str) -> None:
        """Edit the file, and have it read."""
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
        self.script.people.operators.entries = entries
        self.say(Reload)

    @precondition(lambda self: len(self.script.people.asked) > 4)
    @rule(is_now=st.booleans(), by_signal=st.booleans())
    def stop(self, is_now: bool, by_signal: bool) -> None:
        """End the daemon."""
        world = self.script.world
        if by_signal:
            world.handle(ShutdownAsked(now=world.time.now, is_immediate=is_now))
        else:
            self.say(Stop, now=is_now, timeout_s=None)

    # ------------------------------------------------------------ the world

    @rule(fault=st.sampled_from(FAULTS))
    def strike(self, fault: str) -> None:
        """Have a fault strike where it can."""
        self.script.strike(fault)

    @rule(model=models, size=st.sampled_from([4000, 6000]))
    def grow(self, model: int, size: int) -> None:
        """Let a process hold more than its model needs."""
        self.script.grow(model, size)

    @rule(share=st.sampled_from([0.0, 1.2, 1.6, 2.1]))
    def others_take_memory(self, share: float) -> None:
        """Let other programs take or give back memory."""
        self.script.world.machine.take(share)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.1, 0.6, 3.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        """Let time pass."""
        self.script.time_passes(seconds)

    def teardown(self) -> None:
        """Let everything come to its end."""
        if hasattr(self, "script") and not self.script.world.is_broken:
            self.script.finish()
