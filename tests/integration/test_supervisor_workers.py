"""The lives of workers and spares in the shell: what is reported of them, and in which order."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq

from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Batching
from mlxsup.protocol.worker_messages import Hello, Ready
from mlxsup.supervisor.core.actions import Spawn, WorkerSignal
from mlxsup.supervisor.core.events import (
    Event,
    Exited,
    FilesSeen,
    SpareEnded,
    SpareReady,
    Spawned,
    SpawnFailed,
    WorkerSaid,
    WorkerSeen,
)
from mlxsup.supervisor.file_threads import FileLooks
from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.sockets.worker_link import WorkerLink
from mlxsup.supervisor.workers import incarnation
from mlxsup.supervisor.workers import registry as registry_module
from mlxsup.supervisor.workers import spare as spare_module
from mlxsup.supervisor.workers.incarnation import WorkerUnit
from mlxsup.supervisor.workers.process import WorkerProcess
from mlxsup.supervisor.workers.registry import Workers
from mlxsup.supervisor.workers.spare import SpareUnit, SpareUnits

from support.daemon.hub_caches import write_folder
from support.daemon.played_daemon import Stage, play, short_folder
from support.eventually_async import eventually_async
from support.unwaited import collect_unwaited
from support.worker.loop_sockets import Watched, watched_sockets


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

    async def one_life() -> None:
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
        asyncio.run(one_life())
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

    async def one_life() -> None:
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
        asyncio.run(asyncio.wait_for(one_life(), 60.0))
        assert list(folder.iterdir()) == [], "its sockets are gone"
    finally:
        around.context.destroy(linger=0)
        shutil.rmtree(folder)
    pids.extend(call[2] for call in calls if call[0] == "begin")
    return calls, pids


def test_a_life_is_reported_in_order_from_spawn_to_exit(
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


def test_a_record_that_cannot_be_written_stops_no_life() -> None:
    calls, _ = live_of(("/bin/sh", "-c", "exit 0"), faults=frozenset({"add", "remove"}))
    warning = ("log", "warning", "workers not recorded", {"error": "No space left on device"})
    assert [call[0] for call in calls if call == warning] == ["log", "log"]
    assert calls[-1][1].exit_code == 0


def test_a_missing_command_is_reported_and_leaves_nothing() -> None:
    calls, pids = live_of(("/nonexistent/worker",))
    failed = SpawnFailed(
        now=5.0, model=ModelName("m"), generation=Generation(4), detail="No such file or directory"
    )
    assert (calls, pids) == ([("post", failed)], [])


def test_sockets_that_cannot_be_made_are_reported_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Surroundings, "socket_in", staticmethod(lambda folder, number: folder / "no" / "w.sock")
    )
    [(said, failed)], pids = live_of(("/bin/sh", "-c", "exit 0"))
    assert (said, type(failed), pids) == ("post", SpawnFailed, [])
    assert failed.detail.startswith("No such file or directory")


def test_an_exit_is_reported_though_its_socket_cannot_be_removed(
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


A, B = ModelName("a"), ModelName("b")
FIRST, SECOND = Generation(1), Generation(2)
WAITS = ("/bin/sh", "-c", "read -r line; exec cat > /dev/null")

Scene = Callable[["All"], Awaitable[None]]


class All:
    """The workers of a daemon, with real processes.

    Attributes:
        workers: what is tested.
        events: what was posted, in order.
    """

    def __init__(self, folder: Path, writer: LogWriter, tasks: asyncio.TaskGroup) -> None:
        self.events: list[Event] = []
        self.folder = folder
        self.tasks = tasks
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        around: Any = SimpleNamespace(
            context=self.context,
            folder=SimpleNamespace(
                path=folder,
                worker_socket=lambda number: folder / f"w{number}.sock",
                learned_dir=lambda model: folder / "learned",
            ),
            record=SimpleNamespace(add=lambda *_: None, remove=lambda *_: None),
            log=SimpleNamespace(write=lambda *_, **__: None),
            log_level="info",
            argv=WAITS,
            post=self.events.append,
            now=lambda: 5.0,
        )
        self.workers = Workers(around, folder, writer, lambda launch, loaded: None)

    async def spawn(self, model: ModelName, launch: LaunchSettings) -> int:
        """Begins the first life of a model; returns the pid."""
        spawn = Spawn(model=model, generation=FIRST, launch=launch)
        self.workers.spawn(spawn, self.tasks)

        def pid() -> int | None:
            unit = self.workers.get(model, FIRST)
            return unit.pid if unit is not None and self.of(Spawned, model) else None

        return await eventually_async(pid)

    def look_at_files(self, model: ModelName, generation: Generation = FIRST) -> None:
        self.workers.look_at_files(model, generation, self.tasks)

    def of(self, kind: type[Any], model: ModelName = A) -> list[Any]:
        """The events of one kind about a model."""
        return [one for one in self.events if isinstance(one, kind) and one.model == model]


def live(scene: Scene) -> None:
    """Plays a scene, and ends all workers."""

    async def play_scene(folder: Path) -> None:
        writer = LogWriter(pytest.fail)
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            everyone = All(folder, writer, tasks)
            try:
                await scene(everyone)
            finally:
                await everyone.workers.end()
        everyone.workers.close()
        assert writer.close(60.0)
        everyone.context.destroy(linger=0)

    with short_folder() as folder:
        asyncio.run(play_scene(folder))


FAKE = LaunchSettings(path="", engine="fake")


def test_workers_are_known_by_model_and_generation_until_they_are_gone() -> None:
    async def scene(everyone: All) -> None:
        workers = everyone.workers
        assert (workers.models, workers.pids) == (set(), [])
        pids = [await everyone.spawn(model, FAKE) for model in (A, B)]
        assert (workers.models, workers.pids) == ({A, B}, pids)
        assert (everyone.folder / "w1.sock").exists()
        assert (everyone.folder / "w2.sock").exists(), "each spawn has its own"
        assert workers.get(A, SECOND) is None
        workers.signal(B, SECOND, WorkerSignal.TERM)
        workers.signal(A, FIRST, WorkerSignal.TERM)
        await eventually_async(lambda: workers.models == {B})
        assert workers.pids == pids[1:]
        assert workers.get(A, FIRST) is None
        [exited] = await eventually_async(lambda: everyone.of(Exited))
        assert exited.signal == signal.SIGTERM
        await workers.end()
        assert (workers.models, workers.pids, workers.leave()) == (set(), [], 0)
        assert not any(map(psutil.pid_exists, pids))

    live(scene)


def test_a_process_is_seen_as_it_is_after_a_delay() -> None:
    async def scene(everyone: All) -> None:
        process = psutil.Process(await everyone.spawn(A, FAKE))
        for is_stopped in (False, True):
            if is_stopped:
                process.suspend()
                await eventually_async(lambda: process.status() == psutil.STATUS_STOPPED)
            everyone.events.clear()
            everyone.workers.look_at(A, FIRST, 0.02)
            await asyncio.sleep(0)
            assert everyone.events == [], "what has arrived is read first"
            await eventually_async(lambda: everyone.events)
            seen = WorkerSeen(now=5.0, model=A, generation=FIRST, is_stopped=is_stopped)
            assert everyone.events == [seen]

    live(scene)


def test_nothing_is_seen_of_a_life_that_is_over() -> None:
    async def scene(everyone: All) -> None:
        await everyone.spawn(A, FAKE)
        everyone.events.clear()
        everyone.workers.look_at(A, SECOND, 0.0)
        everyone.look_at_files(A, SECOND)
        everyone.look_at_files(B)
        everyone.look_at_files(A)  # so that something is heard
        await eventually_async(lambda: everyone.events)
        assert everyone.events == [FilesSeen(now=5.0, model=A, generation=FIRST, change="")]
        assert everyone.workers.is_stopped(A, SECOND) is None

    live(scene)


def test_files_are_compared_with_those_that_were_there_before_the_load() -> None:
    async def scene(everyone: All) -> None:
        folder = write_folder(everyone.folder / "model")
        await everyone.spawn(A, LaunchSettings(path=str(folder), engine="mlx"))
        for change in ("", "config.json has changed since it was loaded"):
            if change:
                (folder / "config.json").write_text("{}")
            everyone.look_at_files(A)
            await eventually_async(lambda: everyone.of(FilesSeen))
            [seen] = everyone.of(FilesSeen)
            assert (seen.now, seen.generation, seen.change) == (5.0, FIRST, change)
            everyone.events.clear()

    live(scene)


def test_a_folder_that_does_not_answer_gets_no_process_and_leaves_no_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, killed = threading.Event(), list[int]()
    monkeypatch.setattr("mlxsup.supervisor.file_threads.stamp", lambda _: answers.wait())

    async def scene(everyone: All) -> None:
        monkeypatch.setattr(everyone.workers.spares, "kill", killed.append)
        monkeypatch.setattr(everyone.workers, "_files", FileLooks(limit_s=0.05))
        launch = LaunchSettings(path=str(everyone.folder))
        spawn = Spawn(model=A, generation=FIRST, launch=launch, spare=7)
        everyone.workers.spawn(spawn, everyone.tasks)
        await eventually_async(lambda: everyone.of(SpawnFailed))
        [failed] = everyone.of(SpawnFailed)
        assert failed.detail == "its folder does not answer: look after its disk"
        assert (killed, everyone.workers.models) == ([7], set())
        answers.set()

    live(scene)


def test_a_model_that_was_forgotten_begins_its_log_anew_when_it_comes_back() -> None:
    async def scene(everyone: All) -> None:
        log = everyone.folder / "a.log"
        everyone.workers.forget(A)  # it never had a process
        pids = []
        for _ in range(2):
            pids.append(await everyone.spawn(A, FAKE))
            await everyone.workers.end()
            everyone.workers.forget(A)
            everyone.events.clear()
        await eventually_async(lambda: f" pid {pids[-1]} " in log.read_text())
        began = [line for line in log.read_text().splitlines() if line.startswith("---")]
        assert len(began) == 2

    live(scene)


# ---------------------------------------------------------------- what they measured


def served(folder: Path) -> str:
    """The log of a daemon whose one worker says how large its model is."""

    async def body(stage: Stage) -> None:
        worker = await stage.worker()
        await worker.say(worker.hello())
        await worker.say(
            Ready(
                context_length=9, fingerprint="f", backend="mlx", batching=Batching.ONE_ROW,
                active_bytes=12345,
            )
        )  # fmt: skip
        await stage.until("a", "READY")

    model = write_folder(folder / "model")
    assert play(body, {"a": {"path": str(model)}}, folder=folder) == 0
    return (folder / "logs" / "mlxsup.log").read_text()


def test_a_measurement_is_kept_for_the_next_daemon() -> None:
    with short_folder() as folder:
        assert "measurements" not in served(folder)
        kept = json.loads((folder / "run" / "measured.json").read_bytes())
    [one] = kept["models"]
    assert (one["path"], one["weight_bytes"]) == (f"{folder}/model", 12345)


def test_a_measurement_that_cannot_be_written_stops_no_serving() -> None:
    with short_folder() as folder:
        (folder / "run" / "measured.json").mkdir(parents=True)
        (folder / "run").chmod(0o700)
        log = served(folder)
    assert log.count("WARNING measurements not used cause=") == 1
    assert log.count('WARNING measurements not written error="Is a directory"\n') == 1


# ---------------------------------------------------------------- the terminal


def test_a_terminal_that_is_gone_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    registry_module.report("mlxsup: told")
    assert capsys.readouterr() == ("", "mlxsup: told\n")
    monkeypatch.setattr(registry_module, "print", gone, raising=False)
    registry_module.report("mlxsup: not told")


READY = "import os, sys; print('imported', flush=True); os.write(int(sys.argv[-1]), b'!')"
ECHO = f"{READY}; print('got', sys.stdin.readline().strip(), flush=True); sys.stdin.read()"
DIES = "import sys; sys.exit('no MLX here')"


class Around:
    """What a spare's life needs from the supervisor, and what it reported.

    Attributes:
        events: what was posted, in order.
        recorded: pids in the list of live workers.
        lines: the daemon's log.
    """

    def __init__(self, script: str) -> None:
        self.events: list[Event] = []
        self.recorded: dict[int, str] = {}
        self.lines: list[str] = []
        self.argv: tuple[str, ...] = (sys.executable, "-c", script)
        self.post = self.events.append
        self.now = lambda: 5.0
        self.log = SimpleNamespace(write=self._log, block=self.lines.append)
        self.record = SimpleNamespace(
            add=lambda model, pid: self.recorded.update({pid: model}), remove=self.recorded.pop
        )

    def _log(self, level: str, message: str, **facts: Any) -> None:
        cause = facts.get("signal") or facts.get("code", "")
        self.lines.append(f"{level} {message} {cause}".strip())


def unit_of(around: Around) -> SpareUnit:
    return SpareUnit(around, 7)  # type: ignore[arg-type]  # a stand-in


def units_of(around: Around) -> SpareUnits:
    return SpareUnits(around)  # type: ignore[arg-type]  # a stand-in


async def until_ready(around: Around) -> int:
    """The pid of a spare that has just become ready."""
    await eventually_async(lambda: bool(around.events), timeout_s=60.0)
    [event] = around.events
    assert isinstance(event, SpareReady)
    assert (event.number, event.now) == (7, 5.0)
    return event.pid


def test_one_that_is_ready_gets_its_line_and_its_new_reader_everything_it_printed() -> None:
    async def scene_of_spares() -> None:
        around, output = Around(ECHO), list[bytes]()
        unit = unit_of(around)
        life = asyncio.create_task(unit.live())
        pid = await until_ready(around)
        assert (unit.pid, around.recorded) == (pid, {pid: "(spare worker)"})
        process = unit.take(b"spec\n", output.append)
        assert process is not None
        assert (process.pid, unit.pid) == (pid, None)
        await eventually_async(lambda: b"got spec" in b"".join(output), timeout_s=60.0)
        assert b"".join(output) == b"imported\ngot spec\n", "each once, in order"
        await life
        unit.kill()  # it is somebody's now
        assert not process.exited.done()
        process.close()
        await process.exited
        process.close_pipes()
        assert around.recorded == {pid: "(spare worker)"}, "whoever took it records what it is now"
        assert [type(event) for event in around.events] == [SpareReady]

    asyncio.run(scene_of_spares())


def test_take_returns_none_for_a_spare_that_has_just_died() -> None:
    async def scene_of_spares() -> None:
        around = Around(ECHO)
        unit = unit_of(around)
        life = asyncio.create_task(unit.live())
        pid = await until_ready(around)
        os.kill(pid, signal.SIGKILL)
        # The loop has not seen it yet, and does not while this blocks it.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert unit.take(b"spec\n", lambda data: None) is None
        await life
        await asyncio.sleep(0)
        assert [type(event) for event in around.events] == [SpareReady, SpareEnded]
        assert around.recorded == {}
        assert "warning spare worker exited SIGKILL" in around.lines

    asyncio.run(scene_of_spares())


def test_one_that_dies_by_itself_is_reported_with_what_it_printed() -> None:
    async def scene_of_spares() -> None:
        around = Around(DIES)
        await unit_of(around).live()
        await asyncio.sleep(0)
        assert [type(event) for event in around.events] == [SpareEnded]
        assert "warning spare worker exited 1" in around.lines
        assert around.recorded == {}

    asyncio.run(scene_of_spares())


def test_one_that_cannot_be_started_has_ended() -> None:
    async def scene_of_spares() -> None:
        around = Around(ECHO)
        around.argv = ("/nowhere/python",)
        before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
        await unit_of(around).live()
        await asyncio.sleep(0)
        assert [type(event) for event in around.events] == [SpareEnded]
        if sys.platform == "linux":
            assert set(os.listdir("/proc/self/fd")) == before

    asyncio.run(scene_of_spares())


@pytest.mark.parametrize("is_early", [True, False])
def test_kill_ends_a_spare_before_and_after_it_is_ready(is_early: bool) -> None:
    async def scene_of_spares() -> None:
        around = Around(ECHO)
        units = units_of(around)
        async with asyncio.TaskGroup() as tasks:
            units.start(7, tasks)
            if not is_early:
                pid = await until_ready(around)
                assert units.pids == [pid]
            units.kill(7)
            unit = units.get(7)
            assert unit is not None
            assert unit.take(b"spec\n", lambda data: None) is None, "it is about to go"
        await asyncio.sleep(0)
        assert isinstance(around.events[-1], SpareEnded)
        assert (units.get(7), units.pids, around.recorded) == (None, [], {})
        assert "info spare worker exited SIGKILL" in around.lines

    asyncio.run(scene_of_spares())


def test_one_that_cannot_be_ended_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it any longer; it ends here because its input does."""
    monkeypatch.setattr(spare_module, "END_LIMIT_S", 0.01)

    async def scene_of_spares() -> None:
        around = Around(ECHO)
        units = units_of(around)
        async with asyncio.TaskGroup() as tasks:
            units.start(7, tasks)
            pid = await until_ready(around)
            with monkeypatch.context() as patch:
                patch.setattr(os, "killpg", lambda *_: None)
                await units.end()
                assert units.pids == [pid]
                assert units.leave() == 1
                await eventually_async(lambda: units.pids == [])
            assert around.lines[-1] == "error spare worker left behind"
            assert around.recorded == {pid: "(spare worker)"}, "the next start looks for it"
            await eventually_async(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0))

    asyncio.run(scene_of_spares())
    collect_unwaited()


def test_kill_ends_the_spare_of_that_number_alone() -> None:
    async def scene_of_spares() -> None:
        around = Around(ECHO)
        units = units_of(around)
        async with asyncio.TaskGroup() as tasks:
            for number in (1, 2):
                units.start(number, tasks)
            await eventually_async(lambda: len(around.events) == 2, timeout_s=60.0)
            units.kill(3)
            assert (units.get(None), units.get(3)) == (None, None)
            first, second = units.get(1), units.get(2)
            assert first is not None
            assert second is not None
            assert units.pids == [first.pid, second.pid]
            units.kill(1)
            await eventually_async(lambda: units.get(1) is None)
            assert units.pids == [second.pid]
            await units.end()
            assert (units.pids, units.leave()) == ([], 0)
        assert [e.number for e in around.events if isinstance(e, SpareEnded)] == [1, 2]

    asyncio.run(scene_of_spares())
