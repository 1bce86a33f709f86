"""How a daemon starts, reloads and ends, in this process: refusals, leftovers, signals, bugs."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import signal
import socket as sockets
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.protocol.client_messages import (
    Alive,
    Failed,
    Load,
    Ping,
    Reload,
    Reply,
    Unload,
)
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.flight import MODELS_FILE_NAME, DaemonEnded, read_line
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.worker_messages import Exit
from mlxsup.supervisor import app as app_module
from mlxsup.supervisor import daemon as daemon_module
from mlxsup.supervisor import runtime_folder as runtime_module
from mlxsup.supervisor import signals as signals_module
from mlxsup.supervisor import sleep as sleep_module
from mlxsup.supervisor.announcements import Announcer
from mlxsup.supervisor.config.load import DaemonConfig, load_config, read_config
from mlxsup.supervisor.core import life as life_module
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.daemon import run_daemon
from mlxsup.supervisor.downloads import DownloadKeeper
from mlxsup.supervisor.gateway import GatewayKeeper
from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.memory.snapshot import ConfigSnapshot, MemorySnapshot
from mlxsup.supervisor.process_identity import process_identity
from mlxsup.supervisor.runtime_folder import (
    FILES_PER_MODEL,
    RESERVED_FILES,
    RuntimeFolderError,
)
from mlxsup.supervisor.sockets.clients import Clients
from mlxsup.supervisor.workers import orphans as leftovers_module
from mlxsup.supervisor.workers.orphans import WorkerRecord, live_workers
from mlxsup.supervisor.workers.prewarmed import PrewarmedUnits

from support.cli.notify_socket import NotifySocket
from support.daemon import played_daemon
from support.daemon.daemon import fake
from support.daemon.played_daemon import (
    ENDING,
    Stage,
    generate,
    play,
    restored_process,
    short_folder,
    write_config,
)
from support.eventually_async import eventually_async

LAZY = fake(preload=False)


def is_alive(pid: int) -> bool:
    return process_identity(pid) is not None


def start(folder: Path, models: dict[str, dict[str, Any]] | None = None, **top: Any) -> int:
    """Runs a daemon that is not expected to serve."""
    path = write_config(folder, models or {"a": LAZY}, top)

    def listening(endpoint: str) -> None:
        raise AssertionError("it serves")

    with restored_process():
        return run_daemon(load_config(path), on_change=print, on_listening=listening)


@pytest.mark.parametrize("is_killed", [True, False])
def test_leftovers_of_an_earlier_daemon_are_ended_and_named_E6(
    is_killed: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if not is_killed:
        monkeypatch.setattr(leftovers_module, "kill_group", lambda pid: None)
        monkeypatch.setattr(leftovers_module, "KILL_LIMIT_S", 0.01)

    async def body(stage: Stage) -> None:
        end = "ERROR leftover worker cannot be ended"
        end = "WARNING leftover worker killed" if is_killed else end
        await stage.logged(f"{end} model=old pid={left.pid}")
        assert is_alive(left.pid) is not is_killed

    with short_folder() as folder, subprocess.Popen(["sleep", "600"], process_group=0) as left:
        (folder / "run").mkdir(mode=0o700)
        entry = {"model": "old", "pid": left.pid, "identity": process_identity(left.pid)}
        (folder / "run" / "workers.json").write_text(json.dumps([entry]))
        try:
            assert play(body, {"a": LAZY}, folder=folder) == 0
        finally:
            left.kill()
        written = json.loads((folder / "run" / "workers.json").read_bytes())
    assert written == ([] if is_killed else [entry])
    said = capfd.readouterr().err
    assert said == (
        ""
        if is_killed
        else f"mlxsup: SIGKILL has no effect on process {left.pid} of old, which an earlier daemon"
        " left behind\n"
    )


def test_a_failed_scan_for_leftovers_stops_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: WorkerRecord) -> None:
        raise OSError(28, "No space left on device")

    async def body(stage: Stage) -> None:
        await stage.logged('WARNING leftover scan failed error="No space left on device"\n')
        await stage.ready()

    monkeypatch.setattr(WorkerRecord, "sweep", fail)
    assert play(body) == 0


def test_a_socket_that_cannot_listen_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(app_module, "Clients", fail)
    with short_folder() as folder:
        with pytest.raises(RuntimeFolderError) as caught:
            start(folder)
        reason = os.strerror(errno.EOPNOTSUPP)
        assert str(caught.value) == f"cannot listen at {folder}/run/client.sock: {reason}"
        assert (caught.value.hint, caught.value.exit_code) == ("set another runtime_dir", 73)


@pytest.mark.parametrize("turns", range(12))
def test_a_signal_in_any_turn_around_the_end_of_reading_folders_ends_the_daemon_P12(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MemorySnapshot.read

    async def read_then_signal(self: MemorySnapshot, config: DaemonConfig) -> ConfigSnapshot:
        result = await read(self, config)
        loop = asyncio.get_running_loop()

        def wait(left: int) -> None:
            if left:
                loop.call_soon(wait, left - 1)
            else:
                os.kill(os.getpid(), signal.SIGTERM)

        wait(turns)
        return result

    monkeypatch.setattr(MemorySnapshot, "read", read_then_signal)
    with short_folder() as folder:
        path = write_config(folder, {"a": fake()}, {})
        with restored_process():
            assert run_daemon(load_config(path), on_change=print, on_listening=print) == 0
        assert live_workers(folder / "run") == []


def test_lines_that_a_log_folder_does_not_take_are_reported_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    close, limits_s = LogWriter.close, []

    def late(self: LogWriter, limit_s: float) -> bool:
        limits_s.append(limit_s)
        close(self, 60.0)
        return False

    async def body(stage: Stage) -> None:
        await stage.ready()

    monkeypatch.setattr(LogWriter, "close", late)
    with short_folder() as folder:
        assert play(body, folder=folder) == 0
    said = f"mlxsup: cannot write to the log folder {folder}/logs, so log lines are lost\n"
    assert (capfd.readouterr().err, limits_s) == (said, [2.0])


LITTLE = {"memory_budget": "1GiB"}
"""So little that it need not be lowered, which is warned of, when the machine is busy."""
WATCHED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def warnings_of(folder: Path) -> list[str]:
    """The warnings that a daemon logs which serves in this folder, without their times."""

    async def body(stage: Stage) -> None:
        assert (await stage.peer().ask(Ping(id=RequestId("p")), Reply)).id == "p"

    assert play(body, {"a": LAZY}, folder=folder, supervisor=LITTLE) == 0
    lines = (folder / "logs" / "mlxsup.log").read_text().splitlines()
    return [line.split(" ", 1)[1] for line in lines if " WARNING " in line]


def test_a_watchdog_that_is_fed_is_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_folder() as folder, NotifySocket(folder) as played:
        for name, value in played.variables(watchdog_s=60.0).items():
            monkeypatch.setenv(name, value)
        assert warnings_of(folder) == []
        assert not set(WATCHED) & set(os.environ), "its workers are not to speak for it"


def test_a_place_of_the_logs_that_cannot_be_noted_stops_no_start() -> None:
    with short_folder() as folder:
        (folder / "run" / "log_dir.new").mkdir(parents=True)
        (folder / "run").chmod(0o700)
        assert warnings_of(folder) == ['WARNING log folder not recorded error="Is a directory"']


def test_the_recorder_notes_that_the_daemon_has_ended_and_was_not_killed() -> None:
    async def body(stage: Stage) -> None:
        await stage.ready()

    with short_folder() as folder:
        code = play(body, folder=folder)
        [recorded] = folder.rglob(MODELS_FILE_NAME)
        last = read_line(recorded.read_text().splitlines()[-1])
    assert last.entry == DaemonEnded(code=code)


def test_the_machine_may_sleep_when_the_daemon_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["/bin/sh", "-c", "exec sleep 600"]
    monkeypatch.setattr(sleep_module, "awake_argv", lambda *_: argv)
    monkeypatch.setattr(app_module, "PULSE_S", 0.01)

    def awake() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [one for one in children if one.cmdline() == ["sleep", "600"]]

    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        await stage.peer().say(generate())
        await worker.accept()
        await eventually_async(awake)

    assert play(body, supervisor={"prevent_sleep": "busy"}, exit_grace_s=0.05) == 0
    assert awake() == []


def list_sockets(folder: Path, name: str) -> list[str]:
    return [path.name for path in (folder / "run").glob(f"{name}.sock*")]


def open_logs(folder: Path) -> set[str]:
    """The log files below a folder that this process has open, without the flight recorder's."""
    paths = [Path(file.path) for file in psutil.Process().open_files()]
    return {path.name for path in paths if path.parent == folder / "logs" and path.suffix == ".log"}


async def reload(stage: Stage, *, dry_run: bool = False) -> Any:
    """The answer to a reload."""
    peer = stage.peer()
    await peer.say(Reload(id=RequestId("reload"), dry_run=dry_run))
    while isinstance(message := await peer.hear_any(), Alive):
        pass  # the file must read the same a second later
    if isinstance(message, Reply):
        return message.value
    assert isinstance(message, Failed)
    return message.error.message


# ---------------------------------------------------------------- reloads


def test_a_reload_adds_models_and_names_keys_for_the_next_start() -> None:
    async def body(stage: Stage) -> None:
        stage.write_config({"a": LAZY, "b": LAZY}, {"log_format": "json", "max_queue": 7})
        answer = await reload(stage)
        assert (answer["added"], answer["removed"], answer["later"]) == (["b"], [], ["log_format"])
        await stage.logged("INFO configuration reloaded later=log_format\n")
        # Once more: what waits for the next start still does.
        assert (await reload(stage))["later"] == ["log_format"]
        folders = {"runtime_dir": f"{stage.folder}/r", "log_dir": f"{stage.folder}/l"}
        stage.write_config({"a": LAZY, "b": LAZY}, folders)
        assert (await reload(stage))["later"] == ["runtime_dir", "log_dir"]
        await stage.logged("INFO configuration reloaded later=runtime_dir,log_dir\n")
        stage.write_config({"a": LAZY, "b": LAZY})
        await reload(stage)
        await stage.logged("INFO configuration reloaded later=-\n")

    assert play(body, {"a": LAZY}) == 0


def test_a_reload_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_file(path: Path) -> DaemonConfig:
        return replace(read_config(path), config_path=None)

    async def body(stage: Stage) -> None:
        assert "the daemon was started without a configuration file" in await reload(stage)
        await stage.logged("ERROR reload refused problems=1\n")

    monkeypatch.setattr(played_daemon, "read_config", without_file)
    assert play(body, {"a": LAZY}) == 0


def test_a_dry_run_of_a_wrong_file_is_no_refused_reload() -> None:
    async def body(stage: Stage) -> None:
        stage.write_config({"a": {**LAZY, "colour": 1}})
        assert "colour" in await reload(stage, dry_run=True)
        stage.write_config({"a": {**LAZY, "colour": 1, "taste": 2}})
        assert "taste" in await reload(stage)
        await stage.logged("ERROR reload refused problems=2\n")
        assert stage.log().count("reload refused") == 1

    assert play(body, {"a": LAZY}) == 0


def test_a_reload_changes_how_many_connections_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "room_for", lambda models, files, connected: connected)

    async def body(stage: Stage) -> None:
        before = stage.peer()
        await before.ask(Reload(id=RequestId("r")), Reply)
        refused = await stage.peer().ask(Ping(id=RequestId("p")), Failed)
        assert refused.error.code is ErrorCode.OVERLOADED
        await before.ask(Ping(id=RequestId("p")), Reply)

    assert play(body, {"a": LAZY}) == 0


def test_the_log_of_a_model_that_was_removed_is_closed_and_all_are_at_the_end() -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        await eventually_async(lambda: open_logs(stage.folder) == {"mlxsup.log", "a.log"})
        stage.write_config({"b": LAZY})
        assert (await reload(stage))["removed"] == ["a"]
        await worker.hear(Exit)
        worker.die(signal.SIGTERM)
        await eventually_async(lambda: open_logs(stage.folder) == {"mlxsup.log"})
        await stage.peer().say(Load(id=RequestId("l"), model=ModelName("b")))
        await stage.worker("b")
        await eventually_async(lambda: open_logs(stage.folder) == {"mlxsup.log", "b.log"})

    with short_folder() as folder:
        assert play(body, folder=folder) == 0
        assert open_logs(folder) == set()


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nine models and 156 connections have files."""
    with_nine = RESERVED_FILES + 9 * FILES_PER_MODEL + 156
    monkeypatch.setattr(runtime_module, "raise_open_file_limit", lambda models: with_nine)
    monkeypatch.setattr(daemon_module, "raise_open_file_limit", lambda models: with_nine)


@pytest.mark.usefixtures("few_files")
def test_a_removed_model_that_still_runs_takes_files_P24() -> None:
    async def body(stage: Stage) -> None:
        await stage.ready()
        stage.write_config({f"m{n}": LAZY for n in range(10)})
        assert "models: 11 are too many" in await reload(stage)

    assert play(body) == 0


@pytest.mark.usefixtures("few_files")
def test_more_models_leave_fewer_files_to_connections_P24() -> None:
    """128 connections are the least; of 156, the last 64 are for processes that have none."""

    async def body(stage: Stage) -> None:
        names = [f"m{n}" for n in range(8)]
        stage.write_config({"a": LAZY} | dict.fromkeys(names, LAZY))
        assert (await reload(stage, dry_run=True))["added"] == names
        silent = []
        for _ in range(91):
            silent.append(sockets.socket(sockets.AF_UNIX))
            silent[-1].setblocking(False)
            silent[-1].connect(stage.endpoint.removeprefix("ipc://"))
        await stage.peer().ask(Ping(id=RequestId("p")), Reply)
        assert (await reload(stage))["added"] == names
        refused = await stage.peer().ask(Ping(id=RequestId("p")), Failed)
        assert refused.error.code == "overloaded"
        assert "which is the limit" in refused.error.message
        for socket in silent:
            socket.close()
        # As soon as their ends are seen.
        while isinstance(await stage.peer().ask(Ping(id=RequestId("p")), Message), Failed):
            pass
        stage.write_config({"a": LAZY} | {f"m{n}": LAZY for n in range(11)})
        assert "models: 12 are too many" in await reload(stage)

    assert play(body, {"a": LAZY}) == 0


def test_a_worker_that_ignores_sigterm_is_killed_at_the_end_E5() -> None:
    async def body(stage: Stage) -> None:
        pids.append((await stage.ready()).pid)

    pids: list[int] = []
    with short_folder() as folder:
        deaf = 'trap "" TERM; exec cat > /dev/null'
        assert play(body, folder=folder, process=deaf, exit_grace_s=0.05) == 0
        lines = (folder / "logs" / "mlxsup.log").read_text().splitlines()
    assert not is_alive(pids[0])
    said = [line.split(" ", 1)[1] for line in lines]
    assert [line for line in said if "signal" in line or "ended" in line] == [
        *["INFO signal received signal=SIGTERM"] * 2,
        "INFO worker signalled model=a signal=SIGTERM",
        "INFO worker signalled model=a signal=SIGKILL",
        f"INFO worker exited model=a generation=1 pid={pids[0]} signal=SIGKILL",
        "INFO daemon ended code=0",
    ]


def test_a_process_that_cannot_be_ended_is_left_and_named_P26(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(life_module, "KILL_LIMIT_S", 0.2)
    monkeypatch.setattr(os, "killpg", lambda group, number: None)

    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        pids.append(worker.pid)
        await stage.peer().say(Unload(id=RequestId("u"), model=ModelName("a")))
        await stage.until("a", "FAILED")
        assert not list_sockets(stage.folder, "w1")
        assert (await stage.peer().ask(Ping(id=RequestId("p")), Reply)).id == "p"

    pids: list[int] = []
    with short_folder() as folder:
        # It ignores the end of its input, too, as a process in the kernel does.
        code = play(body, folder=folder, process="exec sleep 600", exit_grace_s=0.05)
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)
        with warnings.catch_warnings():  # nobody has waited for it, which is what this is about
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        assert code == 71
        [entry] = json.loads((folder / "run" / "workers.json").read_bytes())
        assert entry["pid"] == pids[0], "the next start looks for it"
        log = (folder / "logs" / "mlxsup.log").read_text()
    assert capfd.readouterr().err.splitlines() == [
        f"mlxsup: SIGKILL has no effect on process {pids[0]} of a",
        f"mlxsup: the daemon ends, but SIGKILL has no effect on process {pids[0]} of a",
    ]
    assert f"ERROR worker cannot be ended model=a pid={pids[0]}\n" in log
    assert f"ERROR worker left behind model=a pid={pids[0]}\n" in log


@pytest.mark.parametrize(
    ("number", "is_there"), [(errno.ENXIO, False), (errno.EMFILE, True), (errno.ENFILE, True)]
)
def test_a_terminal_that_cannot_be_seen_without_a_free_file_is_not_gone(
    number: int, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        found = signals_module.has_terminal()
    assert found is is_there


def test_a_signal_while_the_last_lines_are_written_changes_nothing_P12(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[object] = []
    close = LogWriter.close

    def close_noted(self: LogWriter, limit_s: float) -> bool:
        found.extend(signal.getsignal(number) for number in ENDING)
        found.append(limit_s)
        return close(self, limit_s)

    monkeypatch.setattr(LogWriter, "close", close_noted)

    async def body(stage: Stage) -> None:
        await stage.ready()

    assert play(body) == 0
    assert found == [signal.SIG_IGN] * 3 + [2.0]


def test_a_daemon_that_ignores_hangups_outlives_its_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`nohup` has them ignored; once the terminal is gone, another hangup asks for a reload."""
    has_terminal = iter([True, False])
    monkeypatch.setattr(signals_module, "has_terminal", lambda: next(has_terminal))

    async def body(stage: Stage) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await stage.peer().ask(Ping(id=RequestId("p")), Reply)).id == "p"
        os.kill(os.getpid(), signal.SIGHUP)
        await stage.logged("INFO configuration reloaded")
        assert "SIGHUP" not in stage.log()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert play(body, {"a": LAZY}) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# ---------------------------------------------------------------- bugs, and readers that are gone


def test_a_bug_ends_the_daemon_in_order_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handle = Core.handle

    def broken(self: Core, event: Any) -> Any:
        if isinstance(getattr(event, "message", None), Ping):
            raise KeyError("a bug")
        return handle(self, event)

    monkeypatch.setattr(Core, "handle", broken)

    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        await stage.peer().say(Ping(id=RequestId("p")))
        await eventually_async(lambda: not is_alive(worker.pid))

    with short_folder() as folder:
        assert play(body, folder=folder) == 70
        log = (folder / "logs" / "mlxsup.log").read_text()
        assert json.loads((folder / "run" / "workers.json").read_bytes()) == []
    assert "ERROR internal error: the daemon ends error=KeyError" in log
    assert "  KeyError: 'a bug'" in log
    assert log.count("story of a:") == 1
    assert "INFO daemon ended code=70" in log
    assert (
        capfd.readouterr().err.count("the daemon ends because of an internal error; see mlxsup.log")
        == 1
    )


def test_what_the_loop_complains_of_is_logged_and_a_callback_that_fails_is_a_bug() -> None:
    def fail() -> None:
        raise ValueError("v")

    async def body(stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        loop.call_exception_handler({"message": "m"})
        loop.call_exception_handler({"message": "m", "exception": ValueError("no callback's")})
        await eventually_async(lambda: stage.log().count(" ERROR event loop complaint=m") == 2)
        assert (await stage.peer().ask(Ping(id=RequestId("p")), Reply)).id == "p"
        for _ in range(2):
            loop.call_soon(fail)

    with short_folder() as folder:
        assert play(body, {"a": LAZY}, folder=folder) == 70
        log = (folder / "logs" / "mlxsup.log").read_text()
    assert log.count("ERROR internal error: the daemon ends error=ValueError") == 1


def test_the_pulse_lasts_until_everything_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prewarmed workers, downloads and the gateway may take longer than a watchdog waits."""
    monkeypatch.setattr(app_module, "PULSE_S", 0.01)
    pulses: list[object] = []
    pulse = Announcer.pulse
    waited: list[str] = []

    def noted(self: Announcer, look: Any) -> None:
        pulses.append(self)
        pulse(self, look)

    def slow(name: str) -> Any:
        async def end(*_: object) -> None:
            before = len(pulses)
            await eventually_async(lambda: len(pulses) > before + 1)
            waited.append(name)

        return end

    monkeypatch.setattr(Announcer, "pulse", noted)
    for part in (PrewarmedUnits, DownloadKeeper, GatewayKeeper):
        monkeypatch.setattr(part, "end", slow(part.__name__))

    async def body(stage: Stage) -> None:
        assert waited == []

    assert play(body, {"a": LAZY}) == 0
    assert waited == ["PrewarmedUnits", "DownloadKeeper", "GatewayKeeper"]


@pytest.mark.parametrize(("is_broken", "limit_s"), [(False, 2.0), (True, 0.0)])
def test_clients_have_two_seconds_to_read_unless_there_was_a_bug(
    is_broken: bool, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, float]] = []
    finish = Clients.finish

    async def finish_noted(self: Clients, limit_s: float) -> None:
        given.append(("finish", limit_s))
        await finish(self, limit_s)

    monkeypatch.setattr(Clients, "finish", finish_noted)
    if is_broken:
        monkeypatch.setattr(Core, "handle", lambda core, event: [object()])

    async def body(stage: Stage) -> None:
        assert given == []

    assert play(body) == (70 if is_broken else 0)
    assert given == [("finish", limit_s)]


def test_a_refused_start_gives_the_runtime_folder_back() -> None:
    with short_folder() as folder:
        (folder / "file").write_text("")
        with pytest.raises(RuntimeFolderError) as caught:
            start(folder, log_dir=f"{folder}/file/logs")
        said = f"the log folder {folder}/file/logs cannot be created: Not a directory"
        assert (str(caught.value), caught.value.hint) == (
            said,
            "set log_dir to a writable folder",
        )
        (folder / "run" / "client.sock").mkdir()
        with pytest.raises(RuntimeFolderError, match=r"client.sock, which is in the way"):
            start(folder)
        (folder / "run" / "client.sock").rmdir()
        # Each refusal has given the folder back.
        runtime_module.RuntimeFolder.claim(folder / "run").close()
