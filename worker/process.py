"""A worker's life from HELLO to its exit code, on the process's main thread."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import cast

import psutil

from mlxsup.protocol.clock import Clock
from mlxsup.protocol.launch import ExitCode, LaunchSpec
from mlxsup.protocol.states import LoadPhase, WorkerPhase
from mlxsup.protocol.text import log_line, size_text
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import Dying, Exit, Hello, LoadProgress, Ready

from .engine import (
    BadLaunchError,
    BadModelError,
    DivergedError,
    Engine,
    EngineBytes,
    EngineFacts,
    GpuFaultElsewhereError,
    ModelMissingError,
    NoDeviceError,
    WorkerFaultError,
)
from .engines.fake.engine import Reach
from .engines.fake.options import FakeOptionError
from .engines.opening import open_engine
from .group.engine import GroupEngine
from .heartbeat import Board, HeartbeatThread
from .link import Link, LinkBrokenError
from .loop import StepLoop
from .memory_guard import MemoryGuard
from .text_threads import TextThreads
from .thread_guard import OwnedEngine
from .tokenising import StuckPreprocessingError

LINGER_S = 2.0
"""How long the last messages may take to leave."""

TERMINATED_EXIT = 128 + signal.SIGTERM
"""Exit code for a SIGTERM without an Exit message before it: nobody asked for that death."""

MAX_CAUSE = 500
"""The most characters of a cause, which is shown as one line of a table."""

logger = logging.getLogger(__name__)


class ExitAskedError(BaseException):
    """The supervisor asked for the exit while the model was loading (B9)."""


class TerminatedError(BaseException):
    """SIGTERM came; not an Exception, so that no loader's error handling swallows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Why a worker exits without being asked to.

    Attributes:
        code: what it exits with.
        message: one sentence.
        is_expected: whether the sentence says everything, so that no traceback is logged.
    """

    code: int
    message: str
    is_expected: bool


def judge(error: BaseException) -> Death:
    """Return the exit code that an exception means, with its message; see
    `protocol.launch.ExitCode`."""
    known: tuple[tuple[type[BaseException], int], ...] = (
        (ModelMissingError, ExitCode.MODEL_MISSING),
        (BadModelError, ExitCode.BAD_MODEL),
        (BadLaunchError, ExitCode.BAD_LAUNCH),
        (NoDeviceError, ExitCode.NO_DEVICE),
        (GpuFaultElsewhereError, ExitCode.GPU_FAULT_ELSEWHERE),
        (FakeOptionError, ExitCode.BAD_LAUNCH),
        (TerminatedError, TERMINATED_EXIT),
        (StuckPreprocessingError, ExitCode.STUCK_PROMPT),
        (LinkBrokenError, ExitCode.LINK_BROKEN),
        (WorkerFaultError, ExitCode.WORKER_FAULT),
        (DivergedError, ExitCode.STEP_ERROR),
    )
    for kind, code in known:
        if isinstance(error, kind):
            return Death(code=code, message=_one_line(error), is_expected=True)
    if isinstance(error, MemoryError):
        message = _one_line(error) or "out of memory"
        return Death(code=ExitCode.OUT_OF_MEMORY, message=message, is_expected=True)
    message = f"{type(error).__name__}: {_one_line(error)}"
    return Death(code=ExitCode.STEP_ERROR, message=message[:MAX_CAUSE], is_expected=False)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_CAUSE]


class TerminationHandler:
    """Handles SIGTERM: interrupts a load at once; ends the step loop between two steps."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._has_come = False
        self.is_interrupting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python on the main thread."""
        self._has_come = True
        if self.is_interrupting:
            self.is_interrupting = False
            raise TerminatedError("ended by SIGTERM")
        self._link.wake()

    def interrupt_from_now_on(self) -> None:
        """Also raises for a signal that came before: a load that hangs would never check.

        Raises:
            TerminatedError: it has come.
        """
        self.is_interrupting = True
        if self._has_come:
            self.is_interrupting = False
            raise TerminatedError("ended by SIGTERM")

    def has_come(self) -> bool:
        """True if SIGTERM came."""
        return self._has_come


class Life:
    """Connects, loads, serves and ends; calls the engine on this thread only (A1).

    Attributes:
        board: what the owner thread publishes.
        link: to the supervisor.
        guard: watches the memory that the load and the prompts take.
        heartbeat: sends what is on the board.
        termination: what SIGTERM does.

    Args:
        spec: the supervisor's launch spec.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._clock = Clock()
        self.board = Board(self._clock.now)
        self.link = Link(spec.endpoint)
        self.guard = MemoryGuard()
        self.heartbeat = HeartbeatThread(
            spec.endpoint, self.board, on_end=self.link.wake, guard=self.guard
        )
        self.termination = TerminationHandler(self.link)
        self._started_at = time.monotonic()

    def run(self) -> int:
        """Run the whole life; return the exit code, with every message sent or given up."""
        signal.signal(signal.SIGTERM, self.termination)
        self.heartbeat.start()
        try:
            code = self._live()
        except ExitAskedError:
            code = ExitCode.ASKED
        except BaseException as error:  # noqa: BLE001  the last handler: the process ends (F3)
            self.termination.is_interrupting = False
            code = self._die(judge(error), error)
        self.heartbeat.stop()
        self.link.close(LINGER_S)
        logger.info(log_line("worker exits", model=self._spec.model, code=int(code)))
        return code

    def _live(self) -> int:
        spec = self._spec
        logger.info(log_line("worker started", model=spec.model, generation=spec.generation))
        self.link.send(
            Hello(
                model=spec.model,
                generation=spec.generation,
                token=spec.token,
                pid=os.getpid(),
                version=VERSION,
            )
        )
        self.termination.interrupt_from_now_on()
        self.report(LoadPhase.IMPORT, 0.0)
        engine = cast(Engine, OwnedEngine(self._make_engine(), spec.step_timeout_s))
        facts = engine.load(self.report)
        self.termination.is_interrupting = False
        return self._serve(engine, facts)

    def _make_engine(self) -> Engine:
        reach = Reach(
            send_frames=self.link.send_frames,
            drop_link=self.link.drop,
            end_beats=self.heartbeat.stop,
        )
        if self._spec.hosts:
            group = GroupEngine(self._spec, self._clock.now, reach)
            self.board.ranks = group.ranks
            return cast(Engine, group)
        return open_engine(self._spec, self._clock.now, reach=reach)

    def _serve(self, engine: Engine, facts: EngineFacts) -> int:
        spec, held = self._spec, engine.bytes_held()
        text = TextThreads(engine.text, self.link.wake, guard=self.guard)
        text.start()
        loop = StepLoop(
            engine=engine,
            facts=facts,
            link=self.link,
            text=text,
            board=self.board,
            max_concurrency=spec.max_concurrency,
            step_timeout_s=spec.step_timeout_s,
            sampling={**facts.sampling, **spec.sampling},
        )
        took_s = time.monotonic() - self._started_at
        logger.info(
            log_line(
                "model ready",
                model=spec.model,
                backend=facts.backend,
                seconds=took_s,
                parallel=facts.parallel or "no",
                prefix_cache=size_text(facts.prefix_cache_bytes),
                prefix_cache_tokens=facts.prefix_cache_tokens,
            )
        )
        self.board.publish(WorkerPhase.IDLE, held=held)
        self.link.send(
            Ready(
                context_length=facts.context_length,
                fingerprint=facts.fingerprint,
                backend=facts.backend,
                versions=facts.versions,
                active_bytes=held.active,
                own_bytes=own_bytes(facts.backend, held),
                cache_layers=list(facts.cache_layers),
                batching=facts.batching,
                batching_reason=facts.batching_reason,
                warnings=list(facts.warnings),
                task=facts.task,
                dimensions=facts.dimensions,
                takes_pictures=facts.takes_pictures,
                draft_tokens=facts.draft_tokens,
                parallel=facts.parallel,
                ranks=[one.rank for one in self.board.ranks()],
            )
        )
        loop.run(self._must_end)
        self.board.publish(WorkerPhase.CLOSING)
        text.close()
        engine.close()
        if loop.is_exit_asked:
            return ExitCode.ASKED
        raise TerminatedError("ended by SIGTERM")

    def _must_end(self) -> bool:
        """True if SIGTERM came.

        Raises:
            WorkerFaultError: the heartbeats have ended; a stuck step would be noticed late, because
                no beat would say how long it was predicted to take.
        """
        if self.heartbeat.is_over:
            raise WorkerFaultError("the thread that sends heartbeats has ended")
        return self.termination.has_come()

    def report(self, phase: LoadPhase, progress: float) -> None:
        """Sends load progress, and checks for an Exit at the same time (B9)."""
        self.guard.loads(phase)
        if self.link.flush():  # progress is only worth sending fresh
            self.link.send(LoadProgress(phase=phase, progress=progress))
        self._look_for_exit()

    def _look_for_exit(self) -> None:
        while (message := self.link.receive()) is not None:
            if isinstance(message, Exit):
                self.termination.is_interrupting = False
                raise ExitAskedError
            raise LinkBrokenError(f"{message.TYPE} came before READY")

    def _die(self, death: Death, error: BaseException) -> int:
        """Reports why, to the log and to the supervisor."""
        if isinstance(error, TerminatedError):
            try:
                self._look_for_exit()
            except ExitAskedError:
                return ExitCode.ASKED
            except LinkBrokenError:
                pass  # SIGTERM explains the exit well enough
        logger.error(log_line("worker dies", code=int(death.code), cause=death.message))
        if not death.is_expected:
            traceback.print_exception(error)
        if isinstance(error, StuckPreprocessingError):  # another thread is the one that hangs
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self.link.send(Dying(code=int(death.code), message=death.message))
        return death.code


def own_bytes(backend: str, held: EngineBytes) -> int | None:
    """Return what the process takes besides the arrays of its engine: interpreter, libraries,
    tokenizer and threads; None if this cannot be told apart.

    On a CPU, arrays are memory of the process like everything else. What a GPU's driver keeps for a
    process is not in the process's own account, and the fake engine only claims to hold memory.

    Args:
        backend: `cpu`, `cuda`, `metal` or `fake`.
        held: by the engine's arrays.
    """
    if backend != "cpu":
        return None
    return max(0, int(psutil.Process().memory_info().rss) - held.active - held.cache)
