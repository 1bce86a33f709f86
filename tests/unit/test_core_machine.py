"""Any events in any order: the core keeps its invariants and answers each request exactly once.

The machine plays workers that obey what the core tells them (or die at any moment), clients that
ask, cancel and leave, commands, reloads that change, remove and bring back models, stops, and the
clock. `Driver.do` checks the invariants after each event. Each command, too, is answered once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxsup.protocol.client_messages import (
    ClientMessage,
    Failed,
    Load,
    Reload,
    Reply,
    Restart,
    Stop,
    Unload,
)
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.flight import Entry
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey, pack_tokens
from mlxsup.protocol.states import HAS_PROCESS, FinishReason, State
from mlxsup.protocol.worker_messages import CancelRow, Dispatch, Exit, Rejected, RowDelta, Step
from mlxsup.supervisor.core.actions import (
    Abandon,
    Action,
    Announce,
    Finish,
    ForgetModel,
    ReadConfiguration,
    RequestEnded,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
    WorkerSignal,
)
from mlxsup.supervisor.core.events import Caller, ConnectionId, Reloaded, ReloadRefused, Sampled
from mlxsup.supervisor.core.lifecycle.states import Draining
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import ALICE, BOB

MODELS = tuple(map(ModelName, ("a", "b", "c")))
CLIENTS = (ALICE, BOB)
SETTINGS = CoreSettings(max_queue=6, max_queue_per_client=4, drain_timeout_s=5.0)
LAUNCHES = (
    LAUNCH,
    replace(LAUNCH, max_concurrency=1),
    replace(LAUNCH, path="/other", max_concurrency=3),
    replace(LAUNCH, step_timeout_s=1.0, memory_limit_bytes=50),
)
model_names = st.sampled_from(MODELS)
clients = st.sampled_from(CLIENTS)


class PlayedWorker:
    """One process as the machine plays it."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.has_pid = False
        self.is_ready = False
        self.is_told_to_exit = False
        self.is_killed = False
        self.rows: list[int] = []


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[str, PlayedWorker] = {}
        self.asked = 0
        self.refused_or_open: set[tuple[bytes, str]] = set()
        self.commands: dict[str, int] = {}
        """Of each command whose client is there, how often it was answered."""
        self.ids: list[RequestId] = []
        self.callers: list[Caller] = []
        """Who waits for the shell to read the configuration, longest first."""
        self.ends_at = math.inf
        """When the drains of a stop must have ended."""
        self.has_finished = False
        self.abandoned: set[str] = set()

    @initialize(idle=st.sampled_from([0.0, 30.0]))
    def start(self, idle: float) -> None:
        self.entries = {name: entry(name, idle_unload_s=idle) for name in MODELS}
        self.driver = Driver(list(self.entries.values()), SETTINGS)
        self.driver.obey = self.obey_all

    def obey_all(self, actions: list[Action]) -> None:
        for action in actions:
            self.obey(action)

    def obey(self, action: Action) -> None:
        """What the world does about an action at once."""
        if self.has_finished:  # what was left behind may be seen to end before the daemon has
            assert isinstance(
                action,
                SendToClient | Announce | ForgetModel | RequestEnded | Entry,
            ), action
        match action:
            case Spawn(model=model, launch=launch):
                assert model not in self.workers, "two processes of one model"
                self.workers[model] = PlayedWorker(launch.max_concurrency)
            case SendToClient(message=Reply(id=id) | Failed(id=id)) if id in self.commands:
                self.commands[id] += 1
                assert self.commands[id] == 1, f"the command {id} was answered twice"
            case ReadConfiguration(caller=caller):
                self.callers.append(caller)
            case SendToWorker(model=model, message=Dispatch(key=key)):
                worker = self.workers[model]
                assert worker.is_ready
                assert not worker.is_told_to_exit
                worker.rows.append(key)
                assert len(worker.rows) <= worker.max_rows, "more rows than max_concurrency"
            case SendToWorker(model=model, message=CancelRow(key=key)):
                assert not self.workers[model].is_told_to_exit or key
            case SendToWorker(model=model, message=Exit()):
                self.workers[model].is_told_to_exit = True
            case SignalWorker(model=model, signal=signal):
                assert self.workers[model].has_pid, "a signal to a process that is not there yet"
                self.workers[model].is_told_to_exit = True
                self.workers[model].is_killed = signal is WorkerSignal.KILL
            case Abandon(model=model):
                assert self.workers[model].is_killed
                self.abandoned.add(model)
            case Finish():
                assert set(self.workers) == self.abandoned
                self.has_finished = True

    # ------------------------------------------------------------ clients

    @rule(
        model=model_names,
        client=clients,
        limit=st.sampled_from([None, 2.0]),
        body=st.integers(0, 3),
        resume=st.booleans(),
    )
    def ask(
        self, model: str, client: ConnectionId, limit: float | None, body: int, resume: bool
    ) -> None:
        self.asked += 1
        id = f"r{self.asked}"
        self.refused_or_open.add((client, id))
        self.driver.ask(id, model, client, queue_timeout_s=limit, body=b"%d" % body, resume=resume)

    @rule(client=clients, back=st.integers(0, 5))
    def cancel(self, client: ConnectionId, back: int) -> None:
        self.driver.cancel(f"r{self.asked - back}", client)

    @rule(client=clients)
    def leave(self, client: ConnectionId) -> None:
        open_ids = {r.id for r in self.driver.core.ledger.of_connection(client)}
        self.refused_or_open -= {(client, id) for id in open_ids}
        if client == ALICE:  # who says all commands
            self.commands = {id: count for id, count in self.commands.items() if count}
        self.driver.leave(client)

    def say(self, message_of: Callable[[RequestId], ClientMessage]) -> None:
        """A command of ALICE."""
        id = RequestId(f"c{len(self.ids) + 1}")
        self.ids.append(id)
        self.commands[id] = 0
        self.driver.say(message_of(id))

    @rule(model=model_names)
    def load(self, model: ModelName) -> None:
        self.say(lambda id: Load(id=id, model=model))

    @rule(model=model_names)
    def unload(self, model: ModelName) -> None:
        self.say(lambda id: Unload(id=id, model=model))

    @rule(model=model_names, now=st.booleans())
    def restart(self, model: ModelName, now: bool) -> None:
        self.say(lambda id: Restart(id=id, model=model, now=now))

    @rule()
    def ask_to_reload(self) -> None:
        self.say(lambda id: Reload(id=id))

    @rule(
        model=model_names,
        changes=st.sampled_from(
            [{}, {"idle_unload_s": 10.0}, {"preload": True}, *({"launch": x} for x in LAUNCHES)]
        ),
        drain_s=st.sampled_from([5.0, 600.0]),
    )
    def reload(self, model: ModelName, changes: dict[str, Any], drain_s: float) -> None:
        """Removes a model, or brings it back, or changes its entry; the others stay as they are.

        By a signal, or for the caller who has waited longest.
        """
        if model in self.entries and not changes:
            del self.entries[model]
        else:
            self.entries[model] = replace(self.entries.get(model, entry(model)), **changes)
        event = Reloaded(
            now=self.driver.now,
            settings=replace(SETTINGS, drain_timeout_s=drain_s),
            models=tuple(self.entries.values()),
            caller=self.callers.pop(0) if self.callers else None,
        )
        self.driver.do(event)

    @rule()
    def refuse_to_reload(self) -> None:
        if self.callers:
            caller = self.callers.pop(0)
            self.driver.do(ReloadRefused(now=self.driver.now, problems=("x",), caller=caller))

    @precondition(lambda self: self.asked > 4)
    @rule(is_immediate=st.booleans())
    def shut_down(self, is_immediate: bool) -> None:
        self.driver.signal(is_immediate=is_immediate)
        self.drains_end_within(0.0 if is_immediate else self.drain_s)

    @precondition(lambda self: self.asked > 4)
    @rule(now=st.booleans(), timeout_s=st.sampled_from([None, 0.0, 1.0, 100.0]))
    def stop(self, now: bool, timeout_s: float | None) -> None:
        self.say(lambda id: Stop(id=id, now=now, timeout_s=timeout_s))
        limit_s = self.drain_s if timeout_s is None else timeout_s
        self.drains_end_within(0.0 if now else limit_s)

    def drains_end_within(self, limit_s: float) -> None:
        self.ends_at = min(self.ends_at, self.driver.now + limit_s)

    @property
    def drain_s(self) -> float:
        return self.driver.core.fleet.settings.drain_timeout_s

    # ------------------------------------------------------------ workers

    def worker(self, model: str) -> PlayedWorker | None:
        return self.workers.get(model)

    @rule(model=model_names)
    def process_runs(self, model: str) -> None:
        worker = self.worker(model)
        if worker is not None and not worker.has_pid:
            worker.has_pid = True
            self.driver.spawned(model)

    @rule(model=model_names)
    def spawn_fails(self, model: str) -> None:
        worker = self.worker(model)
        if worker is not None and not worker.has_pid:
            del self.workers[model]
            self.driver.spawn_failed(model)

    @rule(model=model_names)
    def becomes_ready(self, model: str) -> None:
        worker = self.worker(model)
        if worker is not None and worker.has_pid and not worker.is_ready:
            self.driver.hello(model)
            worker.is_ready = True
            self.driver.ready(model)

    @rule()
    def everything_comes_up(self) -> None:
        for _ in MODELS:  # they load in turn
            for model in MODELS:
                self.obeys(model)
                self.process_runs(model)
                self.becomes_ready(model)

    @rule(model=model_names, accepts=st.booleans(), ends=st.booleans(), which=st.integers(0, 1))
    def steps(self, model: str, accepts: bool, ends: bool, which: int) -> None:
        worker = self.worker(model)
        if worker is None or not worker.rows:
            return
        key = worker.rows[which % len(worker.rows)]
        if accepts:
            self.driver.accept(key, model)
        if ends:
            worker.rows.remove(key)
        finish = FinishReason.STOP if ends else None
        row = RowDelta(key=RequestKey(key), text="x", tokens=pack_tokens([1]), finish=finish)
        self.driver.worker(Step(step=1, rows=[row]), model)

    @rule(model=model_names)
    def rejects(self, model: str) -> None:
        worker = self.worker(model)
        if worker is not None and worker.rows:
            error = RemoteError(ErrorCode.INVALID_REQUEST, "no").to_wire()
            self.driver.worker(Rejected(key=RequestKey(worker.rows.pop()), error=error), model)

    @rule(footprint_bytes=st.sampled_from([10, 100]))
    def is_measured(self, footprint_bytes: int) -> None:
        measured = dict.fromkeys((77,), footprint_bytes)
        now = self.driver.now
        self.driver.do(Sampled(now=now, footprint_bytes=measured, machine_bytes=1000))

    @rule(
        model=model_names,
        code=st.sampled_from([None, None, None, 0, 65, 70, 70, 75]),
        signal=st.sampled_from(["SIGKILL", "SIGSEGV", "SIGABRT"]),
    )
    def dies(self, model: str, code: int | None, signal: str) -> None:
        worker = self.worker(model)
        if worker is not None and worker.has_pid:
            self.is_gone(model)
            self.driver.exit(model, code=code, signal=signal)

    def is_gone(self, model: str) -> None:
        """Its process has ended, though perhaps nobody waits for that any longer."""
        del self.workers[model]
        self.abandoned.discard(model)

    @rule(model=model_names)
    def sends_garbage(self, model: str) -> None:
        worker = self.worker(model)
        if worker is not None and worker.has_pid:
            self.driver.broke(model)

    @rule(model=model_names)
    def obeys(self, model: str) -> None:
        worker = self.worker(model)
        if worker is not None and worker.has_pid and worker.is_told_to_exit:
            self.is_gone(model)
            self.driver.exit(model, code=0)

    @rule(seconds=st.sampled_from([0.01, 1.0, 3.0, 8.0, 40.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.driver.pass_time(seconds)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def processes_and_states_agree(self) -> None:
        if not hasattr(self, "driver"):
            return
        rows = self.driver.core.status(self.driver.now)["models"]
        with_process = {row["name"] for row in rows if State(row["state"]) in HAS_PROCESS}
        assert with_process == set(self.workers) - self.abandoned
        stuck = {row["name"] for row in rows if row["state"] == State.FAILED and row["pid"]}
        assert stuck == self.abandoned

    @invariant()
    def a_stop_bounds_every_drain(self) -> None:
        if not hasattr(self, "driver"):
            return
        for model in self.driver.core.fleet:
            if isinstance(model.life.phase, Draining):
                assert model.life.phase.ends_at <= self.ends_at + 1e-6, model.name

    @invariant()
    def nobody_is_answered_twice(self) -> None:
        if hasattr(self, "driver"):
            assert all(len(ends) == 1 for ends in self.driver.terminals.values())

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.signal()
        for caller in self.callers:  # the shell answers each, even after the last process
            self.driver.do(ReloadRefused(now=self.driver.now, problems=("x",), caller=caller))
        for _ in range(70):
            for model, worker in list(self.workers.items()):
                if not worker.has_pid:
                    self.process_runs(model)
                self.obeys(model)
            self.driver.pass_time(10.0)
        assert self.has_finished, "the shutdown did not come to an end"
        requests = {key for key in self.driver.terminals if key[1].startswith("r")}
        assert requests == self.refused_or_open, "somebody was not answered"
        unanswered = [id for id, count in self.commands.items() if not count]
        assert not unanswered, "commands were not answered"


CoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestCore = CoreMachine.TestCase
