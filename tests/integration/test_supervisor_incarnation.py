"""One incarnation of a worker: what is reported of it, and in which order."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.worker_messages import Hello
from mlxsup.supervisor.core.actions import Spawn
from mlxsup.supervisor.core.events import Event, Exited, Spawned, SpawnFailed, WorkerSaid
from mlxsup.supervisor.sockets.worker_link import WorkerLink
from mlxsup.supervisor.workers import incarnation
from mlxsup.supervisor.workers.incarnation import WorkerUnit
from mlxsup.supervisor.workers.process import WorkerProcess

from support.eventually_async import eventually_async
from support.loop_sockets import Watched, watched_sockets


class Surroundings:
    """What a worker's life needs, as far as these tests need it.

    Attributes:
        events: what was posted, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.folder = SimpleNamespace(
            worker_socket=lambda number: self.socket_in(folder, number),
            learned_dir=lambda model: folder / model,
        )
        self.record = SimpleNamespace(add=lambda *_: None, remove=lambda *_: None)
        self.log = SimpleNamespace(write=lambda *_, **__: None)
        self.argv: tuple[str, ...] = (sys.executable, "-c", "import sys; sys.stdin.read()")
        self.log_level = "info"
        self.post = self.events.append
        self.now = lambda: 5.0

    @staticmethod
    def socket_in(folder: Path, number: int) -> Path:
        return folder / f"w{number}.sock"


def ignore(*_: object) -> None:
    """What a worker measured matters to others."""


def test_a_worker_that_is_faster_than_its_spawn_is_announced_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine a worker may be READY before the loop gets a look at anything (P8)."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    around = Surroundings(folder)
    worker_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = worker_context.socket(zmq.DEALER)
    links: list[WorkerLink] = []
    sockets: dict[int, Watched] = {}
    spawn = WorkerProcess.spawn

    def make_link(*arguments: Any, **more: Any) -> WorkerLink:
        with watched_sockets() as made:
            links.append(WorkerLink(*arguments, **more))
        sockets.update(made)
        return links[0]

    def spawn_slowly(argv: Any, line: bytes, on_output: Any) -> WorkerProcess:
        process = spawn(argv, line, on_output)
        launch = json.loads(line)
        hello = Hello(model=ModelName("m"), generation=Generation(1), token=launch["token"],
                      pid=process.pid, version="0")  # fmt: skip
        worker.connect(launch["endpoint"])
        worker.send_multipart(encode(hello))
        assert sockets[zmq.ROUTER].socket.poll(30_000), "the worker's greeting never came"
        return process

    monkeypatch.setattr(incarnation, "WorkerLink", make_link)
    monkeypatch.setattr(WorkerProcess, "spawn", spawn_slowly)

    async def live() -> None:
        settings = LaunchSettings(path="/x", engine="fake")
        spawned = Spawn(model=ModelName("m"), generation=Generation(1), launch=settings)
        log = SimpleNamespace(write=lambda _: None, begin=lambda *_: None, last_lines=[],
                              ended=lambda _: asyncio.sleep(0))  # fmt: skip
        unit = WorkerUnit(around, spawned, 1, log, ignore)  # type: ignore[arg-type]  # stand-ins
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


Calls = list[tuple[Any, ...]]


def live_of(
    argv: tuple[str, ...], *, faults: frozenset[str] = frozenset(), is_killed: bool = False
) -> tuple[Calls, list[int]]:
    """All that is reported of one life, in order, and the pids that its unit said it had."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    around = Surroundings(folder)
    calls: Calls = []
    pids: list[int] = []

    def note(name: str) -> Any:
        def noted(*arguments: Any, **facts: Any) -> None:
            calls.append((name, *arguments, *([facts] if facts else [])))
            if name in faults:
                raise OSError(28, "No space left on device")

        return noted

    async def ended(limit_s: float) -> None:
        calls.append(("ended", limit_s))

    async def live() -> None:
        settings = LaunchSettings(path="/x", engine="fake")
        spawn = Spawn(model=ModelName("m"), generation=Generation(4), launch=settings)
        log = SimpleNamespace(
            write=note("output"), begin=note("begin"), last_lines=("l",), ended=ended
        )
        unit = WorkerUnit(around, spawn, 1, log, ignore)  # type: ignore[arg-type]  # stand-ins
        assert (unit.model, unit.generation, unit.pid) == ("m", 4, None)
        assert unit.loaded_files is None, "it has read nothing yet"
        if is_killed:
            unit.kill()
        await unit.live()
        await asyncio.sleep(0)  # what was asked of the loop last
        assert unit.pid is None

    around.record = SimpleNamespace(add=note("add"), remove=note("remove"))
    around.log = SimpleNamespace(write=note("log"))
    around.post = lambda event: calls.append(("post", event))
    around.argv = argv
    try:
        asyncio.run(asyncio.wait_for(live(), 60.0))
        assert list(folder.iterdir()) == [], "its sockets are gone"
    finally:
        around.context.destroy(linger=0)
        shutil.rmtree(folder)
    pids.extend(call[2] for call in calls if call[0] == "begin")
    return calls, pids


def test_a_life_is_told_in_order_from_its_spawn_to_its_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 77.0)
    calls, (pid,) = live_of(("/bin/sh", "-c", "echo words; exit 3"))
    facts = {"model": "m", "generation": 4, "pid": pid}
    exited = Exited(
        now=5.0, model=ModelName("m"), generation=Generation(4), exit_code=3, signal=None,
        signal_name="", last_lines=("l",), at=77.0,
    )  # fmt: skip
    assert calls == [
        ("begin", 4, pid),
        ("add", "m", pid),
        ("log", "info", "worker spawned", facts),
        ("post", Spawned(now=5.0, model=ModelName("m"), generation=Generation(4), pid=pid)),
        ("output", b"words\n"),
        ("remove", pid),
        ("ended", 1.0),
        ("log", "info", "worker exited", {**facts, "code": 3}),
        ("post", exited),
    ]


def test_a_life_that_is_ended_before_it_began_ends_at_once_by_its_signal() -> None:
    calls, (pid,) = live_of(("/bin/sh", "-c", "read -r line; read -r never"), is_killed=True)
    assert calls[-2][:3] == ("log", "info", "worker exited")
    assert calls[-2][3] == {"model": "m", "generation": 4, "pid": pid, "signal": "SIGKILL"}
    exited = calls[-1][1]
    assert (exited.exit_code, exited.signal, exited.signal_name) == (None, 9, "SIGKILL")


def test_what_has_arrived_by_the_limit_is_read_before_the_exit_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is held open, by a grandchild, say, so that only the limit ends the wait."""
    told: list[str] = []

    class HeldOpen(WorkerLink):
        has_peer = True

        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.has_peer = True

        def drain(self) -> None:
            told.append("read")
            super().drain()

        def close(self) -> None:
            told.append("closed")
            super().close()

    monkeypatch.setattr(incarnation, "WorkerLink", HeldOpen)
    monkeypatch.setattr(incarnation, "LAST_WORDS_S", 0.01)
    calls, _ = live_of(("/bin/sh", "-c", "exit 3"))
    assert told[:2] == ["read", "closed"]
    assert calls[-1][1].exit_code == 3


def test_a_record_that_cannot_be_written_stops_no_life() -> None:
    calls, _ = live_of(("/bin/sh", "-c", "exit 0"), faults=frozenset({"add", "remove"}))
    warning = ("log", "warning", "workers not recorded", {"error": "No space left on device"})
    assert [call[0] for call in calls if call == warning] == ["log", "log"]
    assert calls[-1][1].exit_code == 0


def test_a_command_that_is_not_there_is_told_and_leaves_nothing() -> None:
    calls, pids = live_of(("/nonexistent/worker",))
    failed = SpawnFailed(
        now=5.0, model=ModelName("m"), generation=Generation(4), detail="No such file or directory"
    )
    assert (calls, pids) == ([("post", failed)], [])


def test_sockets_that_cannot_be_made_are_told_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Surroundings, "socket_in", staticmethod(lambda folder, number: folder / "no" / "w.sock")
    )
    [(said, failed)], pids = live_of(("/bin/sh", "-c", "exit 0"))
    assert (said, type(failed), pids) == ("post", SpawnFailed, [])
    assert failed.detail.startswith("No such file or directory")


def test_an_exit_is_told_though_its_socket_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = WorkerLink.close

    def fail(self: WorkerLink) -> None:
        close(self)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(WorkerLink, "close", fail)
    calls, _ = live_of(("/bin/sh", "-c", "exit 0"))
    warning = ("log", "warning", "socket not removed", {"error": "Permission denied"})
    assert calls.count(warning) == 2, "at its exit, and when all of it is closed"
    assert [type(call[1]) for call in calls if call[0] == "post"] == [Spawned, Exited]
