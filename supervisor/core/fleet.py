"""Every model, and how transitions of their lives are carried out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.messages import Failed, Message, Reply
from mlxsup.protocol.states import HAS_PROCESS, State, Wanted

from .actions import (
    Abandon,
    Action,
    ForgetModel,
    LogFault,
    LookAtWorker,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
)
from .deadlines import Deadlines
from .errors import unknown_model
from .events import Caller, ConnectionId
from .health.watchdog import Alarm
from .lifecycle.life import Life
from .lifecycle.on_exit import weigh
from .lifecycle.table import ImpossibleTransitionError, apply
from .lifecycle.triggers import (
    Broke,
    Changed,
    Died,
    DownWaitersEnd,
    Drained,
    Effect,
    Erased,
    Fault,
    GivenUp,
    HitBug,
    LeaveProcess,
    QueueEnds,
    RunningEnds,
    RunningLost,
    SignalProcess,
    Stalled,
    StartProcess,
    Suspended,
    TellWorker,
    Trigger,
    Turn,
    UpWaitersEnd,
)
from .loading import next_loads
from .model import WATCHED, Model
from .serving import Serving
from .settings import ModelSettings
from .status import change_map, model_row


class Models:
    """The models by name; the only place where a trigger meets a life.

    Args:
        serving: answers and moves their requests.
        deadlines: where the times of models are kept.
        do: takes an action.
        announce: takes a change of state for everyone who watches.
        random: draws the jitter of restarts.
        exit_grace_s: from asking a worker to exit to SIGTERM, and from there to SIGKILL.
        is_strict: raise where the table has no rule.
    """

    def __init__(
        self,
        *,
        serving: Serving,
        deadlines: Deadlines,
        do: Callable[[Action], None],
        announce: Callable[[dict[str, Any]], None],
        random: random.Random,
        exit_grace_s: float,
        is_strict: bool,
    ) -> None:
        # Bounded by the configuration: one entry for each model, until its removal is complete.
        self.by_name: dict[ModelName, Model] = {}
        self._serving = serving
        self._deadlines = deadlines
        self._do = do
        self._announce = announce
        self._random = random
        self._exit_grace_s = exit_grace_s
        self._is_strict = is_strict
        # A dict for its order: that of a set would change with the interpreter's hash seed, and
        # a failing seed of the simulation would not replay (P22).
        self._touched: dict[ModelName, None] = {}

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self.by_name.values()))

    def add(self, entry: ModelSettings) -> Model:
        """A model that was never started."""
        life = Life.new(entry, exit_grace_s=self._exit_grace_s, random=self._random)
        model = self.by_name[entry.name] = Model(life=life)
        return model

    def find(self, name: ModelName) -> Model:
        """A model that the configuration names.

        Raises:
            RemoteError: `unknown_model`.
        """
        model = self.by_name.get(name)
        if model is None or model.life.wanted is Wanted.GONE:
            known = [m.name for m in self if m.life.wanted is not Wanted.GONE]
            raise unknown_model(name, known)
        return model

    def touch(self, model: Model) -> None:
        """Something about this model changed: `settle` looks at it."""
        self._touched[model.name] = None

    def has_processes(self) -> bool:
        """Whether any process lives whose end is waited for."""
        return any(model.life.state in HAS_PROCESS for model in self)

    def end_limit_s(self) -> float:
        """How long ending every process may take when nothing is left to drain: asking, SIGTERM,
        SIGKILL, and giving up who is still there."""
        limits = [model.life.kill_limit_s for model in self if model.life.state in HAS_PROCESS]
        return 2 * self._exit_grace_s + max(limits) if limits else 0.0

    def trigger(self, model: Model, trigger: Trigger, now: float) -> None:
        """Puts a trigger to a model's life and carries out what the table answers.

        Raises:
            ImpossibleTransitionError: the table has no rule, where this is strict; elsewhere that
                one life ends as FAILED(internal), and the story is logged.
        """
        self.touch(model)
        before = model.life.state
        try:
            effects = apply(model.life, trigger, now)
        except ImpossibleTransitionError as error:
            if self._is_strict:
                raise
            model.story.append(f"{now:.3f} {before} {trigger} !")
            effects = apply(model.life, HitBug(detail=f"internal error: {error}"), now)
        model.story.append(f"{now:.3f} {before} {trigger} → {model.life.state}")
        for effect in effects:
            self._carry_out(model, effect, before, now)

    def look_after(self, model: Model, now: float) -> None:
        """Acts on what a process's signs of life mean."""
        self.touch(model)
        life, watch = model.life, model.watch
        if watch is None or life.state not in WATCHED:
            return
        match watch.judge(now, model.step_timeout_s, len(model.held)):
            case Alarm.LOOK:
                self._do(LookAtWorker(model=model.name, generation=life.generation))
            case Alarm.STUCK:
                self.trigger(model, Stalled(detail=watch.describe(now)), now)
            case Alarm.STOPPED:
                self.trigger(model, Suspended(), now)
            case Alarm.BROKEN:
                self.trigger(model, Broke(detail=watch.describe(now)), now)
            case Alarm.NONE:
                pass

    def was_told(self, action: SendToWorker, now: float) -> None:
        """A process was sent a message: its beats count those, too."""
        model = self.by_name.get(action.model)
        if model is not None and model.watch is not None:
            model.watch.was_told(now)

    def bury(self, model: Model, died: Died, now: float) -> None:
        """A process has ended: judges what that says of its requests, and lets the table decide.

        The story and the watchers hear what was decided and why (F10).
        """
        evidence = weigh(model.life, died, is_over_memory=model.is_over_memory)
        verdict = model.recovery.judge(evidence, model.held, now)
        if verdict.story:
            model.story.append(f"{now:.3f} {died.text}: {verdict.story}")
        self.trigger(model, replace(died, verdict=verdict), now)
        if verdict.story and model.name in self.by_name:
            self._announce(change_map(model, model.life.state, verdict.story))

    def give_up(self, model: Model, now: float) -> None:
        """SIGKILL has not ended its process within the limit; what ran in it is judged by why it
        was ended."""
        pid = model.life.pid
        assert pid is not None
        self.bury(model, GivenUp(pid=pid), now)

    def settle(self, now: float) -> None:
        """What follows from the new state: drains that ended, loads that may start, dispatches."""
        for name in list(self._touched):
            model = self.by_name.get(name)
            if (
                model is not None
                and model.life.state is State.DRAINING
                and not model.running
                and not model.leaving
            ):
                self.trigger(model, Drained(), now)
        for model in next_loads(self):
            self.trigger(model, Turn(), now)
        for name in self._touched:
            model = self.by_name.get(name)
            if model is not None:
                self._serving.dispatch(model, now)
                self._serving.tell_waiting(model)
                self._deadlines.set(name, model.deadline())
        self._touched.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError where the models contradict themselves or each other."""
        for model in self:
            model.check_invariants()
            if model.life.state is State.READY and model.line and model.has_room:
                assert model.held, f"{model.name} has room and lets requests wait"
                waiting = [self._serving.ledger.get(key) for key in model.line]
                held = [*model.held, *(r.held for r in waiting if r is not None)]
                assert any(model.recovery.is_due(one) for one in held), "nobody's turn is due"
        placed = [key for model in self for key in (*model.line, *model.running)]
        assert sorted(placed) == sorted(request.key for request in self._serving.ledger)
        loading = [model.life for model in self if model.life.is_loading]
        assert sum(life.is_after_crash for life in loading) <= 1
        assert sum(not life.is_after_crash for life in loading) <= 1

    # ------------------------------------------------------------ effects

    def _carry_out(self, model: Model, effect: Effect, before: State, now: float) -> None:
        life = model.life
        match effect:
            case StartProcess():
                self._do(
                    Spawn(
                        model=model.name,
                        generation=life.generation,
                        launch=life.launch,
                        known_batching=model.known_batching,
                    )
                )
            case TellWorker(message=message):
                self._do(
                    SendToWorker(model=model.name, generation=life.generation, message=message)
                )
            case SignalProcess(signal=signal):
                self._do(SignalWorker(model=model.name, generation=life.generation, signal=signal))
            case QueueEnds(error=error):
                self._serving.fail_queue(model, error)
            case RunningEnds(error=error):
                self._serving.fail_running(model, error)
            case RunningLost(text=text, verdict=verdict):
                self._serving.lose_running(model, text, verdict)
                model.forget_process()
            case UpWaitersEnd(error=error_or_none):
                self._answer(model, model.up_callers, error_or_none, now)
            case DownWaitersEnd(error=error_or_none):
                self._answer(model, model.down_callers, error_or_none, now)
            case Changed(note=note):
                self._announce(change_map(model, before, note))
            case LeaveProcess():
                self._do(Abandon(model=model.name, generation=life.generation))
            case Erased():
                self._do(ForgetModel(model=model.name))
                del self.by_name[model.name]
                self._deadlines.set(model.name, None)
            case Fault():
                self._do(LogFault(model=model.name, story=tuple(model.story)))
            case _:
                raise AssertionError(effect)

    def _answer(
        self, model: Model, callers: list[Caller], error: RemoteError | None, now: float
    ) -> None:
        for caller in callers:
            if error is None:
                value = {"model": model_row(model, now)}
                self._send(caller.connection, Reply(id=caller.id, value=value))
            else:
                self._send(caller.connection, Failed(id=caller.id, error=error.to_wire()))
        callers.clear()

    def _send(self, connection: ConnectionId, message: Message) -> None:
        self._do(SendToClient(connection=connection, message=message))
