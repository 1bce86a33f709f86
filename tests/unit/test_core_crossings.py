"""Commands, reloads, stops and crashes that cross each other, in every order, from every state.

A model is brought to a state; then every sequence of a few things happens to it, one right after
the other. After that its workers do what they are asked and nothing more goes wrong: then every
request and every command has exactly one answer, and the shutdown comes to its end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Done, Failed, Reload, Reply
from mlxsup.protocol.flight import Entry
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import CancelRow, Dispatch, Exit
from mlxsup.supervisor.core.actions import (
    Action,
    Finish,
    ReadConfiguration,
    RequestEnded,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
    WorkerSignal,
)
from mlxsup.supervisor.core.events import Caller, Reloaded
from mlxsup.supervisor.core.lifecycle.states import Draining
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import ALICE, BOB

LIMITS = CoreSettings(max_queue=99, max_queue_per_client=99, drain_timeout_s=600.0)
OTHER = replace(LAUNCH, path="/other", max_concurrency=1, step_timeout_s=0.5)
MOST_ROUNDS = 60


class World:
    """One model and its workers, which obey; the tests decide when.

    Args:
        is_blocked: another model, `z`, has the load turn until all goes well.
    """

    def __init__(self, *, is_blocked: bool) -> None:
        self.others = (entry("z"),) if is_blocked else ()
        self.is_z_ready = self.is_z_told = False
        self.has_z = is_blocked
        self.driver = Driver([entry(), *self.others], LIMITS)
        self.asked: list[str] = []
        self.answers: Counter[str] = Counter()
        self.has_pid = self.is_ready = self.is_told = self.has_process = False
        self.rows: dict[int, None] = {}
        self.callers: list[Caller] = []
        self.configured: ModelSettings | None = entry()
        self.launched = LAUNCH
        self.ends_at: float | None = None
        self.has_finished = False
        if is_blocked:
            self.driver.load("z")
            self.driver.spawned("z", pid=5)
        self.driver.obey = self.obey

    def obey(self, actions: list[Action]) -> None:
        for action in actions:
            self._obey(action)
        for model in self.driver.core.fleet:
            if self.ends_at is not None and isinstance(model.life.phase, Draining):
                assert model.life.phase.ends_at <= self.ends_at, "a drain outlasts the stop"

    def _obey(self, action: Action) -> None:
        is_said = isinstance(action, SendToClient | RequestEnded | Entry)
        assert not self.has_finished or is_said, action
        match action:
            case SendToWorker(model="z", message=Exit()) | SignalWorker(model="z"):
                self.is_z_told = True
            case SendToClient(message=Reply(id=id) | Failed(id=id) | Done(id=id)):
                self.answers[id] += 1
            case Spawn(launch=launch):
                assert not self.has_process, "two processes of one model"
                self.has_process, self.launched = True, launch
            case SendToWorker(message=Dispatch(key=key)):
                assert self.is_ready
                assert not self.is_told
                self.rows[key] = None
            case SendToWorker(message=CancelRow()):
                assert self.is_ready
            case SendToWorker(message=Exit()):
                self.is_told = True
            case SignalWorker(signal=signal):
                assert self.has_pid
                assert signal is not WorkerSignal.DUMP, "a healthy worker was taken for stalled"
                self.is_told = True
            case ReadConfiguration(caller=caller):
                self.callers.append(caller)
            case Finish():
                assert not self.has_process
                assert not self.has_z
                self.has_finished = True

    # ------------------------------------------------------------ what may happen

    def command(self, name: str, **more: object) -> None:
        self.asked.append(getattr(self.driver, name)(**more))

    def ask(self) -> None:
        id = f"r{len(self.asked)}"
        self.asked.append(id)
        self.driver.ask(id, connection=BOB, body=id.encode())

    def reload(self, *models: ModelSettings) -> None:
        id = f"reload{len(self.asked)}"
        self.asked.append(id)
        self.driver.say(Reload(id=RequestId(id)), ALICE)
        self.read(*models)

    def read(self, *models: ModelSettings) -> None:
        """The shell has read the configuration, for whoever asked."""
        if self.callers and self.ends_at is None:
            self.configured = models[0] if models else None
        for caller in self.callers:
            event = Reloaded(
                now=self.driver.now,
                settings=LIMITS,
                models=(*models, *self.others),
                caller=caller,
            )
            self.driver.do(event)
        self.callers.clear()

    def stop(self, limit_s: float) -> None:
        ends_at = self.driver.now + limit_s
        self.ends_at = ends_at if self.ends_at is None else min(self.ends_at, ends_at)
        self.command("stop", now=limit_s == 0.0, timeout_s=limit_s or None)

    def come_up(self) -> None:
        """One step of a process on its way: its pid, or READY."""
        if self.has_process and not self.has_pid:
            self.has_pid = True
            self.driver.spawned()
        elif self.has_process and not self.is_ready and not self.is_told:
            self.is_ready = True
            self.driver.hello()
            self.driver.ready()

    def end_row(self) -> None:
        if self.rows and self.has_process:
            key = next(iter(self.rows))
            del self.rows[key]
            self.driver.token(key, finish=FinishReason.STOP)

    def crash(self, code: int | None = None) -> None:
        if not self.has_process:
            return
        has_pid = self.has_pid
        self.has_pid = self.is_ready = self.is_told = self.has_process = False
        self.rows.clear()
        if has_pid:
            self.driver.exit(code=code, signal="SIGSEGV")
        else:
            self.driver.spawn_failed()

    # ------------------------------------------------------------ winding up

    def wind_up(self) -> None:
        """Everything goes well from now on: everybody is answered, then all of it ends."""
        for _ in range(MOST_ROUNDS):
            self._go_well()
            if all(self.answers[id] for id in self.asked):
                break
        assert [id for id in self.asked if self.answers[id] != 1] == [], "not answered once"
        if self.ends_at is None:
            self._check_configuration()
        self.driver.signal()
        for _ in range(MOST_ROUNDS):
            self._go_well()
            if self.has_finished:
                return
        raise AssertionError("the shutdown does not end")

    def _check_configuration(self) -> None:
        """The latest configuration is what runs, unless a stop came before it."""
        for _ in range(MOST_ROUNDS):
            self._go_well()
        if self.configured is None:
            rows = self.driver.core.status(self.driver.now)["models"]
            assert [row["name"] for row in rows] == [other.name for other in self.others]
            assert not self.has_process
        elif self.driver.state() is State.READY:
            assert self.launched == self.configured.launch, "a process of an old entry serves"

    def _go_well(self) -> None:
        if self.is_told and self.has_pid:
            self.crash(code=0)
        if self.has_z and self.is_z_told:
            self.has_z = False
            self.driver.exit("z", code=0)
        elif self.has_z and not self.is_z_ready:
            self.is_z_ready = True
            self.driver.hello("z")
            self.driver.ready("z")
        self.come_up()
        self.end_row()
        self.driver.pass_time(1.0)


HAPPENINGS: dict[str, Callable[[World], object]] = {
    "ask": World.ask,
    "load": lambda world: world.command("load"),
    "unload": lambda world: world.command("unload"),
    "restart": lambda world: world.command("restart"),
    "restart now": lambda world: world.command("restart", now=True),
    "reload": lambda world: world.reload(entry()),
    "change": lambda world: world.reload(entry(launch=OTHER)),
    "change idle": lambda world: world.reload(entry(idle_unload_s=0.5)),
    "remove": World.reload,
    "stop": lambda world: world.stop(1.0),
    "stop now": lambda world: world.stop(0.0),
    "come up": World.come_up,
    "end a row": World.end_row,
    "crash": World.crash,
    "exit": lambda world: world.crash(code=0),
    "time": lambda world: world.driver.pass_time(1.5),
}

TO: dict[State, tuple[str, ...]] = {
    State.STOPPED: (),
    State.PENDING: ("load", "ask"),
    State.LOADING: ("load", "come up"),
    State.READY: ("load", "come up", "come up", "ask", "ask", "ask"),
    State.DRAINING: ("load", "come up", "come up", "ask", "unload"),
    State.STOPPING: ("load", "come up", "come up", "unload"),
    State.BACKOFF: ("load", "come up", "come up", "crash", "come up", "crash", "ask"),
    State.FAILED: ("load", *(("come up", "crash", "time", "time", "time") * 4)),
}


def play(state: State, names: tuple[str, ...]) -> None:
    world = World(is_blocked=state is State.PENDING)
    for name in TO[state]:
        HAPPENINGS[name](world)
    assert world.driver.state() is state
    for name in names:
        HAPPENINGS[name](world)
    world.wind_up()


def check_all(state: State, length: int) -> None:
    for names in itertools.product(HAPPENINGS, repeat=length):
        try:
            play(state, names)
        except Exception as error:
            raise AssertionError(f"{state}: {', '.join(names)}") from error


@pytest.mark.parametrize("state", TO)
def test_two_things_that_cross_leave_nobody_unanswered_P1_P12(state: State) -> None:
    check_all(state, 2)


@pytest.mark.slow
@pytest.mark.parametrize("state", TO)
def test_three_things_that_cross_leave_nobody_unanswered_P1_P12(state: State) -> None:
    check_all(state, 3)
