"""A worker's life in this process: what its loop drives, and what it says last."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from mlxsup.protocol.codec import Decoder
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import ExitCode, LaunchSpec
from mlxsup.protocol.messages import WORKER_TO_SUPERVISOR, Message
from mlxsup.worker import life as life_module
from mlxsup.worker.life import Life
from mlxsup.worker.owned_engine import WrongThreadError


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

    def heard(self) -> list[Message]:
        """Everything that has come."""
        messages = []
        while self._socket.poll(0):
            messages.append(self._decoder.decode(self._socket.recv_multipart()))
        return messages

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
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


def in_a_thread(call: Callable[[], object]) -> BaseException | None:
    """What a call raises in another thread."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except WrongThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


def test_the_engine_that_is_served_refuses_every_other_thread_A1(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException | None] = []

    class ThreadedLoop:
        """A step loop with the fault that the check is there for."""

        is_exit_asked = True

        def __init__(self, *, engine: Any, **_: object) -> None:
            self._engine = engine

        def run(self, is_terminated: Callable[[], bool]) -> None:
            seen.append(in_a_thread(self._engine.step))
            assert not self._engine.has_rows()

    monkeypatch.setattr(life_module, "StepLoop", ThreadedLoop)
    assert Life(make_spec(supervisor)).run() == ExitCode.ASKED
    assert [type(error) for error in seen] == [WrongThreadError]
    types = [message.TYPE for message in supervisor.heard()]
    assert (types[0], types[-1]) == ("hello", "ready")
