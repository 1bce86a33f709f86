"""The lives of workers in the shell: what is reported of them, and in which order.

Processes and sockets are real; the supervisor around them only notes what it is told.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Batching
from mlxsup.protocol.worker_messages import Ready
from mlxsup.supervisor.core.actions import Spawn, WorkerSignal
from mlxsup.supervisor.core.events import (
    Event,
    Exited,
    FilesSeen,
    PrewarmedEnded,
    PrewarmedReady,
    Spawned,
    SpawnFailed,
    WorkerSaid,
    WorkerSeen,
    WorkerUnlinked,
)
from mlxsup.supervisor.file_threads import FileLooks
from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.sockets.connection import Turns
from mlxsup.supervisor.sockets.worker_link import WorkerLink
from mlxsup.supervisor.workers import instance
from mlxsup.supervisor.workers import prewarmed as prewarmed_module
from mlxsup.supervisor.workers import registry as registry_module
from mlxsup.supervisor.workers.instance import Surroundings, WorkerUnit
from mlxsup.supervisor.workers.measure import is_process_stopped
from mlxsup.supervisor.workers.prewarmed import PrewarmedUnit, PrewarmedUnits
from mlxsup.supervisor.workers.registry import Workers

from support.client.zmtp import READY as READY_OF_DEALER
from support.daemon.hub_caches import write_folder
from support.daemon.played_daemon import Stage, play, short_folder
from support.eventually_async import eventually_async
from support.unwaited import collect_unwaited

A, B, M = ModelName("a"), ModelName("b"), ModelName("m")
FIRST, SECOND, FOURTH = Generation(1), Generation(2), Generation(4)
FAKE = LaunchSettings(path="", engine="fake")


class Around:
    """A supervisor around the lives of workers that notes what they report.

    Attributes:
        calls: everything, in order.
        faults: names of calls that fail.
        recorded: the models of live processes, by their pids.
    """

    def __init__(self, folder: Path, *argv: str, faults: frozenset[str] = frozenset()) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.faults = faults
        self.recorded: dict[int, str] = {}
        self.folder = SimpleNamespace(
            path=folder,
            worker_socket=lambda number: folder / f"w{number}.sock",
            learned_dir=lambda model: folder / model,
        )
        self.record = SimpleNamespace(add=self._add, remove=self._remove)
        self.log = SimpleNamespace(
            write=self.noted("log"), block=self.noted("block"), level="debug"
        )
        self.argv = argv
        self.post = self.noted("post")
        self.turns = Turns(lambda: 5.0)

    now = Surroundings.now
    post_soon = Surroundings.post_soon
    spawned = Surroundings.spawned
    exited = Surroundings.exited
    _write_record = Surroundings._write_record

    def noted(self, name: str) -> Callable[..., None]:
        def note(*arguments: Any, **facts: Any) -> None:
            self.calls.append((name, *arguments, *([facts] if facts else [])))
            if name in self.faults:
                raise OSError(28, "No space left on device")

        return note

    def _add(self, model: str, pid: int) -> None:
        self.noted("add")(model, pid)
        self.recorded[pid] = model

    def _remove(self, pid: int) -> None:
        self.noted("remove")(pid)
        del self.recorded[pid]

    @property
    def events(self) -> list[Event]:
        return [call[1] for call in self.calls if call[0] == "post"]

    def of(self, kind: type[Any], model: ModelName = A) -> list[Any]:
        """Return the events of one kind about a model."""
        return [one for one in self.events if isinstance(one, kind) and one.model == model]


def ignore(*_: object) -> None:
    """Take anything."""


# ---------------------------------------------------------------- one life

KNOWN = {"fingerprint": "f", "batching": "exact", "reason": ""}


def live_of(
    *argv: str, faults: frozenset[str] = frozenset(), is_killed: bool = False
) -> list[tuple[Any, ...]]:
    """Return all that is reported of one life, in order; what its READY teaches, too."""

    async def one_life(around: Around) -> None:
        async def ended(limit_s: float) -> None:
            around.calls.append(("ended", limit_s))

        spawn = Spawn(model=M, generation=FOURTH, launch=FAKE, known_batching=KNOWN)
        log = SimpleNamespace(
            write=around.noted("output"),
            begin=around.noted("begin"),
            last_lines=("l",),
            ended=ended,
        )
        learn = around.noted("learn")
        unit = WorkerUnit(around, spawn, 1, log, learn)  # type: ignore[arg-type]  # stand-ins
        assert (unit.model, unit.generation, unit.pid) == (M, FOURTH, None)
        assert unit.loaded_files is None, "it has read nothing yet"
        if is_killed:
            unit.kill()
        await unit.live()
        await asyncio.sleep(0)  # what was asked of the loop last
        assert unit.pid is None

    with short_folder() as folder:
        around = Around(folder, *argv, faults=faults)
        asyncio.run(asyncio.wait_for(one_life(around), 60.0))
        assert list(folder.iterdir()) == [], "its sockets are gone"
    return around.calls


def test_a_life_is_reported_in_order_from_spawn_to_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 77.0)
    calls = live_of("/bin/sh", "-c", "echo words; exit 3")
    pid = calls[0][2]
    facts = {"model": "m", "generation": 4, "pid": pid}
    assert calls == [
        ("begin", 4, pid),
        ("add", "m", pid),
        ("log", "info", "worker spawned", facts),
        ("post", Spawned(now=5.0, model=M, generation=FOURTH, pid=pid)),
        ("output", b"words\n"),
        ("remove", pid),
        ("ended", 1.0),
        ("log", "info", "worker exited", {**facts, "code": 3}),
        ("post", Exited(now=5.0, model=M, generation=FOURTH, exit_code=3,
                        signal_name="", last_lines=("l",), at=77.0)),
    ]  # fmt: skip


def test_a_worker_is_told_all_that_its_supervisor_knows() -> None:
    calls = live_of("/bin/sh", "-c", "head -n 1")
    spec = json.loads(b"".join(call[1] for call in calls if call[0] == "output"))
    assert {name: spec[name] for name in ("model", "generation", "engine")} == {
        "model": "m", "generation": 4, "engine": "fake",
    }  # fmt: skip
    assert (spec["supervisor_pid"], spec["log_level"]) == (os.getpid(), "debug")
    assert spec["known_batching"] == KNOWN
    assert [Path(spec[name]).name for name in ("endpoint", "learned_dir")] == ["w1.sock", "m"]


def test_a_life_that_is_ended_before_it_began_ends_at_once_by_its_signal() -> None:
    *_, log, (_, exited) = live_of("/bin/sh", "-c", "read -r line; read -r never", is_killed=True)
    assert (log[:3], log[3]["signal"]) == (("log", "info", "worker exited"), "SIGKILL")
    assert (exited.exit_code, exited.signal_name) == (None, "SIGKILL")


def test_a_record_that_cannot_be_written_stops_no_life() -> None:
    calls = live_of("/bin/sh", "-c", "exit 0", faults=frozenset({"add", "remove"}))
    warning = ("log", "warning", "workers not recorded", {"error": "No space left on device"})
    assert calls.count(warning) == 2
    assert calls[-1][1].exit_code == 0


def test_a_missing_command_is_reported_and_leaves_nothing() -> None:
    detail = "No such file or directory"
    failed = SpawnFailed(now=5.0, model=M, generation=FOURTH, detail=detail)
    assert live_of("/nonexistent/worker") == [("post", failed)]


def test_sockets_that_cannot_be_made_are_reported_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> WorkerLink:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(instance, "WorkerLink", fail)
    [(said, failed)] = live_of("/bin/sh", "-c", "exit 0")
    assert (said, type(failed)) == ("post", SpawnFailed)
    assert failed.detail == "No such file or directory"


def test_an_exit_is_reported_though_its_socket_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = WorkerLink.close

    def fail(self: WorkerLink) -> None:
        close(self)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(WorkerLink, "close", fail)
    calls = live_of("/bin/sh", "-c", "exit 0")
    warning = ("log", "warning", "socket not removed", {"error": "Permission denied"})
    assert calls.count(warning) == 2, "at its exit, and when all of it is closed"
    assert [type(call[1]) for call in calls if call[0] == "post"] == [Spawned, Exited]


HASTY = """\
import json, os, socket, sys
from mlxsup.protocol.codec import encode
from mlxsup.protocol.worker_messages import Dying, Hello, Ready
from mlxsup.supervisor.sockets.zmtp import GREETING, to_wire
spec = json.loads(sys.stdin.readline())
hello = Hello(model="m", generation=4, token=spec["token"], pid=os.getpid(), version="1")
link = socket.socket(socket.AF_UNIX)
link.connect(spec["endpoint"].removeprefix("ipc://"))
link.sendall(GREETING + bytes.fromhex(sys.argv[1]))
ready = Ready(context_length=9, fingerprint="f", backend="fake")
for message in (hello, ready, Dying(code=70, message="why")):
    link.sendall(to_wire(encode(message)))
"""
"""A worker that is READY, says why it dies, waits for no answer and exits."""


def test_last_words_are_heard_although_nothing_was_read_before_the_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instance, "LAST_WORDS_S", 0.0)
    monkeypatch.setattr(Turns, "read_soon", ignore)  # a loop that is too busy
    calls = live_of(sys.executable, "-c", HASTY, READY_OF_DEALER.hex())
    told = [(name, one) for name, one, *_ in calls if name in ("post", "learn")]
    said = [one.message.TYPE if isinstance(one, WorkerSaid) else type(one) for _, one in told]
    assert said == [Spawned, "hello", Ready, "ready", "dying", WorkerUnlinked, Exited]
    assert [name for name, _ in told].index("learn") == 2, "before the core hears of it"


# ---------------------------------------------------------------- all lives
class All(Around):
    """The workers of a daemon, with real processes that wait."""

    def __init__(self, folder: Path, writer: LogWriter, tasks: asyncio.TaskGroup) -> None:
        super().__init__(folder, "/bin/sh", "-c", "read -r line; exec cat > /dev/null")
        self.path = folder
        self.tasks = tasks
        self.workers = Workers(self, folder, writer, ignore)  # type: ignore[arg-type]  # stand-in

    async def spawn(self, model: ModelName, launch: LaunchSettings = FAKE) -> int:
        """Begin the first life of a model; return the pid."""
        self.workers.spawn(Spawn(model=model, generation=FIRST, launch=launch), self.tasks)

        def pid() -> int | None:
            unit = self.workers.get(model, FIRST)
            return unit.pid if unit is not None and self.of(Spawned, model) else None

        return await eventually_async(pid)

    def look_at_files(self, model: ModelName, generation: Generation = FIRST) -> None:
        self.workers.look_at_files(model, generation, self.tasks)


def live(scene: Callable[[All], Awaitable[None]]) -> None:
    """Play a scene, and end all workers."""

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

    with short_folder() as folder:
        asyncio.run(play_scene(folder))


def test_workers_are_known_by_model_and_generation_until_they_are_gone() -> None:
    async def scene(everyone: All) -> None:
        workers = everyone.workers
        assert (workers.models, workers.pids) == (set(), [])
        pids = [await everyone.spawn(model) for model in (A, B)]
        assert (workers.models, workers.pids) == ({A, B}, pids)
        assert (everyone.path / "w1.sock").exists()
        assert (everyone.path / "w2.sock").exists(), "each spawn has its own"
        assert workers.get(A, SECOND) is None
        workers.signal(B, SECOND, WorkerSignal.TERM)
        workers.signal(A, FIRST, WorkerSignal.TERM)
        await eventually_async(lambda: workers.models == {B})
        assert workers.pids == pids[1:]
        assert workers.get(A, FIRST) is None
        [exited] = await eventually_async(lambda: everyone.of(Exited))
        assert exited.signal_name == "SIGTERM"
        await workers.end()
        assert (workers.models, workers.pids, workers.leave()) == (set(), [], 0)
        assert not any(map(psutil.pid_exists, pids))

    live(scene)


def test_prewarmed_workers_that_are_left_behind_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(everyone: All) -> None:
        monkeypatch.setattr(everyone.workers.prewarmed, "leave", lambda: 2)
        assert everyone.workers.leave() == 2

    live(scene)


def test_a_process_is_seen_as_it_is_after_a_delay() -> None:
    async def scene(everyone: All) -> None:
        process = psutil.Process(await everyone.spawn(A))
        for is_stopped in (False, True):
            if is_stopped:
                process.suspend()
                await eventually_async(lambda: process.status() == psutil.STATUS_STOPPED)
            everyone.calls.clear()
            everyone.workers.look_at(A, FIRST, 0.02)
            await asyncio.sleep(0)
            assert everyone.events == [], "what has arrived is read first"
            await eventually_async(lambda: everyone.events)
            seen = WorkerSeen(now=5.0, model=A, generation=FIRST, is_stopped=is_stopped)
            assert everyone.events == [seen]

    live(scene)


def test_files_are_compared_with_those_that_were_there_before_the_load() -> None:
    """Of a life that is over, or that there never was, nothing is seen."""

    async def scene(everyone: All) -> None:
        folder = write_folder(everyone.path / "model")
        await everyone.spawn(A, LaunchSettings(path=str(folder), engine="mlx"))
        assert everyone.workers.is_stopped(A, SECOND) is None
        for change in ("", "config.json has changed since it was loaded"):
            if change:
                (folder / "config.json").write_text("{}")
            everyone.calls.clear()
            everyone.workers.look_at(A, SECOND, 0.0)
            everyone.look_at_files(A, SECOND)
            everyone.look_at_files(B)
            everyone.look_at_files(A)
            await eventually_async(lambda: everyone.events)
            seen = FilesSeen(now=5.0, model=A, generation=FIRST, change=change)
            assert everyone.events == [seen]

    live(scene)


def test_a_folder_that_does_not_answer_gets_no_process_and_leaves_none_prewarmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, killed, compared = threading.Event(), list[int](), list[int]()

    async def compare(number: int) -> None:
        compared.append(number)

    monkeypatch.setattr("mlxsup.supervisor.file_threads.stamp", lambda *_: answers.wait())

    async def scene(everyone: All) -> None:
        monkeypatch.setattr(everyone.workers.prewarmed, "kill", killed.append)
        monkeypatch.setattr(everyone.workers.prewarmed, "end_outdated", compare)
        monkeypatch.setattr(everyone.workers, "_files", FileLooks(limit_s=0.05))
        launch = LaunchSettings(path=str(everyone.path))
        spawn = Spawn(model=A, generation=FIRST, launch=launch, prewarmed=7)
        everyone.workers.spawn(spawn, everyone.tasks)
        [failed] = await eventually_async(lambda: everyone.of(SpawnFailed))
        assert failed.detail == "its folder does not respond; check its disk"
        assert (compared, killed, everyone.workers.models) == ([7], [7], set())
        answers.set()

    live(scene)


def test_a_model_that_was_forgotten_begins_its_log_anew_when_it_comes_back() -> None:
    async def scene(everyone: All) -> None:
        log = everyone.path / "a.log"
        everyone.workers.forget(A)  # it never had a process
        pids = []
        for _ in range(2):
            pids.append(await everyone.spawn(A))
            await everyone.workers.end()
            everyone.workers.forget(A)
            everyone.calls.clear()
        await eventually_async(lambda: f" pid {pids[-1]} " in log.read_text())
        began = [line for line in log.read_text().splitlines() if line.startswith("---")]
        assert len(began) == 2

    live(scene)


def test_a_terminal_that_is_gone_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    registry_module.report("mlxsup: told")
    assert capsys.readouterr() == ("", "mlxsup: told\n")
    monkeypatch.setattr(registry_module, "print", gone, raising=False)
    registry_module.report("mlxsup: not told")


# ---------------------------------------------------------------- what they measured
@pytest.mark.parametrize("can_be_written", [True, False])
def test_a_measurement_is_kept_for_the_next_daemon_and_stops_no_serving(
    can_be_written: bool,
) -> None:
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

    with short_folder() as folder:
        kept = folder / "run" / "measured.json"
        if not can_be_written:
            kept.mkdir(parents=True)
            (folder / "run").chmod(0o700)
        model = write_folder(folder / "model")
        assert play(body, {"a": {"path": str(model)}}, folder=folder) == 0
        log = (folder / "logs" / "mlxsup.log").read_text()
        if can_be_written:
            [one] = json.loads(kept.read_bytes())["models"]
            assert (one["path"], one["weight_bytes"]) == (f"{folder}/model", 12345)
    assert log.count("measurements") == (0 if can_be_written else 2)
    if not can_be_written:
        assert log.count("WARNING measurements not used cause=") == 1
        assert log.count('WARNING measurements not written error="Is a directory"\n') == 1


# ---------------------------------------------------------------- prewarmed workers
READY = "import os, sys; print('imported', flush=True); os.write(int(sys.argv[-1]), b'!')"
ECHO = f"{READY}; print('got', sys.stdin.readline().strip(), flush=True); sys.stdin.read()"
DIES = "import sys; sys.exit('no MLX here')"
RECORDED = "(prewarmed worker)"


class Pool(Around):
    """A supervisor around prewarmed workers."""

    def __init__(self, folder: Path, *argv: str) -> None:
        super().__init__(folder, *argv)
        self.unit = PrewarmedUnit(self, 7)  # type: ignore[arg-type]  # a stand-in
        self.units = PrewarmedUnits(self)  # type: ignore[arg-type]  # a stand-in

    async def until_ready(self) -> int:
        """Return the pid of one that has just become ready."""
        await eventually_async(lambda: bool(self.events))
        [event] = self.events
        assert isinstance(event, PrewarmedReady)
        assert (event.number, event.now) == (7, 5.0)
        return event.pid

    def exits(self) -> list[tuple[Any, ...]]:
        """Return what the log says of ends: the level, and the signal or the exit code."""
        logged = [call[1:] for call in self.calls if call[0] == "log"]
        return [
            (level, facts.get("signal", facts.get("code")))
            for level, text, facts in logged
            if text == "prewarmed worker exited"
        ]


def pool(scene: Callable[[Pool], Awaitable[None]], script: str = ECHO) -> Pool:
    """Play a scene with prewarmed workers that run a script; return what was reported."""

    async def play_scene(folder: Path) -> Pool:
        around = Pool(folder, sys.executable, "-c", script)
        async with asyncio.timeout(120.0):
            await scene(around)
        await asyncio.sleep(0)
        return around

    with short_folder() as folder:
        return asyncio.run(play_scene(folder))


def test_a_ready_one_gets_its_line_and_its_new_reader_everything_it_printed() -> None:
    async def scene(around: Pool) -> None:
        output = list[bytes]()
        unit = around.unit
        life = asyncio.create_task(unit.live())
        pid = await around.until_ready()
        assert (unit.pid, around.recorded) == (pid, {pid: RECORDED})
        process = unit.take(b"spec\n", output.append)
        assert process is not None
        assert (process.pid, unit.pid) == (pid, None)
        await eventually_async(lambda: b"got spec" in b"".join(output))
        assert b"".join(output) == b"imported\ngot spec\n", "each once, in order"
        await life
        unit.kill()  # it belongs to a model now
        assert not process.exited.done()
        process.close()
        await process.exited
        process.close_pipes()
        assert around.recorded == {pid: RECORDED}, "its new owner records what it is now"

    assert [type(event) for event in pool(scene).events] == [PrewarmedReady]


def test_one_that_is_stopped_is_not_handed_over_and_ends() -> None:
    async def scene(around: Pool) -> None:
        life = asyncio.create_task(around.unit.live())
        pid = await around.until_ready()
        os.kill(pid, signal.SIGSTOP)
        await eventually_async(lambda: is_process_stopped(pid))
        assert around.unit.take(b"spec\n", ignore) is None
        await life

    around = pool(scene)
    assert [type(event) for event in around.events] == [PrewarmedReady, PrewarmedEnded]
    assert (around.recorded, around.exits()) == ({}, [("info", "SIGKILL")])


def test_take_returns_none_for_one_that_has_just_died() -> None:
    async def scene(around: Pool) -> None:
        life = asyncio.create_task(around.unit.live())
        pid = await around.until_ready()
        os.kill(pid, signal.SIGKILL)
        # The loop has not seen it yet, and does not while this blocks it.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert around.unit.take(b"spec\n", ignore) is None
        await life

    around = pool(scene)
    assert [type(event) for event in around.events] == [PrewarmedReady, PrewarmedEnded]
    assert (around.recorded, around.exits()) == ({}, [("warning", "SIGKILL")])


@pytest.mark.parametrize("starts", [True, False])
def test_a_prewarmed_worker_that_dies_or_cannot_be_started_is_reported_with_what_it_printed(
    starts: bool,
) -> None:
    async def scene(around: Pool) -> None:
        if not starts:
            around.argv = ("/nowhere/python",)
        before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
        await around.unit.live()
        if sys.platform == "linux":
            assert set(os.listdir("/proc/self/fd")) <= before

    around = pool(scene, DIES)
    assert [type(event) for event in around.events] == [PrewarmedEnded]
    assert around.recorded == {}
    assert around.exits() == [("warning", 1)] * starts
    printed = [call[1] for call in around.calls if call[0] == "block"]
    assert printed == ["no MLX here\n"] * starts


@pytest.mark.parametrize("is_early", [True, False])
def test_kill_ends_one_before_and_after_it_is_ready(is_early: bool) -> None:
    async def scene(around: Pool) -> None:
        units = around.units
        async with asyncio.TaskGroup() as tasks:
            units.start(7, tasks)
            if not is_early:
                pid = await around.until_ready()
                assert units.pids == [pid]
            units.kill(7)
            unit = units.get(7)
            assert unit is not None
            assert unit.take(b"spec\n", ignore) is None, "it is about to go"
        assert (units.get(7), units.pids, around.recorded) == (None, [], {})

    around = pool(scene)
    assert isinstance(around.events[-1], PrewarmedEnded)
    assert around.exits() == [("info", "SIGKILL")]


def test_one_that_cannot_be_ended_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon does not wait for it; it ends here because its input does."""
    monkeypatch.setattr(prewarmed_module, "END_LIMIT_S", 0.01)

    async def scene(around: Pool) -> None:
        units = around.units
        async with asyncio.TaskGroup() as tasks:
            units.start(7, tasks)
            pid = await around.until_ready()
            with monkeypatch.context() as patch:
                patch.setattr(os, "killpg", ignore)
                await units.end()
                assert units.pids == [pid]
                assert units.leave() == 1
                await eventually_async(lambda: units.pids == [])
            assert around.calls[-1] == (
                "log",
                "error",
                "prewarmed worker left behind",
                {"pid": pid},
            )
            assert around.recorded == {pid: RECORDED}, "the next start looks for it"
            await eventually_async(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0))

    pool(scene)
    collect_unwaited()


@pytest.mark.parametrize(
    "change", ["installed again", "removed", "unreadable", "never readable", "none"]
)
def test_one_that_has_imported_other_packages_is_ended(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with short_folder() as packages:
        mlx, other = packages / "mlx-0.1.dist-info", packages / "other-1.dist-info"
        mlx.mkdir()
        other.mkdir()
        monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])

        async def scene(around: Pool) -> None:
            units = around.units
            if change == "never readable":
                monkeypatch.setattr(sys, "executable", "/nowhere/python")
            async with asyncio.TaskGroup() as tasks:
                units.start(7, tasks)
                await around.until_ready()
                (packages / "__pycache__").mkdir()  # an import may make it
                if change == "installed again":
                    os.utime(mlx, ns=(1, 1))
                elif change == "removed":
                    other.rmdir()
                elif change == "unreadable":
                    monkeypatch.setattr(sys, "executable", "/nowhere/python")
                await units.end_outdated(None)
                await units.end_outdated(7)
                unit = units.get(7)
                assert unit is not None
                process = unit.take(b"spec\n", ignore)
                assert (process is None) == (change != "none")
                if process is not None:
                    process.close()
                    await process.exited
                    process.close_pipes()

        pool(scene)


def test_kill_ends_the_one_of_that_number_alone() -> None:
    async def scene(around: Pool) -> None:
        units = around.units
        async with asyncio.TaskGroup() as tasks:
            for number in (1, 2):
                units.start(number, tasks)
            await eventually_async(lambda: len(around.events) == 2)
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

    around = pool(scene)
    assert [e.number for e in around.events if isinstance(e, PrewarmedEnded)] == [1, 2]
