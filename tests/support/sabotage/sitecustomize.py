"""Makes one worker lose a request, as a bug in its loop would: a folder for PYTHONPATH.

`MLXSUP_SABOTAGE` names what happens (`running`, `leaving`, `messages`) and a file, which the first
process to strike creates: the next life of the worker is sound.
"""

import os


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


if wanted := os.environ.get("MLXSUP_SABOTAGE"):
    what, _, file = wanted.partition(":")
    {"running": lose_running, "leaving": lose_leaving, "messages": lose_messages}[what](file)
