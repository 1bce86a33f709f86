"""Any loads, rows, confirmations, crashes: head-room never makes the reserved more than the budget.

The machine plays the workers: each takes, at the worst, as much as the largest budget that it has
heard of and not left behind. Messages and beats arrive late, and in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.worker_messages import Dispatch, Exit, SetBudget
from mlxsup.supervisor.core.actions import Action, SendToWorker, SignalWorker, Spawn

from support.core_rows import CONTEXT, FIXED, LEAST, RowsDriver, bytes_for, need_of

NAMES = "abc"
names = st.sampled_from(NAMES)


@dataclass(slots=True)
class Process:
    """A worker, and what its rows may take at the worst.

    Attributes:
        heard: the budgets on their way to it, and behind them the one that it keeps to.
        lengths: of its rows, by key.
    """

    is_ready: bool = False
    is_ending: bool = False
    heard: list[SetBudget] = field(default_factory=list)
    keeps_to: SetBudget | None = None
    lengths: dict[RequestKey, int] = field(default_factory=dict)

    @property
    def worst_bytes(self) -> int:
        kept = [] if self.keeps_to is None else [self.keeps_to]
        return max((one.rows_bytes for one in [*kept, *self.heard]), default=0)


class HeadRoomMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.processes: dict[str, Process] = {}
        self.asked = 0

    @initialize(
        budget=st.sampled_from([13_000, 16_000, 30_000, 50_000, 500]),
        raised=st.sampled_from([0, 4000, 20_000]),
    )
    def start(self, budget: int, raised: int) -> None:
        self.budget = FIXED + bytes_for(1, LEAST) + budget
        needs = {name: replace(need_of(), raised_bytes=raised) for name in NAMES}
        self.driver = RowsDriver(NAMES, self.budget, needs, queue_timeout_s=1e9)
        listen = self.driver.listen

        def obey(actions: list[Action]) -> None:
            listen(actions)
            self.obey_all(actions)

        self.driver.obey = obey

    def obey_all(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Spawn(model=model):
                    self.processes[model] = Process()
                case SendToWorker(model=model, message=SetBudget() as message):
                    self.processes[model].heard.append(message)
                case SendToWorker(model=model, message=Dispatch(key=key)):
                    self.processes[model].lengths[key] = 0
                case SendToWorker(model=model, message=Exit()) | SignalWorker(model=model):
                    self.processes[model].is_ending = True

    # ------------------------------------------------------------ what happens

    @rule(model=names)
    def a_load(self, model: str) -> None:
        self.driver.load(model)

    @rule(model=names)
    def a_request(self, model: str) -> None:
        self.asked += 1
        self.driver.ask(f"r{self.asked}", model, body=str(self.asked).encode())

    @rule()
    def whoever_loads_is_ready(self) -> None:
        for name in NAMES:
            self.comes_up(name)

    @rule(model=names, prompt=st.integers(1, CONTEXT - 500))
    def a_row_is_accepted(self, model: str, prompt: int) -> None:
        process = self.processes.get(model)
        for key, length in list(process.lengths.items()) if process else ():
            if not length:
                assert process
                process.lengths[key] = prompt
                self.driver.accept_long(model, key, prompt)
                return

    @rule(model=names, tokens=st.integers(1, 200))
    def a_row_grows_and_leaves_if_there_is_no_room(self, model: str, tokens: int) -> None:
        process = self.processes.get(model)
        accepted = [key for key, length in process.lengths.items() if length] if process else []
        if not process or not accepted:
            return
        key = accepted[-1]
        process.lengths[key] += tokens
        self.driver.gain(model, key, tokens)
        kept = process.keeps_to
        longest = max(process.lengths.values())
        if kept and bytes_for(len(process.lengths), longest) > kept.rows_bytes:
            del process.lengths[key]
            self.driver.short(model, key)

    @rule(model=names)
    def a_row_ends(self, model: str) -> None:
        process = self.processes.get(model)
        accepted = [key for key, length in process.lengths.items() if length] if process else []
        if process and accepted:
            del process.lengths[accepted[0]]
            self.driver.end(model, accepted[0])

    @rule(model=names)
    def a_budget_arrives(self, model: str) -> None:
        process = self.processes.get(model)
        if process and process.heard:
            process.keeps_to = process.heard.pop(0)
            self.driver.confirm(model, number=process.keeps_to.number)

    @rule(model=names, code=st.sampled_from([1, 75]))
    def a_crash(self, model: str, code: int) -> None:
        if self.processes.pop(model, None):
            self.driver.exit(model, code=code)

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.driver.pass_time(seconds)
        self.driver.measure()
        for name, process in list(self.processes.items()):
            if process.is_ending:
                del self.processes[name]
                self.driver.exit(name, code=0)

    # ------------------------------------------------------------ what is always so

    @invariant()
    def what_processes_may_take_is_reserved_and_fits(self) -> None:
        if not hasattr(self, "driver"):
            return
        assert self.driver.reserved() <= self.budget
        for name, process in self.processes.items():
            reserved = self.driver.row(name)["reserved_bytes"]
            assert reserved >= (FIXED + process.worst_bytes if process.is_ready else FIXED)

    def teardown(self) -> None:
        """Whoever waits gets its turn once everything obeys."""
        if not hasattr(self, "driver"):
            return
        for _ in range(60):
            self.quiet_round()
            rows = [self.driver.row(name) for name in NAMES]
            if not any(row["queued"] or row["running"] for row in rows):
                return
        raise AssertionError("somebody waits for ever")

    def quiet_round(self) -> None:
        for name in NAMES:
            self.comes_up(name)
            while (process := self.processes.get(name)) and process.heard:
                self.a_budget_of(name)
            process = self.processes.get(name)
            for key in list(process.lengths) if process else ():
                assert process
                if not process.lengths[key]:
                    process.lengths[key] = 10
                    self.driver.accept_long(name, key, 10)
                del process.lengths[key]
                self.driver.end(name, key)
        self.driver.now += 7.0
        self.driver.pass_time(0.0)
        self.driver.measure()
        for name, process in list(self.processes.items()):
            if process.is_ending:
                del self.processes[name]
                self.driver.exit(name, code=0)

    def comes_up(self, name: str) -> None:
        process = self.processes.get(name)
        if process and not process.is_ready and not process.is_ending:
            process.is_ready = True
            self.driver.come_up(name)

    def a_budget_of(self, name: str) -> None:
        process = self.processes[name]
        process.keeps_to = process.heard.pop(0)
        self.driver.confirm(name, number=process.keeps_to.number)


TestHeadRoom = HeadRoomMachine.TestCase
TestHeadRoom.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
