"""Workers' processes: how an exit is seen, who is left over, and which files they have loaded."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxsup.protocol.launch import LaunchSettings, child_environment
from mlxsup.supervisor import daemon, file_threads, process_identity
from mlxsup.supervisor.file_threads import FileLooks, FileThreads
from mlxsup.supervisor.memory.folder import stamp
from mlxsup.supervisor.process_identity import process_identity as identity_of
from mlxsup.supervisor.sockets.peer import credentials_of
from mlxsup.supervisor.workers import orphans
from mlxsup.supervisor.workers.orphans import Orphan, WorkerRecord
from mlxsup.supervisor.workers.process import watch_exit

from support.eventually import eventually
from support.eventually_async import eventually_async


class Child:
    """A process that ends on request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"])

    def end(self) -> None:
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    with child.process:
        yield child
        child.process.kill()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(limited())


def threads_of(child: Child) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == f"exit-of-{child.process.pid}"]


def test_a_watch_that_was_stopped_is_silent_and_leaves_no_file_open(child: Child) -> None:
    async def body() -> None:
        seen: list[str] = []
        before = len(os.listdir("/dev/fd"))
        stop = watch_exit(child.process.pid, lambda: seen.append("stopped"))
        stop()
        assert len(os.listdir("/dev/fd")) == before
        watch_exit(child.process.pid, lambda: seen.append("watched"))
        child.end()
        await eventually_async(lambda: seen and not threads_of(child))
        await asyncio.sleep(0)  # what the threads asked of the loop
        assert seen == ["watched"]
        assert len(os.listdir("/dev/fd")) == before

    run(body)


def test_a_thread_that_waits_holds_up_no_end_of_the_process(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    async def body() -> None:
        watch_exit(child.process.pid, lambda: None)

    run(body)
    [thread] = threads_of(child)
    assert thread.daemon
    child.end()
    thread.join(60.0)
    assert (thread.is_alive(), raised) == (False, []), "the loop was closed meanwhile"


# ---------------------------------------------------------------- macOS


def test_a_process_without_a_free_thread_is_not_watched_and_says_so(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def body() -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="can't start new thread"):
            watch_exit(child.process.pid, print)

    run(body)


class Queue:
    """A kqueue that writes down what is asked of it."""

    def __init__(self, error: OSError | None) -> None:
        self.asked: list[object] = []
        self.has_exited = threading.Event()
        self._error = error

    def control(self, changes: list[object] | None, most: int) -> None:
        self.asked += [changes, most]
        if self._error is not None:
            raise self._error
        if most:
            assert self.has_exited.wait(60.0)

    def close(self) -> None:
        self.asked.append("closed")


def on_macos(monkeypatch: pytest.MonkeyPatch, error: OSError | None = None) -> Queue:
    """Return the queue that will be used, as on macOS."""
    queue = Queue(error)
    names = {"KQ_FILTER_PROC": -5, "KQ_EV_ADD": 1, "KQ_EV_ONESHOT": 16, "KQ_NOTE_EXIT": 2**31}
    for name, value in names.items():
        monkeypatch.setattr(select, name, value, raising=False)
    monkeypatch.setattr(select, "kqueue", lambda: queue, raising=False)
    monkeypatch.setattr(select, "kevent", lambda *a, **k: (*a, k), raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    return queue


CHANGE = (77, {"filter": -5, "flags": 17, "fflags": 2**31})


def test_macos_is_asked_once_for_the_exit_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = on_macos(monkeypatch)
    seen: list[str] = []

    async def body() -> None:
        watch_exit(77, lambda: seen.append("watched"))
        assert queue.asked[:2] == [[CHANGE], 0], "before any thread runs"
        assert seen == []
        queue.has_exited.set()
        await eventually_async(lambda: seen == ["watched"])

    run(body)
    assert queue.asked == [[CHANGE], 0, None, 1, "closed"]


def test_macos_knows_no_process_that_waits_to_be_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = on_macos(monkeypatch, ProcessLookupError(3, "No such process"))
    seen: list[str] = []

    async def body() -> None:
        watch_exit(77, lambda: seen.append("watched"))
        watch_exit(77, lambda: seen.append("stopped"))()
        assert seen == [], "the caller comes first"
        await eventually_async(lambda: seen == ["watched"])

    run(body)
    assert queue.asked == [[CHANGE], 0, "closed"] * 2


def test_macos_without_a_free_file_watches_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = on_macos(monkeypatch, OSError(24, "Too many open files"))

    async def body() -> None:
        with pytest.raises(OSError, match="Too many open files"):
            watch_exit(77, print)

    run(body)
    assert queue.asked[-1] == "closed"


def test_macos_names_the_process_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    # SOL_LOCAL; LOCAL_PEERPID, and LOCAL_PEERCRED with version, uid and the groups
    said: dict[Any, Any] = {(0, 2): 77, (0, 1, 128): struct.pack("2I68x", 0, 501)}
    connection: Any = SimpleNamespace(getsockopt=lambda *option: said[option])
    assert credentials_of(connection) == (77, 501)
    said[0, 2] = 0
    assert credentials_of(connection) == (None, 501)


@pytest.fixture
def group() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], process_group=0) as process:
        yield process
        process.kill()


def test_the_record_holds_each_live_worker_and_is_replaced_whole(
    tmp_path: Path, group: subprocess.Popen[bytes]
) -> None:
    record = WorkerRecord(tmp_path)
    place = tmp_path / "workers.json"
    record.add("gone", 2**22 - 1)
    record.remove(group.pid)
    assert list(tmp_path.iterdir()) == []
    record.add("m", group.pid)
    mine = {"model": "m", "pid": group.pid, "identity": identity_of(group.pid)}
    assert json.loads(place.read_text()) == [mine]
    record.add("own", os.getpid())
    own = {"model": "own", "pid": os.getpid(), "identity": identity_of(os.getpid())}
    assert json.loads(place.read_text()) == [mine, own]
    record.remove(group.pid)
    assert json.loads(place.read_text()) == [own]
    assert list(tmp_path.iterdir()) == [place]


def test_write_again_writes_a_record_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = WorkerRecord(tmp_path / "run")
    assert record.write_again() is True
    assert not (tmp_path / "run").exists()
    with pytest.raises(FileNotFoundError):
        record.add("own", os.getpid())
    assert record.write_again() is False
    (tmp_path / "run").mkdir()
    assert record.write_again() is True
    (entry,) = json.loads((tmp_path / "run" / "workers.json").read_text())
    assert entry["model"] == "own"
    (tmp_path / "run" / "workers.json").unlink()
    assert record.write_again() is True
    assert (tmp_path / "run" / "workers.json").exists(), "the folder was removed and made again"


def test_a_leftover_that_does_not_go_is_named_and_looked_for_again_E6(
    tmp_path: Path, group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    WorkerRecord(tmp_path).add("m", group.pid)
    before = (tmp_path / "workers.json").read_text()
    limits: list[float] = []

    def wait_in_vain(processes: list[psutil.Process], timeout: float) -> Any:
        limits.append(timeout)
        return [], processes

    monkeypatch.setattr(psutil, "wait_procs", wait_in_vain)
    monkeypatch.setattr(orphans, "kill_group", lambda pid: None)
    record = WorkerRecord(tmp_path)
    assert record.sweep() == [Orphan(model="m", pid=group.pid, is_gone=False)]
    assert limits == [10.0]
    assert (tmp_path / "workers.json").read_text() == before
    record.remove(group.pid)
    assert (tmp_path / "workers.json").read_text() == "[]"


def test_sweep_skips_processes_that_are_gone_E6(
    tmp_path: Path, group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"identity": "same", "pid": 2, "model": "a"}
    wrong: list[object] = [
        3,
        {**entry, "pid": 1},
        {**entry, "pid": 0},
        {**entry, "pid": "2"},
        {**entry, "identity": None},
        {**entry, "model": 4},
        {"pid": 2},
    ]
    gone = [{**entry, "pid": pid} for pid in (2, 3)]
    other = {**entry, "pid": 4}
    last = {**entry, "model": "z", "pid": group.pid}
    (tmp_path / "workers.json").write_text(json.dumps([*wrong, *gone, other, last]))
    asked: list[int] = []

    def identity(pid: int) -> str:
        asked.append(pid)
        return "another" if pid == 4 else "same"

    def process(pid: int) -> psutil.Process:
        if pid == 2:
            raise psutil.NoSuchProcess(pid)
        return psutil_process(pid if pid == group.pid else os.getpid())

    def kill(pid: int) -> None:
        if pid == 3:
            raise ProcessLookupError
        assert pid == group.pid
        kill_group(pid)

    psutil_process, kill_group = psutil.Process, orphans.kill_group
    monkeypatch.setattr(orphans, "process_identity", identity)
    monkeypatch.setattr(psutil, "Process", process)
    monkeypatch.setattr(orphans, "kill_group", kill)
    swept = WorkerRecord(tmp_path).sweep()
    assert swept == [Orphan(model="z", pid=group.pid, is_gone=True)]
    assert asked == [2, 3, 4, group.pid]


@pytest.mark.parametrize(
    "text", ["", "{ half", "3", '{"model": "m"}', "[]", "[" * 100_000], ids=lambda text: text[:14]
)
def test_a_record_that_cannot_be_read_is_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "workers.json").write_text(text)
    assert WorkerRecord(tmp_path).sweep() == []
    assert (tmp_path / "workers.json").read_text() == "[]"


def test_a_group_is_killed_by_its_leader_and_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[str, int, int]] = []
    monkeypatch.setattr(os, "getpgid", lambda pid: 50)
    monkeypatch.setattr(os, "killpg", lambda pid, number: killed.append(("group", pid, number)))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(("one", pid, number)))
    orphans.kill_group(50)
    orphans.kill_group(51)
    assert killed == [("group", 50, signal.SIGKILL), ("one", 51, signal.SIGKILL)]


# ---------------------------------------------------------------- what the system says


STAT = (
    "{pid} (a) b) (c) {state} " + " ".join(str(n) for n in range(1, 17)) + " {threads} 18 {start}"
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_identity_is_the_pid_the_boot_and_the_start_in_ticks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: dict[str, str] = {}

    class Proc:
        def __init__(self, path: str) -> None:
            self._path = path

        def read_text(self) -> str:
            if self._path not in texts:
                raise FileNotFoundError(self._path)
            return texts[self._path]

        def read_bytes(self) -> bytes:
            return self.read_text().encode()

    monkeypatch.setattr(process_identity, "Path", Proc)
    texts["/proc/sys/kernel/random/boot_id"] = "boot-7\n"
    identities = {}
    for state, threads in (("S", 1), ("S", 2), ("Z", 1), ("Z", 0), ("X", 1), ("Z", 2)):
        texts["/proc/42/stat"] = STAT.format(pid=42, state=state, threads=threads, start=99)
        identities[state, threads] = identity_of(42)
    assert identities == {
        ("S", 1): "42@boot-7+99",
        ("S", 2): "42@boot-7+99",
        ("Z", 1): None,
        ("Z", 0): None,
        ("X", 1): None,
        ("Z", 2): "42@boot-7+99",
    }
    texts["/proc/42/stat"] = texts["/proc/42/stat"].rpartition(" ")[0]
    assert identity_of(42) is None
    assert identity_of(43) is None


def test_elsewhere_an_identity_is_the_pid_and_the_start(
    monkeypatch: pytest.MonkeyPatch, group: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    start = psutil.Process(group.pid).create_time()
    assert identity_of(group.pid) == f"{group.pid}@{start:.6f}"
    group.kill()
    os.waitid(os.P_PID, group.pid, os.WEXITED | os.WNOWAIT)
    assert identity_of(group.pid) is None, "a zombie is none"
    group.wait()
    assert identity_of(group.pid) is None


@pytest.mark.parametrize(("platform", "expected"), [("linux", [(-3, 256 * 1024)]), ("darwin", [])])
def test_large_blocks_are_given_back_by_glibc(
    platform: str, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, option: int, value: int) -> None:
            asked.append((option, value))

    def load(name: str | None) -> object:
        assert name is None
        return library

    library: object = Library()
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(sys, "platform", platform)
    daemon.return_large_blocks()
    assert asked == expected
    library = object()  # another C library
    daemon.return_large_blocks()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model-1.safetensors", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text(name)
    return tmp_path


def launch(folder: Path, engine: str = "mlx") -> LaunchSettings:
    return LaunchSettings(path=str(folder), engine=engine)


def look(folder: Path, change: Callable[[Path], object], engine: str = "mlx") -> str:
    """What is found if the folder changes after the load."""

    async def run() -> str:
        looks = FileLooks()
        loaded = await looks.before_load(launch(folder, engine))
        change(folder)
        return await looks.change(launch(folder, engine), loaded)

    return asyncio.run(run())


def rewrite(folder: Path) -> None:
    """The same size, at another time."""
    path = folder / "model-1.safetensors"
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda f: (f / "config.json").write_text("longer than before"),
         "config.json has changed since it was loaded"),
        (rewrite, "model-1.safetensors has changed since it was loaded"),
        (lambda f: (f / "tokenizer.json").unlink(),
         "tokenizer.json was removed since it was loaded"),
        (lambda f: (f / "added_tokens.json").touch(),
         "added_tokens.json was added since it was loaded"),
        (lambda f: f.rename(f.parent / "elsewhere"),
         "its folder cannot be read (No such file or directory)"),
        # Answers do not depend on these.
        (lambda f: (f / "README.md").write_text("more"), ""),
        (lambda f: (f / "notes").mkdir(), ""),
    ],
)  # fmt: skip
def test_the_first_file_that_has_changed_is_named(
    folder: Path, change: Callable[[Path], object], found: str
) -> None:
    assert look(folder, change) == found


def test_the_fake_engine_loads_no_files(folder: Path) -> None:
    assert look(folder, rewrite, engine="fake") == ""
    assert asyncio.run(FileLooks().before_load(launch(folder, "fake"))) is None


def test_a_folder_that_could_not_be_read_before_the_load_counts_as_changed(folder: Path) -> None:
    missing = folder / "missing"
    found = look(missing, lambda missing: missing.mkdir())
    assert found == "its folder could not be read when it was loaded"


def test_a_silent_disk_times_out_and_has_one_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ended = threading.Event(), list[bool]()

    def hang(path: Path, adapters: object) -> object:
        assert threading.current_thread().daemon, "it holds up no end of the process"
        ended.append(answers.wait(60.0))
        return {}

    async def run() -> tuple[str, object]:
        looks = FileLooks(limit_s=0.05)
        monkeypatch.setattr(file_threads, "stamp", hang)
        with pytest.raises(TimeoutError):
            await looks.before_load(launch(folder))
        said = await looks.change(launch(folder), {})
        monkeypatch.setattr(file_threads, "stamp", stamp)
        patient = FileLooks()
        other = await patient.before_load(launch(folder))
        answers.set()
        return said, other

    said, other = asyncio.run(run())
    assert said == "its folder could not be read within 0.05 s"
    assert other == stamp(folder), "others do not wait"
    eventually(lambda: bool(ended))
    assert ended == [True], "the second look has waited for the first one's thread"


def test_file_threads_raise_where_they_are_awaited() -> None:
    def fail() -> None:
        raise PermissionError(13, "no")

    async def run() -> None:
        threads = FileThreads()
        for _ in range(2):
            with pytest.raises(PermissionError):
                await threads.run(Path("/x"), fail, limit_s=60.0)

    asyncio.run(run())


def test_a_thread_that_cannot_be_started_keeps_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> str:
        threads = FileThreads()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(BlockingIOError, match="can't start new thread"):
                await threads.run(Path("/x"), str, limit_s=60.0)
        return await threads.run(Path("/x"), lambda: "read", limit_s=60.0)

    assert asyncio.run(run()) == "read"


def test_children_inherit_settings_of_libraries_and_no_secret() -> None:
    kept = dict.fromkeys(("HF_HOME", "LC_ALL", "TOKENIZERS_PARALLELISM", "CUDA_HOME"), "x")
    secrets = {"HF_TOKEN": "x", "OPENAI_API_KEY": "x", "HF_ENDPOINT": "https://u:pw@mirror.example"}
    assert child_environment(kept | secrets) == kept
