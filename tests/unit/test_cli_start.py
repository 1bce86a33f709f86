"""What `start` prints around a played daemon, and which daemon commands look for."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from mlxsup import client
from mlxsup.cli import configuration
from mlxsup.cli.catalogue import entry_called
from mlxsup.cli.commands import run as run_command
from mlxsup.cli.commands import start
from mlxsup.cli.configuration import check_models, read_configuration
from mlxsup.cli.connection import (
    NEWCOMER_HINT,
    Target,
    explain_connection_lost,
    log_dir_left_by,
    models_in,
    status_of_daemon,
)
from mlxsup.cli.detach import MAX_OUTPUT_BYTES, OUTPUT_NAME, Started, held_interrupt, start_detached
from mlxsup.cli.exit_status import CliError, ExitStatus
from mlxsup.cli.foreground import MAX_WAITING, ChangePrinter
from mlxsup.cli.lock_holder import LockHolder, lock_holder
from mlxsup.cli.main import main
from mlxsup.cli.port import MAX_COLUMNS, NEXT_PORTS, free_address, holder_of
from mlxsup.cli.terminal.output import Output
from mlxsup.client import ConnectionLost
from mlxsup.protocol.folders import LOG_DIR_NAME
from mlxsup.protocol.gateway import Address
from mlxsup.supervisor.config.load import ConfigError
from mlxsup.supervisor.runtime_folder import AlreadyRunningError, RuntimeFolderError

CHANGE = {
    "at": 0.0, "model": "m", "from": "LOADING", "to": "READY", "generation": 1, "pid": 7,
    "note": "",
}  # fmt: skip
URL = "http://127.0.0.1:8484"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mlxsup.toml"
    path.write_text('[models.m]\nengine = "fake"\n')
    return path


def play(monkeypatch: pytest.MonkeyPatch, run_daemon: Callable[..., int]) -> None:
    module = ModuleType("mlxsup.supervisor.daemon")
    monkeypatch.setattr(module, "run_daemon", run_daemon, raising=False)
    monkeypatch.setitem(sys.modules, "mlxsup.supervisor.daemon", module)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


# ---------------------------------------------------------------- what start prints


def test_start_prints_the_endpoint_each_change_and_warnings_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    def run_daemon(configuration: Any, *, on_change: Any, on_listening: Any) -> int:
        assert [str(model.name) for model in configuration.models] == ["m"]
        on_listening("ipc:///run/client.sock")
        on_change({"gateway": URL, "pid": 7})
        on_change(CHANGE | {"to": "LOADING", "progress": 0.5})
        on_change(CHANGE | {"warnings": ["memory is short", "the context is unknown"]})
        on_change(CHANGE | {"from": "DRAINING", "warnings": []})
        return 0

    play(monkeypatch, run_daemon)
    assert run("start", "--config", str(config)) == 0
    out, err = capsys.readouterr()
    listening, gateway, page, *changes = out.splitlines()
    assert listening == f"listening at ipc:///run/client.sock (pid {os.getpid()})"
    assert (gateway, page) == (f"HTTP at {URL}/v1 (pid 7)", f"page with a chat at {URL}")
    assert [line.partition("Z ")[2] for line in changes] == [
        f"m: {before} → READY (generation 1, pid 7)" for before in ("LOADING", "DRAINING")
    ]
    assert err == "warning: m: memory is short\nwarning: m: the context is unknown\n"
    monkeypatch.setenv("MLXSUP_CONFIG", str(config))
    assert run("start", "--json") == 0
    out, err = capsys.readouterr()
    values = [json.loads(line) for line in out.splitlines()]
    assert (values[0]["endpoint"], values[1]["gateway"]) == ("ipc:///run/client.sock", URL)
    shown = [values[2][key] for key in ("to", "schema_version", "warnings")]
    assert (shown, err) == (["READY", 1, ["memory is short", "the context is unknown"]], "")


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (AlreadyRunningError(4711, Path("/run")), 75, "a daemon with pid 4711 is already running"),
        (
            RuntimeFolderError("the folder is not yours", hint="set another"),
            73,
            "the folder is not",
        ),
        (ZeroDivisionError("oh"), 1, "internal error: ZeroDivisionError: oh"),
        (RuntimeError("oh"), 1, "internal error: RuntimeError: oh"),
        (RuntimeError("can't start new thread"), 1, "no further thread can be started"),
        (MemoryError(), 1, "there is not enough memory for this command"),
    ],
)
def test_errors_of_start_have_their_exit_codes_and_no_traceback_P19(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    error: Exception,
    status: int,
    says: str,
) -> None:
    def run_daemon(*_: object, **__: object) -> int:
        raise error

    play(monkeypatch, run_daemon)
    assert run("start", "--config", str(config)) == status
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: {says}")
    assert hint.startswith("hint: ")
    monkeypatch.setenv("MLXSUP_TRACEBACK", "1")
    if status == ExitStatus.FAILED:
        with pytest.raises(type(error)):
            main(["start", "--config", str(config)])


@pytest.mark.parametrize("command", ["status", "start", "doctor", "init"])
def test_a_user_without_a_home_is_told_to_set_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """As in a container that runs as a number that no file of users has."""
    for name in ("HOME", "MLXSUP_CONFIG", "MLXSUP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    assert run(command) == ExitStatus.FAILED
    message, hint = capsys.readouterr().err.splitlines()
    assert "has no home folder" in message
    assert "set HOME" in hint


PROGRAMS = {
    "nginx": ["nginx", "-g", "daemon off;"],
    "the gateway of another mlxsup daemon": ["python3", "-P", "-m", "mlxsup.gateway"],
    "x" * (MAX_COLUMNS - 1) + "…": ["x" * 99],
    "a b": ["a\nb"],
}


@pytest.mark.parametrize(("said", "words"), PROGRAMS.items(), ids=range(len(PROGRAMS)))
def test_program_that_listens_is_named_in_one_short_line(
    monkeypatch: pytest.MonkeyPatch, said: str, words: list[str]
) -> None:
    def connection(pid: int | None, port: int, status: str = psutil.CONN_LISTEN) -> Mock:
        return Mock(pid=pid, laddr=Mock(port=port), status=status)

    there = [connection(1, 7), connection(2, 8, "ESTABLISHED"), connection(7, 8)]
    process = Mock(**{"name.return_value": words[0], "cmdline.return_value": words})
    monkeypatch.setattr(psutil, "net_connections", lambda _: there)
    monkeypatch.setattr(psutil, "Process", {7: process}.__getitem__)
    assert holder_of(Address(host="h", port=8)) == f" by {said} (pid 7)"
    there[2].pid = None
    assert holder_of(Address(host="h", port=8)) == ""


class StuckOutput(io.StringIO):
    """A pipe whose reader has stopped reading."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()

    def write(self, text: str) -> int:
        self.is_free.wait()
        return super().write(text)


def test_reader_who_stops_reading_does_not_hold_up_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck, errors = StuckOutput(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", stuck)
    monkeypatch.setattr(sys, "stderr", errors)
    printer = ChangePrinter(Output())
    printer.listening("ipc:///x")
    for _ in range(MAX_WAITING * 2):
        printer.changed(CHANGE)
    stuck.is_free.set()
    assert printer.close()
    skipped = re.findall(r"^(\d+) lines were skipped$", errors.getvalue(), re.MULTILINE)
    written = stuck.getvalue().splitlines()
    assert MAX_WAITING <= len(written) < MAX_WAITING * 2
    assert len(written) + sum(map(int, skipped)) == 1 + MAX_WAITING * 2, "each is counted once"


# ---------------------------------------------------------------- a daemon that does not answer


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "lock"
    path.write_text(f"{os.getpid()} identity\n")
    return path


def test_the_process_that_has_the_lock_open_is_its_holder(lock: Path) -> None:
    endpoint = f"ipc://{lock.parent}/client.sock"
    assert lock_holder(endpoint) is None, "another process has that pid by now"
    with lock.open():
        holder = LockHolder(pid=os.getpid(), is_stopped=False, is_beating=True)
        assert lock_holder(endpoint) == holder
        os.utime(lock, (0, time.time() + 3600.0))
        assert lock_holder(endpoint) == holder._replace(is_beating=False), "its clock was set back"
    for written in ("", "no number\n", "-1 x\n", f"{2**22 - 1} gone\n"):
        lock.write_text(written)
        assert lock_holder(endpoint) is None
    assert lock_holder(f"ipc://{lock.parent}/nowhere/client.sock") is None


class SlowDaemon:
    """A daemon that answers the third ping, as its clients see it.

    Attributes:
        pings: that have come.
        turns_away: whether it ends connections before it answers.
    """

    def __init__(self, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.endpoint = endpoint
        self.pings = 0
        self.turns_away = False
        monkeypatch.setattr(client, "Client", lambda _: nullcontext(self))

    def ping(self) -> None:
        self.pings += 1
        if self.pings < 3:
            raise self.lost

    def status(self) -> dict[str, Any]:
        if self.pings < 3:
            raise self.lost
        return {"pid": 7}

    @property
    def lost(self) -> ConnectionLost:
        away = self.turns_away
        return ConnectionLost("none answers", self.endpoint, "look for it", is_turned_away=away)


@pytest.fixture
def slow(lock: Path, monkeypatch: pytest.MonkeyPatch) -> SlowDaemon:
    return SlowDaemon(f"ipc://{lock.parent}/client.sock", monkeypatch)


def test_a_daemon_that_does_not_answer_yet_is_waited_for_until_the_limit(
    lock: Path, slow: SlowDaemon
) -> None:
    target = Target(endpoint=slow.endpoint)
    with lock.open():
        with pytest.raises(CliError, match="it is busy"):
            status_of_daemon(target, 0.0)
        assert slow.pings == 1
        assert status_of_daemon(target) == {"pid": 7}


def test_a_daemon_that_is_silent_stopped_full_or_not_there_is_not_waited_for(
    lock: Path, slow: SlowDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(endpoint=slow.endpoint)
    assert status_of_daemon(target) is None, "the file is left, and fresh"
    assert slow.pings == 1
    with lock.open():
        with monkeypatch.context() as stopped:
            stopped.setattr(psutil.Process, "status", lambda _: psutil.STATUS_STOPPED)
            with pytest.raises(CliError, match="it is stopped"):
                status_of_daemon(target)
        assert slow.pings == 2
        slow.pings, slow.turns_away = 0, True
        with pytest.raises(CliError, match="none answers"):
            status_of_daemon(target)
        assert slow.pings == 1
        os.utime(lock, (0, 0))
        slow.turns_away = False
        with pytest.raises(CliError, match="does not answer at"):
            status_of_daemon(target)
    assert slow.pings == 1, "it has done nothing since 1970"


def test_a_daemon_that_works_or_turns_away_is_not_one_to_be_killed_P24(lock: Path) -> None:
    endpoint = f"ipc://{lock.parent}/client.sock"
    with lock.open():
        lost = ConnectionLost("no daemon answers", endpoint)
        assert "kill" not in explain_connection_lost(lost).hint, "it works"
        os.utime(lock, (0, 0))
        assert "kill" in explain_connection_lost(lost).hint, "it has done nothing since 1970"
        error = ConnectionLost("turned away", endpoint, "try again later", is_turned_away=True)
        turned_away = explain_connection_lost(error)
        assert (turned_away.message, turned_away.hint) == ("turned away", "try again later")


# ---------------------------------------------------------------- which daemon is meant


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that names a runtime folder, beside an environment that names another endpoint."""
    monkeypatch.setenv("MLXSUP_ENDPOINT", "ipc:///environment.sock")
    monkeypatch.setenv("HOME", "/h")
    path = tmp_path / "some file.toml"
    path.write_text('[supervisor]\nruntime_dir = "run"\n')
    return path


DEFAULT = "ipc:///h/.mlxsup/run/client.sock"


def test_what_is_named_beats_what_follows_from_something_else(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Target(endpoint="ipc:///named.sock", config=named)
    assert both.find_endpoint() == "ipc:///named.sock"
    assert Target(config=named).find_endpoint() == f"ipc://{named.parent}/run/client.sock"
    assert Target().find_endpoint() == "ipc:///environment.sock"
    named.write_text("")
    assert Target(config=named).find_endpoint() == DEFAULT
    for value in ("", None):
        monkeypatch.delenv("MLXSUP_ENDPOINT")
        if value is not None:
            monkeypatch.setenv("MLXSUP_ENDPOINT", value)
        assert Target().find_endpoint() == DEFAULT


@pytest.mark.parametrize(
    ("text", "endpoint", "status"),
    [
        ("x = '\xff'", None, 78),
        ("[supervisor]\nruntime_dir = 7\n", None, 78),
        ("", "tcp://host:1", 64),
        ("", "ipc://", 64),
        ("", "", 64),
    ],
    ids=["no UTF-8", "no folder", "tcp", "no path", "empty"],
)
def test_what_names_no_endpoint_is_refused(
    named: Path, text: str, endpoint: str | None, status: int
) -> None:
    named.write_text(text, encoding="latin-1")
    with pytest.raises(CliError) as raised:
        Target(endpoint=endpoint, config=named).find_endpoint()
    assert raised.value.status == status
    if status == ExitStatus.BAD_CONFIGURATION:
        assert raised.value.hint == f"check it with `mlxsup config check '{named}'`"
        named.unlink()
        with pytest.raises(CliError) as raised:
            Target(config=named).find_endpoint()
        written = f"create it with `mlxsup init '{named}'`"
        assert raised.value.hint == f"choose another file, or {written}"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("see `mlxsup status`", "see `mlxsup status OPTIONS`"),
        ("`mlxsup logs m`, `mlxsup stop`", "`mlxsup logs m OPTIONS`, `mlxsup stop OPTIONS`"),
        ("see `mlxsup logs -h`", "see `mlxsup logs -h`"),
        ("`mlxsup config check f`", "`mlxsup config check f`"),
        ("`mlxsup pull a/b`, `mlxsup reload`", "`mlxsup pull a/b`, `mlxsup reload OPTIONS`"),
        ("`mlxsup plan`", "`mlxsup plan --config /c`"),
        ("`kill -KILL 7`", "`kill -KILL 7`"),
        ("`mlxsup stop --endpoint ipc:///o`", "`mlxsup stop --endpoint ipc:///o`"),
        ("`mlxsup start --config o`", "`mlxsup start --config o`"),
    ],
)
def test_hints_repeat_the_options(hint: str, expected: str) -> None:
    target = Target(endpoint="ipc:///a b", config=Path("/c"))
    options = "--endpoint 'ipc:///a b' --config /c"
    assert target.repeat_in(hint) == expected.replace("OPTIONS", options)
    assert Target().repeat_in(hint) == hint


LOST = "start one with `mlxsup start`"


def test_the_hint_of_a_missing_daemon_is_about_what_named_it(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hint(**given: Any) -> str:
        return Target(**given).explain(CliError("", code="connection_lost", hint=LOST)).hint

    wrong = "check {0}: a daemon prints its endpoint when it starts"
    assert hint(endpoint="ipc:///x") == wrong.format("--endpoint")
    assert hint() == wrong.format("MLXSUP_ENDPOINT")
    assert hint(config=named) == f"start one with `mlxsup start --config '{named}'`"
    assert Target().repeat_in(LOST) == "", "it would listen at another endpoint"
    monkeypatch.delenv("MLXSUP_ENDPOINT")
    assert hint() == NEWCOMER_HINT
    monkeypatch.setenv("MLXSUP_CONFIG", str(named))
    assert hint() == LOST


# ---------------------------------------------------------------- which model is meant


def test_wrong_folders_and_needs_of_memory_are_named_together(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, memory = (Mock(side_effect=ConfigError([one])) for one in ("a folder", "memory"))
    monkeypatch.setattr("mlxsup.supervisor.config.model_folders.check_model_folders", folders)
    monkeypatch.setattr("mlxsup.supervisor.memory.needs.check_memory", memory)
    with pytest.raises(ConfigError) as caught:
        check_models(read_configuration(config), config)
    assert caught.value.problems == ["a folder", "memory"]


def test_logs_are_where_the_latest_daemon_has_written_them(tmp_path: Path) -> None:
    """Also if the configuration names another folder by now."""
    places = ["recorded", "configured", "run", "run/logs"]
    recorded, configured, run_dir, usual = (tmp_path / place for place in places)
    path = tmp_path / "mlxsup.toml"
    path.write_text(f'[supervisor]\nruntime_dir = "{run_dir}"\nlog_dir = "{configured}"\n')
    assert log_dir_left_by(Target(config=path)) is None, "nothing was ever logged"
    for folder in (recorded, configured, usual):
        folder.mkdir(parents=True)
    assert log_dir_left_by(Target(config=path)) == configured
    endpoint = Target(endpoint=f"ipc://{run_dir}/client.sock")
    assert log_dir_left_by(endpoint) == usual
    (run_dir / LOG_DIR_NAME).write_text(str(recorded))
    assert log_dir_left_by(Target(config=path)) == log_dir_left_by(endpoint) == recorded


def test_a_name_means_its_own_model_before_an_alias_of_another(tmp_path: Path) -> None:
    path = tmp_path / "unchecked.toml"
    path.write_text('[models.a]\naliases = ["b", "c", 7]\n[models.b]\n[models.d]\naliases = "c"\n')
    assert models_in(path) == {"a": "a", "b": "b", "c": "a", "7": "a", "d": "d"}
    path.write_text("models = 1\n")
    assert models_in(path) == models_in(None) == {}


def test_an_entry_is_called_by_name_alias_repository_or_name_and_preset(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[models.a]\nrepo = "owner/b"\naliases = ["c"]\n[models.a.presets.hot]\ntemperature = 1.0\n'
        '[models.b]\nengine = "fake"\n'
    )
    configuration = read_configuration(path)
    called = {
        name: None if (entry := entry_called(name, configuration)) is None else str(entry.name)
        for name in ("a", "b", "c", "owner/b", "a:hot", "c:hot", "a:latest", "a:cold", "d")
    }
    assert called == {
        "a": "a", "b": "b", "c": "a", "owner/b": "a", "a:hot": "a", "c:hot": "a", "a:latest": "a",
        "a:cold": None, "d": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("port", "taken", "suggested"),
    [
        (8484, {8484}, "127.0.0.1:8485"),
        (8484, {8484, 8485}, "127.0.0.1:8486"),
        (8484, range(8484, 8484 + NEXT_PORTS), f"127.0.0.1:{8484 + NEXT_PORTS}"),
        (8484, range(8484, 8485 + NEXT_PORTS), ""),
        (65534, {65534}, "127.0.0.1:65535"),
        (65535, {65535}, ""),
    ],
)
def test_the_next_port_that_is_free_is_suggested(
    monkeypatch: pytest.MonkeyPatch, port: int, taken: Collection[int], suggested: str
) -> None:
    refusal = OSError("taken")
    monkeypatch.setattr(
        "mlxsup.cli.port.refused_at", lambda one: refusal if one.port in taken else None
    )
    assert free_address(Address(host="127.0.0.1", port=port)) == suggested


@pytest.mark.parametrize("size", [MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES + 1])
def test_long_output_of_earlier_daemons_is_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    output, old = tmp_path / OUTPUT_NAME, tmp_path / f"{OUTPUT_NAME}.1"
    output.write_bytes(b"x" * size)
    monkeypatch.setattr("mlxsup.cli.detach.subprocess.Popen", Mock(side_effect=OSError("none")))
    with pytest.raises(OSError, match="none"):
        start_detached(f"ipc://{tmp_path}/client.sock", tmp_path, [])
    is_moved = size > MAX_OUTPUT_BYTES
    assert (old.exists(), output.stat().st_size) == (is_moved, 0 if is_moved else size)


def test_the_last_error_that_a_detached_daemon_has_printed_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(_: object, *, stdout: int, **__: object) -> Mock:
        os.write(stdout, b"warning: m: it said error: oh\nerror: not yours\nhint: move it\n")
        return Mock(pid=7, returncode=int(ExitStatus.RUNTIME_FOLDER))

    monkeypatch.setattr("mlxsup.cli.detach.subprocess.Popen", popen)
    with pytest.raises(CliError) as caught:
        start_detached(f"ipc://{tmp_path}/client.sock", tmp_path, [])
    refused = caught.value
    assert (refused.message, refused.hint) == ("not yours", "move it")
    assert (refused.code, refused.status) == ("runtime_folder", ExitStatus.RUNTIME_FOLDER)


def test_the_error_of_an_earlier_daemon_is_not_that_of_one_that_dies_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / OUTPUT_NAME).write_text("error: not yours\nhint: move it\n")
    monkeypatch.setattr(
        "mlxsup.cli.detach.subprocess.Popen", Mock(return_value=Mock(returncode=-9))
    )
    with pytest.raises(CliError) as caught:
        start_detached(f"ipc://{tmp_path}/client.sock", tmp_path, [])
    assert caught.value.message == "the daemon ended with exit code -9"
    assert caught.value.hint == f"see {tmp_path / OUTPUT_NAME}"


@pytest.mark.parametrize("is_ours", [True, False])
def test_run_has_a_daemon_that_another_command_started_read_its_entry(
    config: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    daemon = Mock()
    started = Started(endpoint="ipc:///x", pid=7, output=config, gateway=None, is_ours=is_ours)
    monkeypatch.setattr("mlxsup.cli.detach.start_configured", lambda path: started)
    monkeypatch.setattr(run_command, "connect", lambda target: nullcontext(daemon))
    target = Target(config=config)
    assert run_command.start_with("m", target, Output(), is_sure=False) == "m"
    assert daemon.reload.call_count == (not is_ours)


def test_another_daemon_that_answers_is_not_the_one_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the new one finds out that it is not needed."""
    process = Mock(pid=7, returncode=ExitStatus.ALREADY_RUNNING)
    process.wait.side_effect = [subprocess.TimeoutExpired("start", 0), ExitStatus.ALREADY_RUNNING]
    monkeypatch.setattr("mlxsup.cli.detach.subprocess.Popen", Mock(return_value=process))
    answer = {"pid": 8, "gateway": None}
    monkeypatch.setattr("mlxsup.cli.detach.status_of_daemon", lambda target, limit_s: answer)
    (tmp_path / "client.sock").touch()
    with pytest.raises(CliError) as caught:
        start_detached(f"ipc://{tmp_path}/client.sock", tmp_path, [])
    assert caught.value.status is ExitStatus.ALREADY_RUNNING


def test_a_daemon_whose_start_is_interrupted_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr("mlxsup.cli.detach.subprocess.Popen", Mock(return_value=daemon))
    monkeypatch.setattr("mlxsup.cli.detach._wait", Mock(side_effect=KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt):
            start_detached(f"ipc://{tmp_path}/client.sock", tmp_path, [])
        assert daemon.returncode == -signal.SIGTERM
    finally:
        daemon.kill()
        daemon.wait()


def test_an_interrupt_waits_for_the_end_of_what_it_must_not_cut() -> None:
    done = []

    @held_interrupt()
    def begin() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("to its end")

    with pytest.raises(KeyboardInterrupt):
        begin()
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_model_that_pools_is_not_the_first_to_chat_with(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[models.a]\npath = "a"\npooling = "mean"\n[models.b]\nengine = "fake"\n')
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"model_type": "llama"}')
    assert start._first_to_chat(read_configuration(path)) == "b"


def test_a_file_that_another_command_makes_at_the_same_time_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(configuration, "write_configuration", Mock(side_effect=FileExistsError))
    assert configuration.make_configuration(tmp_path / "c.toml") is False


def test_run_keeps_the_preset_of_a_model_and_takes_the_name_of_what_it_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon = nullcontext(object())
    monkeypatch.setattr(run_command, "status_of_daemon", lambda *_: {"models": []})
    monkeypatch.setattr(run_command, "connect", lambda _: daemon)
    for preset, name in (({"seed": 1}, "m:brief"), ({}, "m")):
        served = Mock(return_value=("m", preset))
        monkeypatch.setattr(run_command, "served_name", served)
        assert run_command._serve("m:brief", Target(), Output(), is_sure=True) == name
