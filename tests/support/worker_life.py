"""A worker's life in this process: the other end of its sockets, and a step loop that idles."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.message import Message
from mlxsup.protocol.worker_messages import (
    WORKER_TO_SUPERVISOR,
)
from mlxsup.worker import process as process_module


class Supervisor:
    """The other end of a worker's sockets."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/w.sock"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.bind(self.endpoint)
        self._beats = self._context.socket(zmq.PULL)
        self._beats.bind(self.endpoint + ".beat")
        self._decoder = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)

    def say(self, message: Message) -> None:
        """Is there before the worker looks for it, whenever that is."""
        self._socket.send_multipart(encode(message))

    def heard(self, last: str) -> list[Message]:
        """Everything that has come, once a message of this type has."""
        messages: list[Message] = []
        while self._socket.poll(0 if last in [one.TYPE for one in messages] else 60_000):
            messages.append(self._decoder.decode(self._socket.recv_multipart()))
        return messages

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def listening() -> Iterator[Supervisor]:
    """A supervisor's end in its own folder; SIGTERM does afterwards what it did before."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    before = signal.getsignal(signal.SIGTERM)
    supervisor = Supervisor(folder)
    yield supervisor
    supervisor.close()
    signal.signal(signal.SIGTERM, before)
    shutil.rmtree(folder)


def make_spec(supervisor: Supervisor, **changes: Any) -> LaunchSpec:
    values: dict[str, Any] = {
        "model": ModelName("m"),
        "generation": Generation(1),
        "token": "t",
        "endpoint": supervisor.endpoint,
        "supervisor_pid": 1,
        "engine": "fake",
        "path": "/nowhere",
        "max_concurrency": 2,
        "step_timeout_s": 30.0,
        "decode_stall_target_ms": 250,
    }
    return LaunchSpec(**(values | changes))


class IdleLoop:
    """A step loop that serves nothing, and what it was given."""

    is_exit_asked = True
    given: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        type(self).given = given

    def run(self, must_end: Callable[[], bool]) -> None:
        assert must_end() is False


def run_loop(monkeypatch: pytest.MonkeyPatch, run: Callable[..., None], *, asked: bool) -> None:
    """Has the life's loop do this."""
    made = type("Loop", (IdleLoop,), {"is_exit_asked": asked, "run": run})
    monkeypatch.setattr(process_module, "StepLoop", made)
