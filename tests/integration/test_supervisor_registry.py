"""All workers of a daemon: who is there, what is seen of them, and what they measured."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Batching
from mlxsup.protocol.worker_messages import Ready
from mlxsup.supervisor.core.actions import Spawn, WorkerSignal
from mlxsup.supervisor.core.events import (
    Event,
    Exited,
    FilesSeen,
    Spawned,
    SpawnFailed,
    WorkerSeen,
)
from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.memory.loaded_files import FileLooks
from mlxsup.supervisor.workers import registry as registry_module
from mlxsup.supervisor.workers.registry import Workers

from support.eventually_async import eventually_async
from support.hub_caches import write_folder
from support.played_daemon import Stage, play, short_folder

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
        [exited] = everyone.of(Exited)
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
    monkeypatch.setattr("mlxsup.supervisor.memory.loaded_files.stamp", lambda _: answers.wait())

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


def test_after_a_bug_processes_have_thirty_seconds() -> None:
    assert registry_module.BROKEN_LIMIT_S == 30.0


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


def test_what_a_worker_measured_is_kept_for_the_next_daemon() -> None:
    with short_folder() as folder:
        assert "measurements" not in served(folder)
        kept = json.loads((folder / "run" / "measured.json").read_bytes())
    [one] = kept["models"]
    assert (one["path"], one["weight_bytes"]) == (f"{folder}/model", 12345)


def test_what_cannot_be_kept_stops_no_serving() -> None:
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
