"""Drives the pure core in tests: only tests move the clock, and they play workers and clients."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlxsup.protocol.client_messages import (
    Cancel,
    ClientMessage,
    Done,
    Failed,
    Generate,
    Load,
    PauseRequest,
    Prioritize,
    Restart,
    ResumeRequest,
    Stop,
    Unload,
)
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import (
    ConnectionId,
    Generation,
    ModelName,
    RequestId,
    RequestKey,
    pack_tokens,
)
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import FinishReason, LoadPhase, Priority, RowState, WorkerPhase
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    Heartbeat,
    Hello,
    LoadProgress,
    PauseRow,
    Ready,
    RowDelta,
    Step,
    WorkerMessage,
)
from mlxsup.supervisor.core.actions import Action, LookAtFiles, SendToClient, SendToWorker, WakeAt
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.core.events import (
    ClientGone,
    ClientSaid,
    Event,
    Exited,
    FilesSeen,
    Sampled,
    ShutdownAsked,
    Spawned,
    SpawnFailed,
    Started,
    Tick,
    WorkerBroke,
    WorkerSaid,
    WorkerSeen,
    WorkerUnlinked,
)
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings, RestartSettings

from support.core.looks import ALICE, End, Looks


class Folders:
    """Answers at once whenever a core asks for a look at files.

    Attributes:
        changes: what has changed, by model; nothing has in the others.
        looks: the models that were looked at, in order.
        is_slow: whether no look comes to an end by itself.
    """

    def __init__(self) -> None:
        self.changes: dict[str, str] = {}
        self.looks: list[str] = []
        self.is_slow = False

    def handle(self, core: Core, event: Event) -> list[Action]:
        """Hands over an event, and what the core has to know of files before it acts on it."""
        actions = core.handle(event)
        asked = [action for action in actions if isinstance(action, LookAtFiles)]
        for look in asked:
            self.looks.append(look.model)
            if not self.is_slow:
                actions += self.handle(core, self._seen(look, event.now))
        return actions

    def answer(self, core: Core, model: str, now: float) -> list[Action]:
        """A slow look at the files of a live process comes to its end."""
        name = ModelName(model)
        generation = core.fleet.by_name[name].life.generation
        return self.handle(core, self._seen(LookAtFiles(model=name, generation=generation), now))

    def _seen(self, look: LookAtFiles, now: float) -> FilesSeen:
        change = self.changes.get(look.model, "")
        return FilesSeen(now=now, model=look.model, generation=look.generation, change=change)


LAUNCH = LaunchSettings(path="/m", engine="fake", max_concurrency=2)
RESTART = RestartSettings(
    max_restarts=3, window_s=100.0, stable_s=10.0, backoff_initial_s=1.0, backoff_max_s=4.0
)


def entry(name: str = "m", **changes: Any) -> ModelSettings:
    """A model's settings with small limits; `changes` replace fields."""
    settings = ModelSettings(
        name=ModelName(name), launch=LAUNCH, preload=False, load_stall_timeout_s=20.0,
        restart=RESTART,
    )  # fmt: skip
    return replace(settings, **changes)


MOST_WAKES = 100
"""More timers than that are never due at one moment: the core would wake for ever."""


class Driver(Looks):
    """A core under test; invariants are checked after every event.

    Attributes:
        obey: what the world does at once about the actions of each event; None for nothing.
        is_checked: whether invariants are checked after every event.
        pausing: rows that workers were told to pause and have not, and whether to keep their state.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings] | None = None,
        settings: CoreSettings | None = None,
        *,
        is_strict: bool = True,
        gateway: Address | None = None,
    ) -> None:
        self.now = 1000.0
        self.core = Core(
            settings or CoreSettings(max_queue=8, max_queue_per_client=4, drain_timeout_s=5.0),
            list(models) if models is not None else [entry()],
            facts={"pid": 1, "version": VERSION},
            random=random.Random(7),
            is_strict=is_strict,
            gateway=gateway,
        )
        self.actions: list[Action] = []
        self.woken_at: list[float] = []
        self.terminals: dict[tuple[bytes, str], list[End]] = {}
        self.folders = Folders()
        self.obey: Callable[[list[Action]], None] | None = None
        self.is_checked = True
        self.pausing: dict[RequestKey, bool] = {}
        self._command = 0
        self.do(Started(now=self.now))

    # ------------------------------------------------------------ events

    def do(self, event: Event) -> list[Action]:
        """Hands over one event and keeps what came of it in `actions`."""
        self.actions = self.folders.handle(self.core, event)
        if self.is_checked:
            self.core.check_invariants()
        for action in self.actions:
            if isinstance(action, WakeAt):
                self.woken_at.append(action.when)
            elif isinstance(action, SendToWorker) and isinstance(action.message, PauseRow):
                self.pausing[action.message.key] = action.message.keep
            elif isinstance(action, SendToClient) and isinstance(action.message, Done | Failed):
                key = (bytes(action.connection), str(action.message.id))
                self.terminals.setdefault(key, []).append(action.message)
        actions = self.actions
        if self.obey is not None:
            self.obey(actions)
        return actions

    def pass_time(self, seconds: float) -> list[Action]:
        """Moves the clock and fires every timer that was asked for on the way."""
        end = self.now + seconds
        gathered: list[Action] = []
        again = 0
        while True:
            due = sorted(when for when in self.woken_at if when <= end)
            if not due:
                break
            self.woken_at = [when for when in self.woken_at if when > due[0]]
            again = again + 1 if due[0] <= self.now else 0
            assert again < MOST_WAKES, f"the core wakes again and again at {self.now}"
            self.now = max(self.now, due[0])
            gathered += self.do(Tick(now=self.now))
        self.now = end
        self.actions = gathered
        return gathered

    def say(
        self, message: ClientMessage, connection: ConnectionId = ALICE, process: str = ""
    ) -> list[Action]:
        """A client says something."""
        said = ClientSaid(now=self.now, connection=connection, message=message, process=process)
        return self.do(said)

    def ask(
        self,
        id: str = "r1",
        model: str = "m",
        connection: ConnectionId = ALICE,
        process: str = "",
        **more: Any,
    ) -> list[Action]:
        """A client asks for an answer."""
        more.setdefault("body", b"body")
        message = Generate(id=RequestId(id), model=ModelName(model), **more)
        return self.say(message, connection, process)

    def prioritize(self, request: str, priority: Priority) -> RequestId:
        """`mlxsup prioritize`; returns the command's id."""
        id = self._next_id()
        return self._say_command(Prioritize(id=id, request=RequestId(request), priority=priority))

    def cancel(self, id: str = "r1", connection: ConnectionId = ALICE) -> list[Action]:
        """A client cancels."""
        return self.say(Cancel(id=RequestId(id)), connection)

    def load(self, model: str = "m") -> RequestId:
        """`mlxsup load`; returns the command's id."""
        return self._say_command(Load(id=self._next_id(), model=ModelName(model)))

    def unload(self, model: str = "m") -> RequestId:
        """`mlxsup unload`; returns the command's id."""
        return self._say_command(Unload(id=self._next_id(), model=ModelName(model)))

    def restart(self, model: str = "m", *, now: bool = False) -> RequestId:
        """`mlxsup restart`; returns the command's id."""
        return self._say_command(Restart(id=self._next_id(), model=ModelName(model), now=now))

    def pause(self, id: str = "r1", connection: ConnectionId = ALICE) -> RequestId:
        """`mlxsup pause`; returns the command's id."""
        return self._say_command(
            PauseRequest(id=self._next_id(), request=RequestId(id)), connection
        )

    def resume(self, id: str = "r1", connection: ConnectionId = ALICE) -> RequestId:
        """`mlxsup resume`; returns the command's id."""
        return self._say_command(
            ResumeRequest(id=self._next_id(), request=RequestId(id)), connection
        )

    def stop(self, *, now: bool = False, timeout_s: float | None = None) -> RequestId:
        """`mlxsup stop`; returns the command's id."""
        return self._say_command(Stop(id=self._next_id(), now=now, timeout_s=timeout_s))

    def signal(self, *, is_immediate: bool = False) -> list[Action]:
        """SIGTERM to the supervisor."""
        return self.do(ShutdownAsked(now=self.now, is_immediate=is_immediate))

    def leave(self, connection: ConnectionId = ALICE) -> list[Action]:
        """A client's connection closes."""
        return self.do(ClientGone(now=self.now, connection=connection))

    def spawned(self, model: str = "m", pid: int = 77) -> list[Action]:
        """The process runs."""
        return self.do(
            Spawned(
                now=self.now, model=ModelName(model), generation=self.generation(model), pid=pid
            )
        )

    def spawn_failed(self, model: str = "m") -> list[Action]:
        """The process could not be started."""
        generation = self.generation(model)
        return self.do(
            SpawnFailed(
                now=self.now, model=ModelName(model), generation=generation, detail="no memory"
            )
        )

    def worker(
        self, message: WorkerMessage, model: str = "m", generation: int | None = None
    ) -> list[Action]:
        """A worker says something, by default the one that lives now."""
        current = self.generation(model) if generation is None else Generation(generation)
        return self.do(
            WorkerSaid(now=self.now, model=ModelName(model), generation=current, message=message)
        )

    def hello(self, model: str = "m", version: str = VERSION) -> list[Action]:
        name, generation = ModelName(model), self.generation(model)
        hello = Hello(model=name, generation=generation, token="t", pid=77, version=version)
        return self.worker(hello, model)

    def progress(self, fraction: float, model: str = "m") -> list[Action]:
        """The load proceeds."""
        return self.worker(LoadProgress(phase=LoadPhase.WEIGHTS, progress=fraction), model)

    def ready(self, model: str = "m") -> list[Action]:
        return self.worker(Ready(context_length=100, fingerprint="f", backend="fake"), model)

    def come_up(self, model: str = "m", pid: int = 77) -> None:
        """From the spawn to READY."""
        self.spawned(model, pid)
        self.hello(model)
        self.ready(model)

    def beat(
        self,
        phase: WorkerPhase = WorkerPhase.DECODE,
        *,
        step: int = 0,
        phase_s: float = 0.0,
        predicted_s: float = 0.0,
        requests: int | None = None,
        preparing: int = 0,
        model: str = "m",
    ) -> list[Action]:
        """A heartbeat; with `requests`, nothing is under way and it holds that many."""
        message = Heartbeat(
            step=step,
            phase=phase,
            phase_s=phase_s,
            predicted_s=predicted_s,
            requests=requests or 0,
            preparing=preparing,
        )
        watch = self.core.fleet.by_name[ModelName(model)].process.watch
        if requests is not None and watch is not None:
            message = replace(message, sent=watch.heard, received=watch.told)
        return self.worker(message, model)

    def unlinked(self, model: str = "m") -> list[Action]:
        """The worker's connection has ended."""
        return self.do(
            WorkerUnlinked(now=self.now, model=ModelName(model), generation=self.generation(model))
        )

    def sample(
        self, footprint_bytes: int, *, machine_bytes: int = 1, pid: int | None = None
    ) -> list[Action]:
        """The monitor has measured `m`, whose process is this one now or was it before."""
        measured = {pid or self.row()["pid"]: footprint_bytes}
        return self.do(Sampled(now=self.now, footprint_bytes=measured, machine_bytes=machine_bytes))

    def seen(self, *, is_stopped: bool, model: str = "m") -> list[Action]:
        """The shell has looked at the process."""
        return self.do(
            WorkerSeen(
                now=self.now,
                model=ModelName(model),
                generation=self.generation(model),
                is_stopped=is_stopped,
            )
        )

    def broke(self, model: str = "m") -> list[Action]:
        """The worker sends garbage."""
        return self.do(
            WorkerBroke(
                now=self.now,
                model=ModelName(model),
                generation=self.generation(model),
                detail="garbage",
            )
        )

    def serve(self, *ids: str, model: str = "m", **more: Any) -> list[RequestKey]:
        """Asks for answers with a prompt each; returns the keys that were dispatched."""
        keys: list[RequestKey] = []
        for id in ids:
            self.ask(id, model, body=id.encode(), **more)
            keys += self.dispatched()
        return keys

    def exit(
        self,
        model: str = "m",
        code: int | None = None,
        signal: str = "SIGKILL",
        generation: int | None = None,
        last_lines: tuple[str, ...] = ("last words",),
        at: float = 1.0,
    ) -> list[Action]:
        """The worker's process is gone: by `signal`, or with `code`; `at` by the wall clock."""
        current = self.generation(model) if generation is None else Generation(generation)
        return self.do(
            Exited(
                now=self.now,
                model=ModelName(model),
                generation=current,
                exit_code=code,
                signal_name="" if code is not None else signal,
                last_lines=last_lines,
                at=at,
            )
        )

    def accept(
        self, key: int, model: str = "m", *, needs_body: bool = False, **parameters: Any
    ) -> list[Action]:
        """The worker accepts a request of three prompt tokens."""
        acceptance = Acceptance(
            prompt_tokens=pack_tokens([1, 2, 3]),
            opening="",
            parameters=parameters,
            seed=5,
            fingerprint="f",
            needs_body=needs_body,
        )
        return self.worker(
            Accepted(key=RequestKey(key), acceptance=acceptance, tokenize_s=0.1), model
        )

    def token(
        self, *keys: int, model: str = "m", finish: FinishReason | None = None
    ) -> list[Action]:
        """One step that gives each row a token."""
        rows = [
            RowDelta(key=RequestKey(key), text="x", tokens=pack_tokens([9]), finish=finish)
            for key in keys
        ]
        return self.worker(Step(step=1, rows=rows), model)

    def compute(self, seconds: float, *keys: int, model: str = "m") -> list[Action]:
        """One step that takes so long and gives each row a token; its engine is alone."""
        self.accept(keys[0], model)
        self.now += seconds
        rows = [RowDelta(key=RequestKey(key), text="x", tokens=pack_tokens([9])) for key in keys]
        return self.worker(Step(step=1, rows=rows, took_s=seconds, decode_s=seconds), model)

    def row_left(self, key: int, model: str = "m", tokens: int = 0) -> list[Action]:
        """A row that was to be cancelled or paused has left, after tokens computed ahead."""
        row = RowDelta(key=RequestKey(key), tokens=pack_tokens([9] * tokens))
        keep = self.pausing.pop(row.key, None)
        if keep is None:
            row.finish = FinishReason.CANCELLED
        else:
            row.paused = RowState.KEPT if keep else RowState.DROPPED
        return self.worker(Step(step=1, rows=[row]), model)

    def _next_id(self) -> RequestId:
        self._command += 1
        return RequestId(f"c{self._command}")

    def _say_command(self, message: ClientMessage, connection: ConnectionId = ALICE) -> RequestId:
        self.say(message, connection)
        return message.id
