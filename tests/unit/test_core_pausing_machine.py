"""Pauses, by hand and for a higher class, that cross tokens, ends, cancels, crashes, unloads and
each other, in any order.

The machine plays one worker, which obeys what it is told when a rule says so, and keeps its own
books of what each client was sent. `Driver.do` checks the core's invariants after each event.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxsup.protocol.client_messages import Deltas, Done, Failed, Reply
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, Priority, RowState, State, Wanted
from mlxsup.protocol.worker_messages import (
    CancelRow,
    Dispatch,
    DropKept,
    Exit,
    PauseRow,
    RowDelta,
    Step,
)
from mlxsup.supervisor.core.actions import (
    Action,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
)
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import LAUNCH, Driver, entry

ROWS = 2
SETTINGS = CoreSettings(
    max_queue=99, max_queue_per_client=99, drain_timeout_s=5.0, min_run_s=0.1, aging_s=4.0
)
PATIENT = entry().restart


@dataclass(slots=True)
class Row:
    """What the played worker knows of a request that it was given."""

    keep: bool | None = None
    is_cancelled: bool = False


@dataclass(slots=True)
class Worker:
    """One process."""

    has_pid: bool = False
    is_ready: bool = False
    is_told_to_end: bool = False
    rows: dict[RequestKey, Row] = field(default_factory=dict)
    kept: set[RequestKey] = field(default_factory=set)


class PausingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        launch = replace(LAUNCH, max_concurrency=ROWS)
        restart = replace(PATIENT, max_restarts=1000, backoff_initial_s=0.1, backoff_max_s=0.1)
        self.driver = Driver([entry(launch=launch, restart=restart)], SETTINGS)
        self.worker: Worker | None = None
        self.sent: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.ids: dict[RequestKey, str] = {}
        self.accepted: set[RequestKey] = set()
        self.held: set[str] = set()
        """Requests that the machine has paused and not resumed."""
        self.driver.obey = self.obey_all

    # ------------------------------------------------------------ what the core does

    def obey_all(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Spawn():
                    assert self.worker is None, "two processes"
                    self.worker = Worker()
                case SendToWorker(message=Dispatch() as message):
                    self.begin(message)
                case SendToWorker(message=PauseRow(key=key, keep=keep)):
                    row = self.the_worker.rows[key]
                    assert row.keep is None, "asked to leave twice"
                    assert not row.is_cancelled
                    row.keep = keep
                case SendToWorker(message=CancelRow(key=key)):
                    self.the_worker.rows[key].is_cancelled = True
                case SendToWorker(message=DropKept(key=key)):
                    self.the_worker.kept.remove(key)
                case SendToWorker(message=Exit()) | SignalWorker():
                    self.the_worker.is_told_to_end = True
                case SendToClient(message=Deltas(deltas=deltas)):
                    for delta in deltas:
                        assert delta.id not in self.ended, "a piece after the end"
                        self.sent[delta.id] += len(delta.tokens) // 4
                case SendToClient(message=Done(id=id) | Failed(id=id) as end) if id in self.sent:
                    assert id not in self.ended, "two ends"
                    self.ended[id] = str(
                        end.finish_reason if isinstance(end, Done) else end.error["code"]
                    )
                    self.held.discard(id)

    @property
    def the_worker(self) -> Worker:
        assert self.worker is not None, "a message to nobody"
        return self.worker

    def begin(self, message: Dispatch) -> None:
        worker, key = self.the_worker, message.key
        assert worker.is_ready
        assert not worker.is_told_to_end
        assert key not in worker.rows, "dispatched twice"
        assert len(worker.rows) < ROWS, "more rows than there are"
        id = self.ids.setdefault(key, self.id_of(key))
        assert id not in self.held, "dispatched though it is paused"
        assert (message.resume is not None) == (key in self.accepted)
        if message.resume is not None:
            assert message.resume.delivered == pack_tokens([9] * self.sent[id])
        worker.kept.discard(key)
        worker.rows[key] = Row()

    def id_of(self, key: RequestKey) -> str:
        request = self.driver.core.ledger.get(key)
        assert request is not None
        return str(request.id)

    # ------------------------------------------------------------ people

    @rule(
        may_resume=st.sampled_from([True, True, True, False]),
        priority=st.sampled_from([Priority.BATCH, *Priority]),
    )
    def ask(self, may_resume: bool, priority: Priority) -> None:
        id = f"r{len(self.sent)}"
        self.sent[id] = 0
        self.driver.ask(id, body=id.encode(), resume=may_resume, priority=priority)

    def choose(self, which: int, *, paused: bool) -> str | None:
        found = [id for id in self.sent if id not in self.ended and (id in self.held) is paused]
        return found[which % len(found)] if found else None

    @rule(which=st.integers(0, 5))
    def pause(self, which: int) -> None:
        id = self.choose(which, paused=False)
        if id is not None:
            self.driver.pause(id)
            if self.driver.sent(Reply):
                self.held.add(id)
                is_served = self.driver.state() in (State.READY, State.DRAINING)
                told = [row.keep for key, row in self.rows_of(id) if is_served]
                assert None not in told, "its row was not asked to leave"

    def rows_of(self, id: str) -> list[tuple[RequestKey, Row]]:
        rows = self.worker.rows if self.worker is not None else {}
        return [(key, row) for key, row in rows.items() if self.ids[key] == id]

    @rule(which=st.integers(0, 5))
    def resume(self, which: int) -> None:
        id = self.choose(which, paused=True)
        if id is not None:
            # Before: it may be dispatched at once.
            self.held.remove(id)
            self.driver.resume(id)
            assert self.driver.sent(Reply), "what was paused can be resumed"

    @rule(which=st.integers(0, 5), paused=st.booleans())
    def cancel(self, which: int, paused: bool) -> None:
        id = self.choose(which, paused=paused)
        if id is not None:
            self.driver.cancel(id)

    @rule()
    def load(self) -> None:
        self.driver.load()

    @rule()
    def unload(self) -> None:
        # A living worker brings them to their end; who has not begun ends.
        before = self.held - self.in_rows
        self.held -= before
        self.driver.unload()
        assert not before & set(self.driver.row()["paused"])

    @rule(now=st.booleans())
    def restart(self, now: bool) -> None:
        self.driver.restart(now=now)

    @rule(seconds=st.sampled_from([0.01, 0.2, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.driver.pass_time(seconds)

    # ------------------------------------------------------------ the worker

    @rule()
    def comes_up(self) -> None:
        worker = self.worker
        if worker is None or worker.is_told_to_end or worker.is_ready:
            return
        if not worker.has_pid:
            worker.has_pid = True
            self.driver.spawned()
        self.driver.hello()
        worker.is_ready = True
        self.driver.ready()

    @property
    def in_rows(self) -> set[str]:
        """Whom the worker holds."""
        return {self.ids[key] for key in self.worker.rows} if self.worker is not None else set()

    def row(self, which: int) -> RequestKey | None:
        rows = list(self.worker.rows) if self.worker is not None else []
        return rows[which % len(rows)] if rows else None

    @rule(which=st.integers(0, 1))
    def accepts(self, which: int) -> None:
        key = self.row(which)
        if key is not None:
            if not self.the_worker.rows[key].is_cancelled:
                self.accepted.add(key)
            self.driver.accept(key)

    def step(self, row: RowDelta) -> None:
        self.driver.worker(Step(step=1, rows=[row]))

    @rule(which=st.integers(0, 1))
    def gives_a_token(self, which: int) -> None:
        key = self.row(which)
        if key is not None and key in self.accepted:
            self.step(RowDelta(key=key, tokens=pack_tokens([9])))

    @rule(which=st.integers(0, 1))
    def comes_to_its_end(self, which: int) -> None:
        key = self.row(which)
        if key is not None and key in self.accepted:
            del self.the_worker.rows[key]
            finish = FinishReason.STOP
            self.step(RowDelta(key=key, tokens=pack_tokens([9]), finish=finish))

    @rule(which=st.integers(0, 1), tokens=st.integers(0, 1))
    def obeys_about_a_row(self, which: int, tokens: int) -> None:
        key = self.row(which)
        if key is None:
            return
        row = self.the_worker.rows[key]
        if row.keep is None and not row.is_cancelled:
            return
        del self.the_worker.rows[key]
        if row.keep is None:
            self.step(RowDelta(key=key, finish=FinishReason.CANCELLED))
            return
        if self.driver.model().life.wanted is not Wanted.UP:
            self.held.discard(self.ids[key])  # it may return at once, and is not waited for
        is_begun = key in self.accepted
        state = RowState.KEPT if row.keep and is_begun else RowState.DROPPED
        if state is RowState.KEPT:
            self.the_worker.kept.add(key)
        self.step(RowDelta(key=key, tokens=pack_tokens([9] * tokens * is_begun), paused=state))

    @rule(signal=st.sampled_from(["SIGKILL", "SIGKILL", "SIGSEGV"]))
    def dies(self, signal: str) -> None:
        if self.worker is not None and self.worker.has_pid:
            self.worker = None
            self.driver.exit(signal=signal)

    @rule()
    def exits_as_asked(self) -> None:
        worker = self.worker
        if worker is not None and worker.is_told_to_end:
            if not worker.has_pid:
                worker.has_pid = True
                self.driver.spawned()
            self.worker = None
            self.driver.exit(code=0)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def the_status_knows_who_is_paused(self) -> None:
        shown = set(self.driver.row()["paused"])
        assert shown <= self.held
        assert self.held - shown <= self.in_rows, "paused, and nowhere to be seen"

    @invariant()
    def a_worker_keeps_states_for_those_who_may_return(self) -> None:
        if self.worker is not None and not self.worker.is_told_to_end:
            opened = {key for key, id in self.ids.items() if id not in self.ended}
            assert self.worker.kept <= opened

    @precondition(lambda self: len(self.sent) > 20)
    @rule()
    def goes_well(self) -> None:
        self.heal()

    def heal(self) -> None:
        """Everything is resumed and obeyed: then each request has one end."""
        for _ in range(len(self.sent) * 8 + 40):
            if len(self.ended) == len(self.sent):
                return
            for id in sorted(self.held):
                self.held.discard(id)
                self.driver.resume(id)
            self.exits_as_asked()
            if self.driver.state() in (State.STOPPED, State.FAILED):
                self.load()
            self.comes_up()
            for _ in range(ROWS):
                self.obeys_about_a_row(0, 0)
                self.accepts(0)
                self.ends_unless_told(0)
            self.driver.pass_time(0.2)
        raise AssertionError(f"no end: {set(self.sent) - set(self.ended)}")

    def ends_unless_told(self, which: int) -> None:
        key = self.row(which)
        if key is not None and self.the_worker.rows[key].keep is None:
            self.comes_to_its_end(which)

    def teardown(self) -> None:
        self.heal()
        for id, finish in self.ended.items():
            if finish == FinishReason.STOP:
                assert self.driver.result_of(id).usage.completion_tokens == self.sent[id]


PausingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestPausing = PausingMachine.TestCase
