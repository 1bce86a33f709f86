"""The world around one core: a virtual clock, played workers and clients, and what must hold."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from mlxsup.protocol.ids import ModelName, RequestId, pack_tokens
from mlxsup.protocol.messages import Cancel, Generate, Load, Message, Restart, Unload
from mlxsup.protocol.states import HAS_PROCESS, Wanted
from mlxsup.supervisor.core.actions import (
    Action,
    Announce,
    Finish,
    ForgetModel,
    LookAtWorker,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
    WakeAt,
)
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.core.events import (
    ClientGone,
    ClientSaid,
    ClientTooSlow,
    ConnectionId,
    Event,
    Reloaded,
    ShutdownAsked,
    Started,
    Tick,
)

from .clients import PlayedClients, Stream
from .loads import Loads
from .plan import EVENTS, Plan, Prompt
from .workers import PlayedWorker

CLIENTS = (b"alice", b"bob", b"carol")
MAX_WIND_UP_S = 20_000.0
MAX_POISON_CRASHES = 3
MAX_EVENTS = 50_000


class World:
    """One run of one seed.

    Args:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.plan = Plan.of(seed)
        self.now = 0.0
        self.events = 0
        self.is_healing = False
        self.has_finished = False
        self.workers: dict[ModelName, PlayedWorker] = {}
        self.clients = PlayedClients()
        self.loads = Loads(self)
        self.prompt_of = {prompt.body: prompt for prompt in self.plan.prompts}
        # Prompts are known again by their tokens, as after a crash the body is gone.
        self.packed_of = {
            p.body: pack_tokens([n, 5]) for n, p in enumerate(self.plan.prompts, start=1)
        }
        self.prompts = {self.packed_of[body]: p for body, p in self.prompt_of.items()}
        self._crashes: Counter[tuple[str, bytes]] = Counter()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._asked = 0
        self.core = Core(
            self.plan.settings,
            self.plan.models,
            facts={"pid": 1},
            random=random.Random(seed + 1),
            is_strict=True,
        )

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Lives through the plan, winds up, and checks what must be true at the end."""
        self.handle(Started(now=self.now))
        self.after(0.0, self._act)
        while self.events < EVENTS and not self.has_finished:
            self._next()
        self.is_healing = True
        if self.plan.random.random() < 0.5:
            self._come_to_rest()
        self.handle(ShutdownAsked(now=self.now, is_immediate=False))
        limit = self.now + MAX_WIND_UP_S
        while not self.has_finished:
            assert self._queue, "nothing is to come and the shutdown has not ended"
            assert self.now < limit, "the shutdown does not come to an end"
            self._next()
        self._check_ends()

    def _come_to_rest(self) -> None:
        """With no more faults, everything that is open comes to its end."""
        limit = self.now + MAX_WIND_UP_S
        while len(self.core._serving.ledger):
            assert self.now < limit, "requests never end"
            self._next()

    def _next(self) -> None:
        when, _, happen = heapq.heappop(self._queue)
        self.now = max(self.now, when)
        happen()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Something will happen."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, happen))

    def handle(self, event: Event) -> None:
        """Hands an event to the core, checks what must always hold, and obeys."""
        self.events += 1
        assert self.events < MAX_EVENTS, "the core is busy with nothing"
        actions = self.core.handle(event)
        self.core.check_invariants()
        for action in actions:
            self._obey(action)
        with_process = {m.name for m in self.core._models if m.life.state in HAS_PROCESS}
        assert with_process == set(self.workers), "a process without a state, or the reverse"

    def _obey(self, action: Action) -> None:
        match action:
            case SendToClient(connection=connection, message=message):
                self.clients.receive(bytes(connection), message)
            case SendToWorker(model=model, generation=generation, message=message):
                worker = self.workers.get(model)
                if worker is not None and worker.generation == generation:
                    worker.take(message)
            case Spawn(model=model, generation=generation, launch=launch, known_batching=known):
                assert model not in self.workers, "two processes of one model"
                self.loads.begins(model, known)
                rows = launch.max_concurrency
                self.workers[model] = PlayedWorker(self, model, generation, rows)
            case SignalWorker(model=model):
                self.workers[model].signalled(action)
            case LookAtWorker(model=model, generation=generation):
                worker = self.workers[model]
                assert worker.generation == generation
                self.after(0.05, lambda: worker.looked_at(action))
            case WakeAt(when=when):
                self.after(max(0.0, when - self.now), lambda: self.handle(Tick(now=self.now)))
            case ForgetModel(model=model):
                self.loads.forgotten(model)
            case Announce():
                pass
            case Finish():
                assert not self.workers, "the supervisor ends before its workers"
                self.has_finished = True
            case _:
                raise AssertionError(action)

    # ------------------------------------------------------------ what people do

    def _act(self) -> None:
        if self.is_healing:
            return
        dice = self.plan.random
        kind = dice.choices(
            ("ask", "cancel", "leave", "slow", "load", "unload", "restart", "reload", "idle"),
            weights=(60, 10, 2, 1, 3, 3, 4, 1, 6),
        )[0]
        getattr(self, f"_{kind}")()
        self.after(dice.expovariate(1.5) * (10.0 if kind == "idle" else 1.0), self._act)

    def _say(self, connection: bytes, message: Message) -> None:
        self.handle(ClientSaid(now=self.now, connection=ConnectionId(connection), message=message))

    def _model(self) -> ModelName:
        return self.plan.random.choice(self.plan.models).name

    def _ask(self) -> None:
        dice = self.plan.random
        self._asked += 1
        connection, id = dice.choice(CLIENTS), f"r{self._asked}"
        prompt = dice.choice(self.plan.prompts)
        may_resume = dice.random() < 0.85
        self.clients.streams[connection, id] = Stream(prompt=prompt, may_resume=may_resume)
        request = Generate(
            id=RequestId(id),
            model=self._model(),
            body=prompt.body,
            resume=may_resume,
            notices=dice.random() < 0.3,
            queue_timeout_s=dice.choice((None, None, 3.0)),
            first_token_timeout_s=dice.choice((None, None, 5.0)),
            timeout_s=dice.choice((None, None, None, 10.0)),
        )
        self._say(connection, request)

    def _cancel(self) -> None:
        opened = [key for key, stream in self.clients.streams.items() if stream.end is None]
        if opened:
            connection, id = self.plan.random.choice(opened)
            self._say(connection, Cancel(id=RequestId(id)))

    def _leave(self) -> None:
        connection = self.plan.random.choice(CLIENTS)
        for (owner, _), stream in self.clients.streams.items():
            if owner == connection and stream.end is None:
                stream.is_given_up = True
        for key in self.clients.commands:
            if key[0] == connection:
                self.clients.commands[key] = True
        self.handle(ClientGone(now=self.now, connection=ConnectionId(connection)))

    def _slow(self) -> None:
        connection = ConnectionId(self.plan.random.choice(CLIENTS))
        self.handle(ClientTooSlow(now=self.now, connection=connection))

    def _command(self, message_of: Callable[[RequestId, ModelName], Message]) -> None:
        self._asked += 1
        connection, id = self.plan.random.choice(CLIENTS), RequestId(f"c{self._asked}")
        self.clients.commands[connection, id] = False
        self._say(connection, message_of(id, self._model()))

    def _load(self) -> None:
        self.loads.asked_for()
        self._command(lambda id, model: Load(id=id, model=model))
        self._crashes.clear()  # of a FAILED model it lifts what was held against requests

    def _unload(self) -> None:
        self._command(lambda id, model: Unload(id=id, model=model))

    def _restart(self) -> None:
        is_now = self.plan.random.random() < 0.6
        self.loads.asked_for()
        self._command(lambda id, model: Restart(id=id, model=model, now=is_now))
        self._crashes.clear()

    def _reload(self) -> None:
        dice, models = self.plan.random, []
        for model in self.plan.models:
            if dice.random() < 0.9:
                idle_s = dice.choice((0.0, 15.0))
                models.append(replace(model, idle_unload_s=idle_s))
        self._crashes.clear()
        self.loads.asked_for()  # what failed alike may have been another entry
        settings = self.plan.settings
        self.handle(Reloaded(now=self.now, settings=settings, models=tuple(models)))

    def _idle(self) -> None:
        """Nothing happens for a while."""

    # ------------------------------------------------------------ what must hold

    def told_to_end(self, model: ModelName) -> bool:
        """Whether the supervisor wants this model's process gone anyhow."""
        life = self.core._models.by_name[model].life
        is_restart = getattr(life.phase, "is_restart", False)
        is_asked = getattr(life.phase, "cause", None) == "asked"
        return life.wanted is not Wanted.UP or is_restart or is_asked

    def poisoned(self, prompt: Prompt, model: ModelName) -> None:
        """A poison kills its engine; a death that was asked for anyhow accuses nobody."""
        if self.told_to_end(model):
            return
        self._crashes[model, prompt.body] += 1
        if not self.plan.has_stray_accusations and self.now < 3000.0:
            count = self._crashes[model, prompt.body]
            assert count <= MAX_POISON_CRASHES, "a poison cost more than three crashes (P10)"

    def _check_ends(self) -> None:
        for key, stream in self.clients.streams.items():
            assert stream.end is not None or stream.is_given_up, f"{key} was not answered (P1)"
        for key, is_answered in self.clients.commands.items():
            assert is_answered, f"the command {key} was not answered"
        if not self.plan.has_stray_accusations:
            for stream in self.clients.quarantined:
                assert stream.prompt.poison_at is not None, "an innocent was quarantined (F10)"
        rows = self.core.status(self.now)["models"]
        assert all(row["state"] == "STOPPED" for row in rows), "not everything is down"
        ledger = self.core._serving.ledger
        assert (len(ledger), ledger.held_bytes, ledger.waiting) == (0, 0, 0)
