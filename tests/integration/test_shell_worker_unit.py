"""One incarnation of a worker: what is told of it, and in which order."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.messages import Hello
from mlxsup.supervisor import worker_unit
from mlxsup.supervisor.core.actions import Spawn
from mlxsup.supervisor.core.events import Event, Spawned, WorkerSaid
from mlxsup.supervisor.core.settings import LaunchSettings
from mlxsup.supervisor.process import WorkerProcess
from mlxsup.supervisor.worker_link import WorkerLink
from mlxsup.supervisor.worker_unit import WorkerUnit
from support.eventually_async import eventually_async


class Surroundings:
    """What a worker's life needs, as far as these tests need it.

    Attributes:
        events: what was posted, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.folder = SimpleNamespace(worker_socket=lambda number: folder / f"w{number}.sock")
        self.record = SimpleNamespace(add=lambda *_: None, remove=lambda *_: None)
        self.log = SimpleNamespace(write=lambda *_, **__: None)
        self.argv = (sys.executable, "-c", "import sys; sys.stdin.read()")
        self.log_level = "info"
        self.post = self.events.append
        self.now = lambda: 5.0


def test_a_worker_that_is_faster_than_its_spawn_is_announced_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine a worker may be READY before the loop gets a look at anything (P8)."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    around = Surroundings(folder)
    worker_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = worker_context.socket(zmq.DEALER)
    links: list[WorkerLink] = []
    spawn = WorkerProcess.spawn

    def make_link(*arguments: Any, **more: Any) -> WorkerLink:
        links.append(WorkerLink(*arguments, **more))
        return links[0]

    def spawn_slowly(argv: Any, line: bytes, on_output: Any) -> WorkerProcess:
        process = spawn(argv, line, on_output)
        launch = json.loads(line)
        hello = Hello(model=ModelName("m"), generation=Generation(1), token=launch["token"],
                      pid=process.pid, version="0")  # fmt: skip
        worker.connect(launch["endpoint"])
        worker.send_multipart(encode(hello))
        assert links[0]._socket.socket.poll(30_000), "the worker's greeting never came"
        return process

    monkeypatch.setattr(worker_unit, "WorkerLink", make_link)
    monkeypatch.setattr(worker_unit.WorkerProcess, "spawn", spawn_slowly)

    async def live() -> None:
        settings = LaunchSettings(path="/x", engine="fake")
        spawned = Spawn(model=ModelName("m"), generation=Generation(1), launch=settings)
        log = SimpleNamespace(write=lambda _: None, begin=lambda *_: None, last_lines=[],
                              ended=lambda _: asyncio.sleep(0))  # fmt: skip
        unit = WorkerUnit(around, spawned, 1, log)  # type: ignore[arg-type]
        life = asyncio.create_task(unit.live())
        await eventually_async(lambda: len(around.events) >= 2, timeout_s=30.0)
        unit.kill()
        await life

    try:
        asyncio.run(live())
    finally:
        worker_context.destroy(linger=0)
        around.context.destroy(linger=0)
        shutil.rmtree(folder)
    assert [type(event) for event in around.events[:2]] == [Spawned, WorkerSaid]
