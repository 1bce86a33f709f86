"""No file of somebody else is touched on the supervisor's loop, and none of them stalls it."""

from __future__ import annotations

import asyncio
import builtins
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from mlxsup.protocol.client_messages import (
    Deltas,
    Done,
    Failed,
    Load,
    Reload,
    RemoveModel,
    Reply,
    SettingsQuery,
    StatusQuery,
)
from mlxsup.protocol.download import DownloadDone, report_line
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.worker_messages import Exit, Ready
from mlxsup.supervisor import app as app_module
from mlxsup.supervisor import downloads as downloads_module
from mlxsup.supervisor.config.load import read_text

from support.daemon.daemon import fake
from support.daemon.hub_caches import MODEL, REPO
from support.daemon.hub_caches import write_folder as write_files
from support.daemon.played_daemon import (
    Peer,
    PlayedWorker,
    Stage,
    generate,
    play,
    short_folder,
    token,
    write_config,
)
from support.eventually import eventually
from support.eventually_async import eventually_async
from support.models.safetensors_files import llama_arrays, llama_config, write_folder

TICK_S = 0.002
MOST_CALLS = 50_000
"""Of a loop's thread between two ticks: twice what a reload with a hundred new models takes."""


@asynccontextmanager
async def no_stall() -> AsyncIterator[None]:
    """Fail if the thread of the running loop calls more functions between two ticks.

    Calls are counted instead of time, because a busy machine does not change them.
    """
    longest = count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    async def tick() -> None:
        nonlocal longest, count
        while True:
            longest, count = max(longest, count), 0
            await asyncio.sleep(TICK_S)

    ticking = asyncio.create_task(tick())
    sys.setprofile(note)
    try:
        yield
        await asyncio.sleep(TICK_S)
    finally:
        sys.setprofile(None)
        ticking.cancel()
    assert longest > 0, "nothing was counted"
    assert longest <= MOST_CALLS, f"the loop has called {longest} functions without a pause"


@contextmanager
def touched_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the files below a folder that the product touches on this thread, and where."""
    touched: list[str] = []
    thread = threading.get_ident()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def touch(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            is_path = isinstance(path, str | os.PathLike) and threading.get_ident() == thread
            if is_path and os.fspath(path).startswith(str(folder)) and (line := _product_line()):
                touched.append(f"{path} at {line}")
            return function(path, *arguments, **options)

        return touch

    with monkeypatch.context() as patched:
        for name in ("stat", "lstat", "listdir", "scandir", "open"):
            patched.setattr(os, name, noted(getattr(os, name)))
        for module in (io, builtins):
            patched.setattr(module, "open", noted(open))
        yield touched


def _product_line() -> str:
    """Return the innermost line of the product on the stack; empty if a test does this itself."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "/tests/integration/" not in (name := frame.f_code.co_filename):
        if "/mlxsup/" in name or "/supervisor/" in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


SILENT = Path(__file__).parents[1] / "support" / "silent_folders"
LOOKS = {"preload": False}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder for models, which is somebody else's."""
    write_folder(tmp_path / "models" / "m", llama_config(), llama_arrays())
    return tmp_path / "models"


def entries(models: Path, *names: str, **more: Any) -> dict[str, dict[str, Any]]:
    """A model `a` with a played worker, and others that are not loaded."""
    return {"a": fake()} | {n: {"path": str(models / n), **LOOKS, **more} for n in names}


async def ask_reload(peer: Peer, id: str = "reload") -> dict[str, Any]:
    reply: dict[str, Any] = (await peer.ask(Reload(id=RequestId(id)), Reply)).value
    return reply


async def refused_reload(peer: Peer) -> str:
    failed = await peer.ask(Reload(id=RequestId("reload")), Failed)
    (problem,) = failed.error.detail["problems"]
    return str(problem)


class Stream:
    """A request that goes on while something happens: steps of 10 ms."""

    def __init__(self, peer: Peer, worker: PlayedWorker) -> None:
        self._peer, self._worker = peer, worker
        self._count = 0

    async def begin(self) -> None:
        await self._peer.say(generate())
        self._key = await self._worker.accept()
        self._steps = asyncio.create_task(self._step())

    async def _step(self) -> None:
        while True:
            self._count += 1
            await self._worker.step(token(self._key, self._count))
            await self._worker.beat()
            await self._peer.hear(Deltas)
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Fails if it has been disturbed."""
        self._steps.cancel()
        await asyncio.wait([self._steps])
        assert self._steps.cancelled(), self._steps.exception()
        await self._worker.step(token(self._key, 0, is_last=True))
        while not isinstance(await self._peer.hear_any(), Done):
            pass


# ---------------------------------------------------------------- nothing is touched


def test_nothing_that_it_does_with_a_model_touches_its_files_on_the_loop(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(models / "hub"))
    fetched = write_files(models / "fetched", MODEL)
    done = report_line(DownloadDone(folder=str(fetched), total_bytes=1, fetched_bytes=1))
    argv = [sys.executable, "-c", f"import sys; sys.stdin.readline(); print({done!r}, flush=True)"]
    monkeypatch.setattr(downloads_module, "download_argv", lambda: argv)
    is_over = threading.Event()

    async def body(stage: Stage) -> None:
        worker = await stage.worker("m")
        await worker.say(worker.hello())
        await worker.say(
            Ready(context_length=4096, fingerprint="f", backend="cpu", active_bytes=500)
        )
        await stage.until("m", "READY")
        peer = stage.peer()
        stage.write_config(of | {"b": fake(preload=False)})
        assert (await ask_reload(peer))["added"] == ["b"]
        load = Load(id=RequestId("load"), model=ModelName("m"), context_length=512)
        await peer.say(load)
        second = await stage.worker("m", 2)
        assert second.spec.context_length == 512
        await second.come_up()
        await peer.hear(Reply)
        second.die()
        await stage.ready("m", 3)
        await peer.say(Load(id=RequestId("fetch"), model=ModelName("fetched")))
        assert (await stage.worker("fetched")).spec.path == str(fetched)
        status = (await peer.ask(StatusQuery(id=RequestId("s")), Reply)).value
        rows = {row["name"]: row for row in status["models"]}
        assert rows["m"]["needed_bytes"] > 0
        assert rows["fetched"]["needed_bytes"] > 0, "its folder was read"
        is_over.set()

    of = {
        "m": {"path": str(models / "m"), "preload": True},
        "fetched": {"repo": REPO, "preload": False},
    }
    with touched_files(models, monkeypatch) as touched:
        assert play(body, of) == 0
    assert is_over.is_set()
    assert touched == []


CHANGE = "config.json has changed since it was loaded"


def test_a_model_whose_files_have_changed_is_not_swapped_out_while_its_answers_are_open_I7(
    models: Path,
) -> None:
    write_folder(models / "n", llama_config(), llama_arrays())
    limits = {"memory_budget": "400MiB", "min_residency_s": 0, "swap_after_s": 0.1}
    entry = {"memory": "300MiB", "preload": False}

    async def body(stage: Stage) -> None:
        peer, other = stage.peer(), stage.peer()
        await peer.say(generate(model="m"))
        worker = await stage.ready("m")
        key = await worker.accept()
        await worker.step(token(key, 1))
        await peer.hear(Deltas)
        (models / "m" / "config.json").write_text("changed")
        await other.say(generate("s", model="n"))
        # The turn of the other comes after three times as long as the load took.
        await eventually_async(
            lambda: any(kept == one.get("note") for one in stage.changes), timeout_s=240.0
        )
        await worker.step(token(key, 2, is_last=True))
        while not isinstance(await peer.hear_any(), Done):
            pass
        await worker.hear(Exit)  # as soon as it is idle, the other one has its turn
        worker.die(signal.SIGTERM)
        await stage.worker("n")

    kept = f"cannot be swapped out while it has open answers: {CHANGE}"
    entries = {name: {"path": str(models / name), **entry} for name in ("m", "n")}
    assert play(body, entries, supervisor=limits) == 0


# ---------------------------------------------------------------- nothing stalls it


def make_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def make_endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def make_odd_folders(models: Path) -> dict[str, str]:
    """Folders that stall whoever reads them as if they were good ones, with their paths."""
    names = ("pipe", "endless", "weights", "index", "silent")
    for name in names:
        write_folder(models / name, llama_config(), llama_arrays())
    make_pipe(models / "pipe" / "config.json")
    make_endless(models / "endless" / "config.json")
    make_pipe(models / "weights" / "model.safetensors")
    with open(models / "index" / "model.safetensors.index.json", "wb") as file:
        file.truncate(10**9)
    return {name: str(models / name) for name in names}


async def needed_bytes(peer: Peer) -> dict[str, int]:
    status = (await peer.ask(StatusQuery(id=RequestId("s")), Reply)).value
    return {row["name"]: row["needed_bytes"] for row in status["models"]}


def test_folders_that_hang_or_never_end_disturb_no_start_no_reload_and_no_other_model(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon starts with them, and a reload beside a stream adds a hundred good ones."""
    monkeypatch.setenv("PYTHONPATH", str(SILENT), prepend=os.pathsep)
    odd = make_odd_folders(models)
    names = [f"m{number}" for number in range(100)]
    for name in names:
        shutil.copytree(models / "m", models / name)

    async def body(stage: Stage) -> None:
        worker, peer = await stage.ready(), stage.peer()
        needed = await needed_bytes(peer)
        assert {name: needed[name] for name in odd} == dict.fromkeys(odd, 0)
        stream = Stream(stage.peer(), worker)
        await stream.begin()
        stage.write_config(entries(models, "m", *odd, *names))
        async with no_stall():
            value = await ask_reload(peer)
            again = await ask_reload(peer)
        assert sorted(value["added"]) == sorted(names)
        assert (again["added"], again["changed"]) == ([], [])
        assert "does not respond" in value["unread"]["silent"]
        await stream.end()
        needed = await needed_bytes(peer)
        late = again["unread"].keys()  # on a busy machine others may not have answered in time
        assert min(needed[name] for name in {*names, "m"} - late) > 0
        await stage.logged("model folder not read model=silent")

    assert play(body, entries(models, "m", *odd)) == 0


def test_a_signal_ends_a_start_whose_folders_do_not_answer(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own reading of them; what `mlxsup start` says of folders comes before."""
    monkeypatch.setenv("PYTHONPATH", str(SILENT), prepend=os.pathsep)
    (models / "m").rename(models / "silent")
    with short_folder() as folder:
        config = write_config(folder, {"silent": {"path": str(models / "silent"), **LOOKS}})
        script = (
            "import pathlib\n"
            "from mlxsup.supervisor.config.load import read_config\n"
            "from mlxsup.supervisor.daemon import run_daemon\n"
            f"config = read_config(pathlib.Path({str(config)!r}))\n"
            "never = lambda endpoint: print('listens', flush=True)\n"
            "raise SystemExit(run_daemon(config, on_change=print, on_listening=never))\n"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as daemon:
            try:
                children = psutil.Process(daemon.pid).children
                eventually(lambda: any("folder_reader" in str(one.cmdline()) for one in children()))
                daemon.send_signal(signal.SIGTERM)
                output, _ = daemon.communicate(timeout=60)
            finally:
                daemon.kill()
        assert daemon.returncode == 0
        assert b"listens" not in output
        assert "daemon ended code=0" in (folder / "logs" / "mlxsup.log").read_text()


# ---------------------------------------------------------------- the configuration file


def write_comments(path: Path) -> None:
    path.write_text("# a comment that says nothing at all\n" * 30_000)


def write_models(path: Path) -> None:
    """Below the limit of bytes."""
    path.write_text("".join(f'[models.m{n}]\npath="m"\n' for n in range(10_000)))


BAD_FILES = {
    make_pipe: "cannot be read: it is a named pipe, not a regular file",
    make_endless: "cannot be read: it is a device, not a regular file",
    write_comments: "cannot be read: it has more than the 1 MiB that are read of such a file",
    write_models: "has 10000 models, but a daemon serves at most 1000",
}


def test_a_file_that_would_stall_a_reload_is_refused_and_disturbs_nothing() -> None:
    async def body(stage: Stage) -> None:
        worker, peer = await stage.ready(), stage.peer()
        stream = Stream(stage.peer(), worker)
        await stream.begin()
        path = stage.folder / "config.toml"
        good = path.read_text()
        for damage, problem in BAD_FILES.items():
            path.unlink()
            damage(path)
            async with no_stall():
                assert await refused_reload(peer) == f"{path}: {problem}"
        path.unlink()
        path.write_text(good)
        assert (await ask_reload(peer))["changed"] == []
        await stream.end()

    assert play(body) == 0


def hang_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads of the configuration file hang until the event is set; what they find is read then."""
    answers = threading.Event()

    def wait_and_read(path: Path) -> Any:
        answers.wait()
        return read_text(path)

    monkeypatch.setattr(f"{app_module.__name__}.read_text", wait_and_read)
    return answers


def test_a_file_whose_disk_does_not_answer_is_refused_and_read_once_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_module, "READ_LIMIT_S", 0.2)

    async def body(stage: Stage) -> None:
        await stage.ready()
        peer = stage.peer()
        answers = hang_reads(monkeypatch)
        problem = await refused_reload(peer)
        assert problem.endswith("could not be read within 0.2 s; check its disk")
        assert "read within" in await refused_reload(peer), "the first still hangs"
        answers.set()
        monkeypatch.setattr(app_module, "READ_LIMIT_S", 60.0)
        stage.write_config(entries(stage.folder) | {"b": fake(preload=False)})
        assert (await ask_reload(peer))["added"] == ["b"]

    assert play(body) == 0


def test_without_a_thread_to_read_with_a_reload_is_refused_and_the_daemon_serves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def body(stage: Stage) -> None:
        await stage.ready()
        peer = stage.peer()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            problem = await refused_reload(peer)
        assert "could not be read (can't start new thread)" in problem
        assert (await ask_reload(peer))["changed"] == []

    assert play(body) == 0


def test_without_a_thread_to_search_with_a_change_is_refused_and_the_daemon_serves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def refuse_the_search(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:  # the first reads the file
            raise RuntimeError("can't start new thread")
        start(thread)

    async def body(stage: Stage) -> None:
        await stage.ready()
        peer = stage.peer()
        remove = RemoveModel(id=RequestId("remove"), model=ModelName("a"))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_the_search)
            failed = await peer.ask(remove, Failed)
        assert "can't start new thread" in failed.error.message
        assert (await ask_reload(peer))["removed"] == []

    assert play(body) == 0


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("parse_config", Reload(id=RequestId("asked"))),
        ("planned", RemoveModel(id=RequestId("asked"), model=ModelName("a"))),
        ("settings_of", SettingsQuery(id=RequestId("asked"), model=ModelName("a"))),
    ],
)
def test_a_bug_that_a_text_leads_to_is_answered_and_the_daemon_serves_on(
    monkeypatch: pytest.MonkeyPatch, place: str, message: Reload | RemoveModel | SettingsQuery
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("a text that was not thought of")

    async def body(stage: Stage) -> None:
        await stage.ready()
        peer = stage.peer()
        with monkeypatch.context() as patch:
            patch.setattr(app_module, place, fail)
            failed = await peer.ask(message, Failed)
        assert failed.error.code == "internal"
        assert "IndexError; nothing was changed" in failed.error.message
        assert (await ask_reload(peer))["removed"] == []

    assert play(body) == 0


def test_the_end_does_not_wait_for_a_file_and_answers_the_reload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    async def body(stage: Stage) -> None:
        await stage.ready()
        peer = stage.peer()
        hang_reads(monkeypatch)
        await peer.say(Reload(id=RequestId("reload")))
        await peer.ask(StatusQuery(id=RequestId("s")), Reply)
        os.kill(os.getpid(), signal.SIGTERM)
        told.append((await peer.hear(Failed)).error.code)

    assert play(body) == 0
    assert told == ["shutting_down"]


def test_reloads_that_are_asked_for_meanwhile_get_what_was_written_before_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(stage: Stage) -> None:
        await stage.ready()
        peers = [stage.peer() for _ in range(3)]
        answers = hang_reads(monkeypatch)
        await peers[0].say(Reload(id=RequestId("0")))
        await peers[0].ask(StatusQuery(id=RequestId("s")), Reply)
        stage.write_config({"a": fake(), "b": fake(preload=False)})
        for peer in peers[1:]:
            await peer.say(Reload(id=RequestId("more")))
            await peer.ask(StatusQuery(id=RequestId("s")), Reply)
        os.kill(os.getpid(), signal.SIGHUP)
        answers.set()
        values = [(await peer.hear(Reply)).value for peer in peers]
        assert sum(value["added"] == ["b"] for value in values) == 1
        await stage.logged("configuration reloaded")
        await eventually_async(lambda: stage.log().count(" configuration reloaded") == 4)

    assert play(body) == 0


# ---------------------------------------------------------------- half a file


def test_a_file_that_is_still_being_written_ends_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each place, the rest is written after the daemon has read what was there."""
    reads: list[int] = []

    def noted(path: Path) -> Any:
        text = read_text(path)
        reads.append(len(text.text))
        return text

    monkeypatch.setattr(f"{app_module.__name__}.read_text", noted)
    models = {"n": fake(), "a": fake()}

    async def body(stage: Stage) -> None:
        workers = {name: await stage.ready(name) for name in "na"}
        peer = stage.peer()
        stream = Stream(stage.peer(), workers["a"])
        await stream.begin()
        path = stage.folder / "config.toml"
        whole = path.read_text()
        tables = [whole.index(f'[models."{name}"]') for name in "na"]
        valid = 0
        for place in (*tables, tables[1] + 5, whole.rindex("preload"), len(whole) - 5):
            cut = whole[:place]
            path.write_text(cut)
            reads.clear()
            await peer.say(Reload(id=RequestId(f"{place}")))
            await eventually_async(lambda: bool(reads))
            path.write_text(whole)
            answer = await peer.hear_any()
            while not isinstance(answer, Reply | Failed):
                answer = await peer.hear_any()
            if isinstance(answer, Reply):
                valid += 1
                assert answer.value["removed"] == [], cut
        assert valid == 3, "these cuts are configurations"
        await stream.end()
        status = (await peer.ask(StatusQuery(id=RequestId("s")), Reply)).value
        rows = {row["name"]: (row["state"], row["generation"]) for row in status["models"]}
        assert (rows["n"], rows["a"]) == (("READY", 1), ("READY", 1))

    assert play(body, models) == 0


def test_a_file_that_never_comes_to_rest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "SETTLE_S", 0.01)
    texts = iter(range(1000))

    def growing(path: Path) -> Any:
        with path.open("a") as file:
            file.write(f"# {next(texts)}\n")
        return read_text(path)

    async def body(stage: Stage) -> None:
        await stage.ready("n")
        await stage.ready("a")
        stage.write_config({"a": fake()})
        monkeypatch.setattr(f"{app_module.__name__}.read_text", growing)
        problem = await refused_reload(stage.peer())
        assert problem.endswith("is still being written; try again once it is complete")

    assert play(body, {"n": fake(), "a": fake()}) == 0
