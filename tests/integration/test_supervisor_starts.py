"""How a daemon starts, in this process: refusals, leftovers, and what cannot be looked at."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Deltas, Ping, Reply
from mlxsup.protocol.ids import Generation, ModelName, RequestId
from mlxsup.supervisor import app as app_module
from mlxsup.supervisor import runtime_folder as runtime_module
from mlxsup.supervisor.config.load import load_config
from mlxsup.supervisor.core.actions import LookAtWorker
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.daemon import run_daemon
from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.process_identity import process_identity
from mlxsup.supervisor.runtime_folder import (
    AlreadyRunningError,
    RuntimeFolderError,
)
from mlxsup.supervisor.workers import leftovers as leftovers_module
from mlxsup.supervisor.workers import registry as registry_module
from mlxsup.supervisor.workers.leftovers import WorkerRecord

from support.daemon import fake
from support.played_daemon import (
    Stage,
    generate,
    play,
    restored_process,
    short_folder,
    token,
    write_config,
)

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


def test_a_second_start_is_refused_and_the_first_serves_on_P19() -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        with pytest.raises(AlreadyRunningError) as raised:
            await asyncio.to_thread(runtime_module.RuntimeFolder.claim, stage.folder / "run")
        assert raised.value.pid == os.getpid()
        assert raised.value.exit_code == 75
        peer = stage.peer()
        await peer.say(generate())
        await worker.step(token(await worker.accept(), 1, is_last=True))
        assert len((await peer.hear(Deltas)).deltas) == 1

    assert play(body) == 0


def test_folders_that_cannot_be_used_are_refused_by_name() -> None:
    with short_folder() as folder:
        (folder / "file").write_text("")
        with pytest.raises(RuntimeFolderError) as caught:
            start(folder, log_dir=f"{folder}/file/logs")
        said = f"the log folder {folder}/file/logs cannot be created: Not a directory"
        assert (str(caught.value), caught.value.hint) == (
            said,
            "set log_dir to a folder that you can write to",
        )
        (folder / "run" / "client.sock").mkdir()
        with pytest.raises(RuntimeFolderError, match=r"client.sock is in the way"):
            start(folder)
        (folder / "run" / "client.sock").rmdir()
        # Each refusal has given the folder back.
        runtime_module.RuntimeFolder.claim(folder / "run").release()


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
        else f"mlxsup: process {left.pid} of old, left by an earlier daemon, cannot be ended:"
        " SIGKILL has no effect on it\n"
    )


def test_leftovers_that_cannot_be_looked_for_stop_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_silent_worker_that_cannot_be_looked_at_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(pid: int) -> bool:
        raise OSError(24, "Too many open files")

    handle = Core.handle

    def curious(self: Core, event: Any) -> Any:
        look = LookAtWorker(model=ModelName("a"), generation=Generation(1))
        is_ping = isinstance(getattr(event, "message", None), Ping)
        return [*([look] if is_ping else []), *handle(self, event)]

    async def body(stage: Stage) -> None:
        await stage.ready()
        assert (await stage.peer().ask(Ping(id=RequestId("p")), Reply)).id == "p"
        await stage.logged('WARNING worker inspection failed model=a error="Too many open files"\n')

    monkeypatch.setattr(registry_module, "is_process_stopped", fail)
    monkeypatch.setattr(Core, "handle", curious)
    assert play(body) == 0


def test_a_log_folder_is_made_with_all_above_it_for_its_user_alone() -> None:
    async def body(stage: Stage) -> None:
        await stage.ready()

    with short_folder() as folder:
        logs = folder / "made" / "logs"
        assert play(body, folder=folder, supervisor={"log_dir": str(logs)}) == 0
        assert logs.stat().st_mode & 0o777 == 0o700
        assert "INFO daemon ended code=0\n" in (logs / "mlxsup.log").read_text()


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
    said = f"mlxsup: the log folder {folder}/logs accepts no data; lines are lost\n"
    assert (capfd.readouterr().err, limits_s) == (said, [2.0])
