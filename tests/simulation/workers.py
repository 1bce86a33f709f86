"""A worker's process as the simulation plays it: it obeys, and it fails as the plan's dice say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import Generation, ModelName, RequestKey, pack_tokens, unpack_tokens
from mlxsup.protocol.messages import (
    Acceptance,
    Accepted,
    CancelRow,
    Dispatch,
    Dying,
    Exit,
    Heartbeat,
    Hello,
    LoadProgress,
    Message,
    Ready,
    Rejected,
    RowDelta,
    Step,
)
from mlxsup.protocol.states import Batching, FinishReason, LoadPhase, WorkerPhase
from mlxsup.protocol.version import VERSION
from mlxsup.supervisor.core.actions import LookAtWorker, SignalWorker, WorkerSignal
from mlxsup.supervisor.core.events import (
    Exited,
    Spawned,
    SpawnFailed,
    WorkerBroke,
    WorkerSaid,
    WorkerSeen,
    WorkerUnlinked,
)

from .plan import Prompt

if TYPE_CHECKING:
    from .world import World

STEP_S = 0.2
BEAT_S = 1.0


@dataclass(slots=True, kw_only=True)
class Row:
    """One request in the batch."""

    prompt: Prompt
    generated: int
    is_accepted: bool
    is_cancelled: bool = False


class PlayedWorker:
    """One incarnation."""

    def __init__(self, world: World, model: ModelName, generation: Generation, rows: int) -> None:
        self._world, self._dice = world, world.plan.random
        self.model, self.generation = model, generation
        self.max_rows = rows
        self.is_alive = True
        self.is_ready = self.has_pid = False
        self.is_asked = self.is_broken = False
        self.is_unlinked = self.has_lost = self.is_mute = False
        self.sent = self.received = 0
        self.hang = ""
        self.rows: dict[RequestKey, Row] = {}
        self.steps = 0
        self._last_said: Message | None = None
        self._is_stepping = False
        self._step_began = 0.0
        world.after(self._dice.uniform(0.0, 0.3), self._start)

    def _happens(self, fault: str) -> bool:
        return not self._world.is_healing and self._dice.random() < self._world.plan.faults.get(
            fault, 0.0
        )

    # ------------------------------------------------------------ coming up

    def _start(self) -> None:
        common = {"now": self._world.now, "model": self.model, "generation": self.generation}
        if self._happens("spawn_fails"):
            self._gone()
            self._world.loads.ended(self, "")
            self._world.handle(SpawnFailed(detail="no processes left", **common))
            return
        self.has_pid = True
        self._world.handle(Spawned(pid=1000 + self.generation, **common))
        self._beat()
        self._world.after(0.1, self._greet)

    def _greet(self) -> None:
        if not self.is_alive or self.hang:
            return
        self.say(
            Hello(model=self.model, generation=self.generation, token="t", pid=1, version=VERSION)
        )
        self._load(0)

    def _load(self, part: int) -> None:
        if not self.is_alive or self.hang:
            return
        if self.is_asked:
            self.exit(code=0)
        elif self._happens("bad_model"):
            self.exit(code=65)
        elif self._happens("load_dies"):
            self.exit(signal="SIGKILL")
        elif self._happens("load_raises"):
            self.die(70, f"no room at {self._dice.randrange(10**6)}")
        elif self._happens("load_lacks_memory"):
            self.die(75, f"no memory for {self._dice.randrange(10**6)} bytes")
        elif self._happens("load_stalls"):
            self.hang = "load"
        elif self._happens("stop"):
            self.hang = "stop"
        elif part < 3:
            self.say(LoadProgress(phase=LoadPhase.WEIGHTS, progress=part / 3))
            self._world.after(self._dice.uniform(0.1, 1.0), lambda: self._load(part + 1))
        else:
            self.is_ready = True
            ready = Ready(
                context_length=100,
                fingerprint="f",
                backend="fake",
                batching=self._dice.choice(list(Batching)),
                batching_reason=f"seen in life {self.generation}",
            )
            self._world.loads.found(self, ready)
            self.say(ready)

    # ------------------------------------------------------------ what it is told

    def take(self, message: Message) -> None:
        """A message of the supervisor."""
        if self.is_unlinked:
            assert not isinstance(message, Dispatch), "a dispatch over a connection that has ended"
            return
        self.received += 1
        match message:
            case Dispatch(key=key, resume=resume, body=body):
                assert self.is_ready, "a dispatch before READY"
                assert not self.is_asked, "a dispatch after Exit"
                assert key not in self.rows, "a dispatch of a row that is there"
                if resume is not None:
                    assert body == b""
                    prompt = self._world.prompts[bytes(resume.acceptance.prompt_tokens)]
                    done = unpack_tokens(resume.delivered)
                    assert done == [prompt.token(n) for n in range(len(done))]
                else:
                    prompt, done = self._world.prompt_of[body], []
                self.rows[key] = Row(prompt=prompt, generated=len(done), is_accepted=bool(resume))
                assert len(self.rows) <= self.max_rows, "more rows than the engine has"
                self._wake()
            case CancelRow(key=key):
                if key in self.rows:
                    self.rows[key].is_cancelled = True
                    self._wake()
            case Exit():
                self.is_asked = True
                if not self.hang:
                    self._world.after(self._dice.uniform(0.0, 0.5), lambda: self.exit(code=0))
            case _:
                raise AssertionError(message)

    def signalled(self, action: SignalWorker) -> None:
        """A signal of the supervisor."""
        assert self.has_pid
        if action.signal is WorkerSignal.DUMP:
            assert self.hang or self.is_mute, "a healthy worker was taken for stalled (P7)"
        elif action.signal is WorkerSignal.KILL:
            is_faulty = self.is_broken or self.is_unlinked or self.has_lost or self.is_mute
            is_deserved = self.hang or is_faulty or self._world.told_to_end(self.model)
            assert is_deserved, "a healthy worker was killed (P7)"
            self._world.after(0.01, lambda: self.exit(signal="SIGKILL"))
        elif not self.hang and self._dice.random() < 0.9:
            self._world.after(0.05, lambda: self.exit(signal="SIGTERM"))

    def looked_at(self, action: LookAtWorker) -> None:
        """The shell looks at its process."""
        seen = WorkerSeen(
            now=self._world.now,
            model=self.model,
            generation=self.generation,
            is_stopped=self.hang == "stop",
        )
        if self.is_alive:
            self._world.handle(seen)

    # ------------------------------------------------------------ working

    def _wake(self) -> None:
        if not self._is_stepping and not self.hang:
            self._is_stepping = True
            self._step_began = self._world.now
            self._world.after(STEP_S, self._step)

    def _step(self) -> None:
        if not self.is_alive or self.hang or self.is_unlinked or not self.rows:
            self._is_stepping = False
            return
        if self._fails():
            return
        batch = list(self.rows.items())  # what is dispatched meanwhile joins the next step
        self._accept()
        deltas = [self._advance(key, row) for key, row in batch if key in self.rows]
        self.steps += 1
        self.say(Step(step=self.steps, rows=deltas))
        self._is_stepping = False
        if self.is_alive and self.rows:
            self._wake()

    def _fails(self) -> bool:
        poison = [r for r in self.rows.values() if r.generated == r.prompt.poison_at]
        if poison and not all(r.is_cancelled for r in poison):
            self._world.poisoned(poison[0].prompt, self.model)
            self.exit(signal=self._dice.choice(("SIGSEGV", "SIGABRT")))
            return True
        for fault, signal, code in (("kill", "SIGKILL", None), ("segv", "SIGSEGV", None),
                                    ("oom", "", 75)):  # fmt: skip
            if self._happens(fault):
                self.exit(signal=signal, code=code)
                return True
        for fault in ("stop", "stall", "gil", "blocked"):
            if self._happens(fault):
                self.hang = fault
                return True
        if self._happens("link_drops"):
            self.is_unlinked, self._is_stepping = True, False
            life = {"model": self.model, "generation": self.generation}
            self._world.handle(WorkerUnlinked(now=self._world.now, **life))
            return True
        if self._happens("row_lost"):
            self.has_lost = True
            del self.rows[self._dice.choice(list(self.rows))]
        self.is_mute = self.is_mute or self._happens("beats_end")
        if self._happens("garbage"):
            self.is_broken = True
            self._world.handle(
                WorkerBroke(
                    now=self._world.now,
                    model=self.model,
                    generation=self.generation,
                    detail="garbage",
                )
            )
            return True
        return False

    def _accept(self) -> None:
        for key, row in list(self.rows.items()):
            if row.is_accepted or row.is_cancelled or self._dice.random() < 0.2:
                continue
            if row.prompt.is_refused:
                del self.rows[key]
                error = RemoteError(ErrorCode.INVALID_REQUEST, "no").to_wire()
                self.say(Rejected(key=key, error=error))
                continue
            row.is_accepted = True
            acceptance = Acceptance(
                prompt_tokens=self._world.packed_of[row.prompt.body],
                opening="",
                parameters={},
                seed=1,
                fingerprint="f",
            )
            self.say(Accepted(key=key, acceptance=acceptance, tokenize_s=0.0))

    def _advance(self, key: RequestKey, row: Row) -> RowDelta:
        if row.is_cancelled:
            del self.rows[key]
            return RowDelta(key=key, finish=FinishReason.CANCELLED)
        if not row.is_accepted:
            return RowDelta(key=key)
        token = row.prompt.token(row.generated)
        row.generated += 1
        is_last = row.generated >= row.prompt.length
        if is_last:
            del self.rows[key]
        return RowDelta(
            key=key,
            text="x",
            tokens=pack_tokens([token]),
            finish=FinishReason.LENGTH if is_last else None,
        )

    def _beat(self) -> None:
        if not self.is_alive or self.is_mute or self.hang in ("gil", "stop"):
            return
        if not self.is_ready:
            phase, phase_s = WorkerPhase.LOADING, 0.0
        elif self.hang == "blocked":
            phase, phase_s = WorkerPhase.ROWS, self._world.now - self._step_began
        elif self._is_stepping or self.hang:
            phase, phase_s = WorkerPhase.DECODE, self._world.now - self._step_began
        else:
            phase, phase_s = WorkerPhase.IDLE, 0.0
        if self.is_ready or self._dice.random() < 0.9:
            self.say(
                Heartbeat(
                    step=self.steps,
                    phase=phase,
                    phase_s=phase_s,
                    requests=len(self.rows),
                    sent=self.sent,
                    received=self.received,
                )
            )
        self._world.after(BEAT_S, self._beat)

    # ------------------------------------------------------------ ending

    def say(self, message: Message) -> None:
        """Sends the supervisor a message."""
        is_beat = isinstance(message, Heartbeat)
        self.sent += not is_beat
        if self.is_alive and not self.is_broken and (is_beat or not self.is_unlinked):
            self._last_said = message
            self._hand_over(message)

    def _hand_over(self, message: Message) -> None:
        self._world.handle(
            WorkerSaid(
                now=self._world.now,
                model=self.model,
                generation=self.generation,
                message=message,
            )
        )

    def die(self, code: int, message: str) -> None:
        """The process says why it ends, and ends."""
        self.say(Dying(code=code, message=message))
        self.exit(code=code, said=message)

    def exit(self, *, code: int | None = None, signal: str = "", said: str = "") -> None:
        """The process ends."""
        if not self.is_alive:
            return
        self._gone()
        check = self._world.loads.ended(self, said)
        if self._last_said is not None:  # heard once more, late: nobody may take it for the next's
            late, known = self._last_said, self._world.core._models.by_name[self.model]

            def hand_over_late() -> None:
                # A model that was removed and added again counts its generations afresh.
                if self._world.core._models.by_name.get(self.model) is known:
                    self._hand_over(late)

            self._world.after(self._dice.uniform(0.0, 4.0), hand_over_late)
        self._world.handle(
            Exited(
                now=self._world.now,
                model=self.model,
                generation=self.generation,
                exit_code=code,
                signal=None if code is not None else 9,
                signal_name=signal,
            )
        )
        check()

    def _gone(self) -> None:
        self.is_alive = False
        del self._world.workers[self.model]
