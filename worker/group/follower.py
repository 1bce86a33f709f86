"""`python -P -m mlxsup.worker.group.follower`: a rank that does what its leader does.

It decides nothing. It makes the calls that arrive, in their order, and exits when a result differs
from the leader's. What it prints goes to standard error: standard output carries its frames.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

import psutil

from mlxsup.protocol.clock import PULSE_S
from mlxsup.protocol.codec import DecodeError, read_part
from mlxsup.protocol.launch import ExitCode, LaunchSpec
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import LoadPhase
from mlxsup.protocol.version import VERSION

from ..bootstrap import ORPHANED_EXIT, die_with_parent, prepare_process
from ..engine import BadLaunchError, DivergedError, Rank
from ..engines.opening import free_address, identify, open_engine, prepare
from ..logs import configure
from ..process import judge
from .agent import SERVES
from .frames import (
    TO_FOLLOWER,
    Beat,
    Call,
    Failed,
    FrameReader,
    FrameWriter,
    Greeting,
    Loaded,
    Plan,
    Progress,
    Stop,
    Who,
)
from .replay import Replay

STDIN, STDOUT, STDERR = 0, 1, 2


class Follower:
    """The life of a follower, on its main thread.

    Args:
        writer: to the leader.
    """

    def __init__(self, writer: FrameWriter) -> None:
        self._writer = writer
        self._reader = FrameReader(STDIN, TO_FOLLOWER)
        self._begun = self._ended = 0
        self._agent = os.getppid()

    def run(self) -> int:
        """Live until the leader ends; return the exit code."""
        threading.Thread(target=_watch_leader, name="leader-watch", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            code = self._live_or_fail()
        except (EOFError, BrokenPipeError):
            self._leave_alone()
        self._signal_agent(signal.SIGCONT)  # it may be stopped, and must notice this exit
        return code

    def _live_or_fail(self) -> int:
        try:
            self._live()
        except (EOFError, BrokenPipeError):
            raise
        except BaseException as error:  # noqa: BLE001  the last handler: the process ends
            death = judge(error)
            if not death.is_expected:
                traceback.print_exception(error)
            self._writer.write(Failed(code=death.code, text=death.message))
            return death.code
        return ExitCode.ASKED

    def _live(self) -> None:
        try:
            who = self._wait()
            assert isinstance(who, Who)
            spec = read_part(LaunchSpec, who.launch, is_strict=False)
        except DecodeError as error:
            raise BadLaunchError(
                f"mlxsup {VERSION} does not understand rank 0 ({error}); install the same on every"
                " host"
            ) from error
        configure(spec.log_level, sys.stderr)
        files = identify(spec)
        self._writer.write(
            Greeting(
                address=free_address(who.address),
                versions=files.versions,
                fingerprint=files.fingerprint,
            )
        )
        prepare(spec, gpu=who.gpu)
        self._report(LoadPhase.IMPORT, 1.0)
        plan = self._wait()
        assert isinstance(plan, Plan)
        rank = Rank(number=plan.rank, addresses=tuple(plan.addresses), backend=plan.backend)
        engine = open_engine(spec, time.perf_counter, rank=rank)
        facts = engine.load(self._report)
        self._writer.write(Loaded(active_bytes=engine.bytes_held().active))
        replay = Replay(engine, facts)
        while isinstance(message := self._wait(), Call):
            self._make(replay, message)
        assert isinstance(message, Stop)
        engine.close()

    def _make(self, replay: Replay, call: Call) -> None:
        if call.number != replay.number + 1:
            raise DivergedError(f"call {replay.number + 1} must follow, not {call.number}")
        if call.digest != replay.digest:
            raise DivergedError(
                f"call {replay.number} had another result than in rank 0"
                if replay.number
                else "its load found out something else than that of rank 0"
            )
        if call.number == 1:
            self._signal_agent(SERVES)
        self._begun = call.number
        replay.make(call.name, call.arguments(), call.named, is_constrained=call.is_constrained)
        self._ended = call.number

    def _wait(self) -> Message:
        while True:
            message = self._reader.read()
            if message is not None:
                return message

    def _report(self, phase: LoadPhase, progress: float) -> None:
        self._writer.write(Progress(phase=phase, progress=progress))

    def _beat(self) -> None:
        while True:
            try:
                available = psutil.virtual_memory().available
                self._writer.write(
                    Beat(
                        heard=self._reader.heard(),
                        begun=self._begun,
                        ended=self._ended,
                        available_bytes=available,
                    )
                )
            except BrokenPipeError:
                self._leave_alone()
            time.sleep(PULSE_S)

    def _leave_alone(self) -> NoReturn:
        """Exit because the leader is gone; end the agent, too, which may be stopped and not
        notice."""
        self._signal_agent(signal.SIGKILL)
        leave(ORPHANED_EXIT)

    def _signal_agent(self, number: int) -> None:
        if os.getppid() == self._agent:
            os.kill(self._agent, number)


def _watch_leader() -> None:
    """End the process at once when the agent is gone, in whatever call the main thread is."""
    poll = select.poll()
    poll.register(STDIN, 0)  # a hang-up is reported unasked, and what is unread stays unread
    poll.poll()
    leave(ORPHANED_EXIT)


def leave(code: int) -> NoReturn:
    """Exit without the interpreter's teardown, which Metal may abort."""
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    """Run a follower; return its exit code."""
    prepare_process()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    writer = FrameWriter(os.dup(STDOUT))
    os.dup2(STDERR, STDOUT)
    return Follower(writer).run()


if __name__ == "__main__":
    leave(main())
