"""Makes one worker fail as a bug in its loop or in mlx-lm would: a folder for PYTHONPATH.

`MLXSUP_SABOTAGE` names what happens (a key of `WAYS`) and a file, which the first process to strike
creates: the next life of the worker is sound.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable
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


def lose_running(path: str) -> None:
    """The row that has run for longest is lost with the fifth step."""
    from mlxsup.worker.engine import StepResult
    from mlxsup.worker.loop import StepLoop

    send_step = StepLoop._send_step

    def send(self: StepLoop, result: StepResult) -> None:
        if self._steps == 5 and strike(path):
            lost = next(iter(self._running))
            self._engine.remove(lost)
            del self._running[lost]
            result = StepResult(tokens=[t for t in result.tokens if t.key != lost])
        send_step(self, result)

    StepLoop._send_step = send  # type: ignore[method-assign]


def lose_leaving(path: str) -> None:
    """The end of the first row that is cancelled is never told."""
    from mlxsup.protocol.ids import RequestKey
    from mlxsup.worker.loop import StepLoop

    cancel = StepLoop._cancel

    def forget(self: StepLoop, key: RequestKey) -> None:
        cancel(self, key)
        if strike(path):
            self._ended.clear()

    StepLoop._cancel = forget  # type: ignore[method-assign]


def lose_messages(path: str) -> None:
    """After the fifth step nothing that the worker sends arrives, and it does not know."""
    from mlxsup.worker.engine import StepResult
    from mlxsup.worker.link import Link
    from mlxsup.worker.loop import StepLoop

    send_step = StepLoop._send_step

    def send(self: StepLoop, result: StepResult) -> None:
        if self._steps == 5 and strike(path):
            Link.flush = lambda self: self._outbox.clear() is None  # type: ignore[method-assign]
        send_step(self, result)

    StepLoop._send_step = send  # type: ignore[method-assign]


def in_passes(act: Callable[[str, int], None]) -> Callable[[str], None]:
    """Has something done at the end of each pass of mlx-lm's own batch, on the owner thread.

    Args:
        act: called with the file and the number of the pass, counted from the end of the load.
    """

    def arrange(path: str) -> None:
        from mlxsup.worker.thread_guard import OwnedEngine

        load = OwnedEngine.load

        def load_and_arrange(self: OwnedEngine, report: Any) -> Any:
            facts = load(self, report)
            if generate := sys.modules.get("mlx_lm.generate"):
                replace_next(generate.BatchGenerator, path, act)
            return facts

        OwnedEngine.load = load_and_arrange  # type: ignore[method-assign]

    return arrange


def replace_next(generator: Any, path: str, act: Callable[[str, int], None]) -> None:
    """The batch's `next` computes its pass as ever; what is done then has real state around it."""
    compute, passes = generator.next, 0

    def compute_and_act(self: Any) -> Any:
        nonlocal passes
        passes += 1
        result = compute(self)
        act(path, passes)
        return result

    generator.next = compute_and_act


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


def dawdle(path: str, number: int) -> None:
    """Every pass takes 0.2 s more, as on a slow machine."""
    time.sleep(0.2)


WAYS = {
    "running": lose_running,
    "leaving": lose_leaving,
    "messages": lose_messages,
    "pass raises": in_passes(fail),
    "pass sleeps": in_passes(sleep),
    "pass holds": in_passes(hold),
    "passes dawdle": in_passes(dawdle),
}

if "TEST_TRANSFORMERS_INDEX" in os.environ:  # this file stands in front of the one that does it
    import transformers_index

    transformers_index.install()

if wanted := os.environ.get("MLXSUP_SABOTAGE"):
    what, _, file = wanted.partition(":")
    WAYS[what](file)
