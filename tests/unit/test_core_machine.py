"""Any events in any order: the core keeps its invariants and answers each request exactly once.

The machine plays workers that obey what the core tells them (or die at any moment), clients that
ask, cancel and leave, commands, and the clock. `Driver.do` checks the invariants after each event.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.messages import CancelRow, Dispatch, Done, Exit, Failed, RowDelta, Step
from mlxsup.protocol.states import HAS_PROCESS, FinishReason, State
from mlxsup.supervisor.core.actions import (
    Action,
    Finish,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
    WorkerSignal,
)
from mlxsup.supervisor.core.events import Event, Reloaded
from mlxsup.supervisor.core.settings import CoreSettings, RestartSettings
from support.core_driver import ALICE, BOB, LAUNCH, Driver, entry

MODELS = ("a", "b", "c")
CLIENTS = (ALICE, BOB)
SETTINGS = CoreSettings(max_queue=6, max_queue_per_client=4, drain_timeout_s=5.0)

model_names = st.sampled_from(MODELS)
clients = st.sampled_from(CLIENTS)


class PlayedWorker:
    """One process as the machine plays it."""

    def __init__(self) -> None:
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
        self.is_shut_down = False
        self.has_finished = False

    @initialize(idle=st.sampled_from([0.0, 30.0]))
    def start(self, idle: float) -> None:
        self.driver = Driver([entry(name, idle_unload_s=idle) for name in MODELS], SETTINGS)
        inner = self.driver.do

        def do(event: Event) -> list[Action]:
            actions = inner(event)
            for action in actions:
                self.obey(action)
            return actions

        self.driver.do = do

    def obey(self, action: Action) -> None:
        """What the world does about an action at once."""
        assert not self.has_finished or isinstance(action, SendToClient), action
        match action:
            case Spawn(model=model):
                assert model not in self.workers, "two processes of one model"
                self.workers[model] = PlayedWorker()
            case SendToWorker(model=model, message=Dispatch(key=key)):
                worker = self.workers[model]
                assert worker.is_ready
                assert not worker.is_told_to_exit
                worker.rows.append(key)
                assert len(worker.rows) <= 2, "more rows than max_concurrency"
            case SendToWorker(model=model, message=CancelRow(key=key)):
                assert not self.workers[model].is_told_to_exit or key
            case SendToWorker(model=model, message=Exit()):
                self.workers[model].is_told_to_exit = True
            case SignalWorker(model=model, signal=signal):
                assert self.workers[model].has_pid, "a signal to a process that is not there yet"
                self.workers[model].is_told_to_exit = True
                self.workers[model].is_killed = signal is WorkerSignal.KILL
            case Finish():
                assert not self.workers
                self.has_finished = True

    # ------------------------------------------------------------ clients

    @rule(
        model=model_names,
        client=clients,
        limit=st.sampled_from([None, 2.0]),
        body=st.integers(0, 3),
        resume=st.booleans(),
    )
    def ask(self, model: str, client: bytes, limit: float | None, body: int, resume: bool) -> None:
        self.asked += 1
        id = f"r{self.asked}"
        self.refused_or_open.add((client, id))
        self.driver.ask(id, model, client, queue_timeout_s=limit, body=b"%d" % body, resume=resume)

    @rule(client=clients, back=st.integers(0, 5))
    def cancel(self, client: bytes, back: int) -> None:
        self.driver.cancel(f"r{self.asked - back}", client)

    @rule(client=clients)
    def leave(self, client: bytes) -> None:
        open_ids = {r.id for r in self.driver.core._serving.ledger.of_connection(client)}
        self.refused_or_open -= {(client, id) for id in open_ids}
        self.driver.leave(client)

    @rule(model=model_names)
    def load(self, model: str) -> None:
        self.driver.load(model)

    @rule(model=model_names)
    def unload(self, model: str) -> None:
        self.driver.unload(model)

    @rule(model=model_names, now=st.booleans())
    def restart(self, model: str, now: bool) -> None:
        self.driver.restart(model, now=now)

    @rule(names=st.sets(model_names, min_size=1), idle=st.sampled_from([0.0, 10.0]))
    def reload(self, names: set[str], idle: float) -> None:
        entries = tuple(entry(name, idle_unload_s=idle) for name in sorted(names))
        self.driver.do(Reloaded(now=self.driver.now, settings=SETTINGS, models=entries))

    @precondition(lambda self: self.asked > 10)
    @rule(is_immediate=st.booleans())
    def shut_down(self, is_immediate: bool) -> None:
        self.is_shut_down = True
        self.driver.signal(is_immediate=is_immediate)

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

    @rule(
        model=model_names,
        code=st.sampled_from([None, None, None, 0, 65, 70, 70, 75]),
        signal=st.sampled_from(["SIGKILL", "SIGSEGV", "SIGABRT"]),
    )
    def dies(self, model: str, code: int | None, signal: str) -> None:
        worker = self.worker(model)
        if worker is not None and worker.has_pid:
            del self.workers[model]
            self.driver.exit(model, code=code, signal=signal)

    @rule(model=model_names)
    def sends_garbage(self, model: str) -> None:
        worker = self.worker(model)
        if worker is not None and worker.has_pid:
            self.driver.broke(model)

    @rule(model=model_names)
    def obeys(self, model: str) -> None:
        worker = self.worker(model)
        if worker is not None and worker.has_pid and worker.is_told_to_exit:
            del self.workers[model]
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
        assert with_process == set(self.workers)

    @invariant()
    def nobody_is_answered_twice(self) -> None:
        if hasattr(self, "driver"):
            assert all(len(ends) == 1 for ends in self.driver.terminals.values())

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.signal()
        for _ in range(10):
            for model, worker in list(self.workers.items()):
                if not worker.has_pid:
                    self.process_runs(model)
                self.obeys(model)
            self.driver.pass_time(10.0)
        assert self.has_finished, "the shutdown did not come to an end"
        requests = {key for key in self.driver.terminals if key[1].startswith("r")}
        assert requests == self.refused_or_open, "somebody was not answered"


CoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestCore = CoreMachine.TestCase


# ---------------------------------------------------------------- poison

CRASHES_OF_A_POISON = 3


class PoisonedEngine:
    """Plays one model's engine: each poison kills it when its answer reaches a certain token."""

    def __init__(self, rows: int, strikes: dict[str, int], lengths: dict[str, int]) -> None:
        launch = replace(LAUNCH, max_concurrency=rows)
        restart = RestartSettings(max_restarts=99, backoff_initial_s=0.1, backoff_max_s=0.1)
        limits = CoreSettings(max_queue=64, max_queue_per_client=64)
        self.driver = Driver([entry(launch=launch, restart=restart)], limits)
        self.strikes, self.lengths = strikes, lengths
        self.crashes: dict[str, int] = dict.fromkeys(strikes, 0)
        self.driver.load()
        self.driver.come_up()

    def run(self) -> None:
        """Steps until nothing is open."""
        serving = self.driver.core._serving
        while serving.ledger:
            running = list(self.driver.core._models.by_name["m"].running.values())
            assert running, "everything waits and nothing runs"
            due = [r for r in running if self.strikes.get(r.id) == r.tokens_sent]
            if due:
                self.crashes[due[0].id] += 1
                self.driver.exit(signal="SIGSEGV")
                if self.driver.state() is State.BACKOFF:
                    self.driver.pass_time(0.2)
                assert self.driver.state() is not State.FAILED
                self.driver.come_up()
                continue
            for request in running:
                if request.acceptance is None:
                    self.driver.accept(request.key)
                is_last = request.tokens_sent + 1 == self.lengths[request.id]
                self.driver.token(request.key, finish=FinishReason.LENGTH if is_last else None)


@settings(max_examples=120, deadline=None)
@given(
    rows=st.integers(1, 8),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    poisons=st.dictionaries(st.integers(0, 7), st.integers(0, 11), max_size=2),
)
def test_a_poison_costs_three_crashes_and_every_innocent_completes_P10_F10(
    rows: int, lengths: list[int], poisons: dict[int, int]
) -> None:
    ids = [f"r{number}" for number in range(len(lengths))]
    strikes = {ids[n]: at for n, at in poisons.items() if n < len(ids) and at < lengths[n]}
    engine = PoisonedEngine(rows, strikes, dict(zip(ids, lengths, strict=True)))
    for id in ids:
        engine.driver.ask(id, body=id.encode())
    engine.run()
    for id in ids:
        [end] = engine.driver.terminals[b"alice", id]
        if id in strikes:
            assert isinstance(end, Failed)
            assert end.error["code"] == "quarantined"
            assert engine.crashes[id] <= CRASHES_OF_A_POISON
        else:
            assert isinstance(end, Done)
            assert end.usage.completion_tokens == end.seq == engine.lengths[id]
    assert engine.driver.core._serving.ledger.held_bytes == 0
