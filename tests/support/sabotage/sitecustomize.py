"""Makes one worker fail as a bug in its loop or in mlx-lm would: a folder for PYTHONPATH.

`MLXSUP_SABOTAGE` names what happens (a key of `WAYS`) and a file, which the first process to strike
creates: the next life of the worker is sound.
"""

import ctypes
import fcntl
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

STRUCK_PASS = 6
"""Which pass of mlx-lm's batch after the load is struck; the warm-up's are over by then."""


def strike(path: str) -> bool:
    """Whether this process is the first that strikes."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def replace_method(owner: type, name: str, method: object) -> None:
    """Puts another method in the place of one."""
    setattr(owner, name, method)


def lose_running(path: str) -> None:
    """The row that has run for longest is lost with the fifth step."""
    from mlxsup.protocol.ids import RequestKey
    from mlxsup.protocol.states import FinishReason
    from mlxsup.protocol.worker_messages import Step, WorkerMessage
    from mlxsup.worker.engine import StepResult
    from mlxsup.worker.link import Link
    from mlxsup.worker.thread_guard import OwnedEngine

    compute, send, steps = OwnedEngine.step, Link.send, 0
    lost: list[RequestKey] = []

    def step(self: OwnedEngine) -> StepResult:
        nonlocal steps
        result, steps = compute(self), steps + 1
        if steps == 5 and strike(path):
            first, *others = result.tokens  # the loop lets go of the first, and nobody hears of it
            lost.append(first.key)
            self.remove(first.key)
            result = replace(result, tokens=[replace(first, finish=FinishReason.STOP), *others])
        return result

    def keep_quiet(self: Link, message: WorkerMessage) -> None:
        if isinstance(message, Step):
            message = replace(message, rows=[row for row in message.rows if row.key not in lost])
        send(self, message)

    replace_method(OwnedEngine, "step", step)
    replace_method(Link, "send", keep_quiet)


def lose_leaving(path: str) -> None:
    """The end of the first row that is cancelled is never told."""
    from mlxsup.protocol.states import FinishReason
    from mlxsup.protocol.worker_messages import Step, WorkerMessage
    from mlxsup.worker.link import Link

    send = Link.send

    def forget(self: Link, message: WorkerMessage) -> None:
        if isinstance(message, Step):
            rest = [row for row in message.rows if row.finish is not FinishReason.CANCELLED]
            if len(rest) < len(message.rows) and strike(path):
                message = replace(message, rows=rest)
        send(self, message)

    replace_method(Link, "send", forget)


def lose_messages(path: str) -> None:
    """From the fifth step on nothing that the worker sends arrives, and it does not know."""
    from mlxsup.protocol.worker_messages import Step, WorkerMessage
    from mlxsup.worker.link import Link

    send, is_cut = Link.send, False

    def vanish(self: Link, message: WorkerMessage) -> None:
        nonlocal is_cut
        if isinstance(message, Step) and message.step == 5 and strike(path):
            is_cut = True
        if is_cut:
            self.sent += 1
        else:
            send(self, message)

    replace_method(Link, "send", vanish)


def in_passes(act: Callable[[str, int], None]) -> Callable[[str], None]:
    """Has something done at the end of each pass of mlx-lm's own batch, on the owner thread.

    Args:
        act: called with the file and the number of the pass, counted from the end of the load.
    """

    def arrange(path: str) -> None:
        from mlxsup.worker.engine import EngineFacts, ReportProgress
        from mlxsup.worker.thread_guard import OwnedEngine

        def load_and_arrange(self: OwnedEngine, report: ReportProgress) -> EngineFacts:
            facts = self._engine.load(report)
            if generate := sys.modules.get("mlx_lm.generate"):
                replace_next(generate.GenerationBatch, path, act)
            return facts

        replace_method(OwnedEngine, "load", load_and_arrange)

    return arrange


def replace_next(batch: Any, path: str, act: Callable[[str, int], None]) -> None:
    """The batch's `next` computes its pass as ever; what is done then has real state around it."""
    compute, passes = batch.next, 0

    def compute_and_act(self: Any) -> Any:
        nonlocal passes
        passes += 1
        result = compute(self)
        act(path, passes)
        return result

    batch.next = compute_and_act


_failing: list[int] = []
"""Passes of this process that have raised."""


def fail(path: str, number: int) -> None:
    """From the struck pass on every one raises what MLX says of its arrays, and leaves a mark."""
    import mlx.core as mx

    is_struck = number == STRUCK_PASS and strike(path)
    if is_struck or _failing:
        _failing.append(number)
        with open(path, "a") as marks:
            marks.write("x")
        mx.matmul(mx.zeros((2, 3)), mx.zeros((2, 3)))


def sleep(path: str, number: int) -> None:
    """The struck pass never ends; other threads run."""
    if number == STRUCK_PASS and strike(path):
        while True:
            time.sleep(3600)


def hold(path: str, number: int) -> None:
    """The struck pass never ends, and native code holds the interpreter."""
    if number == STRUCK_PASS and strike(path):
        native_sleep = ctypes.PyDLL(None).sleep
        while True:
            native_sleep(3600)


def dawdle(path: str) -> None:
    """Every pass takes 0.2 s more, as on a slow machine, those of the load included."""
    from mlxsup.worker.engine import EngineFacts, ReportProgress
    from mlxsup.worker.thread_guard import OwnedEngine

    def arrange_and_load(self: OwnedEngine, report: ReportProgress) -> EngineFacts:
        from mlx_lm.generate import GenerationBatch

        replace_next(GenerationBatch, path, lambda path, number: time.sleep(0.2))
        return self._engine.load(report)

    replace_method(OwnedEngine, "load", arrange_and_load)


def resume_wrongly(path: str) -> None:
    """A row that continues after a crash draws with another seed."""
    from mlxsup.worker.engine import Row
    from mlxsup.worker.thread_guard import OwnedEngine

    def insert_wrongly(self: OwnedEngine, row: Row) -> int:
        return self._engine.insert(replace(row, seed=row.seed + 1) if row.delivered else row)

    replace_method(OwnedEngine, "insert", insert_wrongly)


def kill_in_tower(path: str) -> None:
    """SIGKILL while the tower looks at the first picture after the load."""
    from mlxsup.worker.engine import EngineFacts, ReportProgress
    from mlxsup.worker.thread_guard import OwnedEngine

    def load_and_arrange(self: OwnedEngine, report: ReportProgress) -> EngineFacts:
        facts = self._engine.load(report)
        if vision := sys.modules.get("mlxsup.worker.engines.mlx.vision"):
            made = vision.Features

            def die(**named: Any) -> Any:
                if strike(path):
                    os.kill(os.getpid(), signal.SIGKILL)
                return made(**named)

            vision.Features = die  # type: ignore[attr-defined]
        return facts

    replace_method(OwnedEngine, "load", load_and_arrange)


LONG_PROMPT = 200
LONG_READING_S = 4.0


def take_turns(path: str) -> None:
    """Workers compute as if they shared one executor: while a long prompt is read, no other one
    does anything."""
    from mlxsup.worker.engine import Row, StepResult
    from mlxsup.worker.thread_guard import OwnedEngine

    compute, decode = OwnedEngine.step, OwnedEngine.decode

    def insert_alone(self: OwnedEngine, row: Row) -> int:
        if len(row.tokens) > LONG_PROMPT:
            with open(path, "w") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)
                time.sleep(LONG_READING_S)
        return self._engine.insert(row)

    def step_alone(self: OwnedEngine) -> StepResult:
        with open(path, "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            return compute(self)

    def decode_alone(self: OwnedEngine) -> StepResult:
        with open(path, "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            return decode(self)

    replace_method(OwnedEngine, "insert", insert_alone)
    replace_method(OwnedEngine, "step", step_alone)
    replace_method(OwnedEngine, "decode", decode_alone)


WAYS = {
    "running": lose_running,
    "leaving": lose_leaving,
    "messages": lose_messages,
    "pass raises": in_passes(fail),
    "pass sleeps": in_passes(sleep),
    "pass holds": in_passes(hold),
    "passes dawdle": dawdle,
    "resumes wrongly": resume_wrongly,
    "takes turns": take_turns,
    "tower": kill_in_tower,
}

if (
    "MLXSUP_TEST_TRANSFORMERS_INDEX" in os.environ
):  # this file stands in front of the one that does it
    importlib.import_module("transformers_index").install()

if wanted := os.environ.get("MLXSUP_SABOTAGE"):
    what, _, file = wanted.partition(":")
    WAYS[what](file)
