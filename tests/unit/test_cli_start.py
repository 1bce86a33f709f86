"""What `start` prints, and which daemon commands look for."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mlxsup.cli.changes import MAX_WAITING, ChangePrinter
from mlxsup.cli.connection import Target, explain_connection_lost
from mlxsup.cli.exit_status import CliError, ExitStatus
from mlxsup.cli.lock_holder import LockHolder, lock_holder
from mlxsup.cli.main import main
from mlxsup.cli.terminal.output import Output
from mlxsup.client import ConnectionLost
from mlxsup.supervisor.announcements import OnChange
from mlxsup.supervisor.app import OnListening
from mlxsup.supervisor.config.load import DaemonConfig
from mlxsup.supervisor.runtime_folder import AlreadyRunningError, RuntimeFolderError

CHANGE = {
    "at": 0.0,
    "model": "m",
    "from": "LOADING",
    "to": "READY",
    "generation": 1,
    "pid": 7,
    "note": "",
}


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


def test_start_prints_the_endpoint_and_each_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    def run_daemon(
        configuration: DaemonConfig, *, on_change: OnChange, on_listening: OnListening
    ) -> int:
        assert [str(model.name) for model in configuration.models] == ["m"]
        on_listening("ipc:///run/client.sock")
        on_change(CHANGE | {"from": "LOADING", "to": "LOADING", "progress": 0.5})
        on_change(CHANGE)
        return 0

    play(monkeypatch, run_daemon)
    assert run("start", "--config", str(config)) == 0
    listening, change = capsys.readouterr().out.splitlines()
    assert listening.startswith("listening at ipc:///run/client.sock")
    assert change.endswith("m: LOADING → READY (generation 1, pid 7)")
    monkeypatch.setenv("MLXSUP_CONFIG", str(config))
    assert run("start", "--json") == 0
    values = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert values[0]["endpoint"] == "ipc:///run/client.sock"
    assert (values[1]["to"], values[1]["schema_version"]) == ("READY", 1)


def test_start_prints_warnings_once_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    def run_daemon(
        configuration: DaemonConfig, *, on_change: OnChange, on_listening: OnListening
    ) -> int:
        on_listening("ipc:///run/client.sock")
        on_change(CHANGE | {"warnings": ["memory is short", "the context is unknown"]})
        on_change(CHANGE | {"from": "DRAINING", "warnings": []})
        return 0

    play(monkeypatch, run_daemon)
    assert run("start", "--config", str(config)) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert err.splitlines() == [
        "warning: m: memory is short",
        "warning: m: the context is unknown",
    ]
    assert run("start", "--config", str(config), "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[1])["warnings"] == [
        "memory is short",
        "the context is unknown",
    ]
    assert err == ""


def test_errors_of_start_have_their_exit_codes_P19(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    for error, status in (
        (AlreadyRunningError(4711, config.parent), 75),
        (RuntimeFolderError("the runtime folder is not yours", hint="set another"), 73),
    ):

        def run_daemon(*_: object, error: Exception = error, **__: object) -> int:
            raise error

        play(monkeypatch, run_daemon)
        assert run("start", "--config", str(config)) == status
        message = capsys.readouterr().err
        assert message.startswith(f"error: {error}\n")
        assert "hint: " in message


def test_no_traceback_reaches_a_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    def run_daemon(*_: object, **__: object) -> int:
        raise ZeroDivisionError("oh")

    play(monkeypatch, run_daemon)
    assert run("start", "--config", str(config)) == 1
    assert "ZeroDivisionError: oh" in capsys.readouterr().err
    monkeypatch.setenv("MLXSUP_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["start", "--config", str(config)])


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
    stuck = StuckOutput()
    monkeypatch.setattr(sys, "stdout", stuck)
    printer = ChangePrinter(Output())
    printer.listening("ipc:///x")
    for _ in range(MAX_WAITING * 2):
        printer.changed(CHANGE)
    stuck.is_free.set()
    printer.close()
    assert MAX_WAITING <= len(stuck.getvalue().splitlines()) < MAX_WAITING * 2


URL = "http://127.0.0.1:8484"


@pytest.mark.parametrize(
    ("is_json", "shown"),
    [(False, f"HTTP at {URL} (pid 7)"), (True, f'{{"gateway": "{URL}", "pid": 7}}')],
)
def test_start_prints_where_it_listens(
    capsys: pytest.CaptureFixture[str], is_json: bool, shown: str
) -> None:
    printer = ChangePrinter(Output(is_json=is_json))
    printer.listening("ipc:///x")
    printer.changed({"gateway": URL, "pid": 7})
    assert printer.close()
    line = capsys.readouterr().out.splitlines()[-1]
    assert shown.strip("{}") in line


def test_who_has_the_lock_open_is_the_holder_and_a_used_pid_is_not(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{os.getpid()} identity\n")
    endpoint = f"ipc://{tmp_path}/client.sock"
    assert lock_holder(endpoint) is None, "another process has that pid by now"
    with lock.open():
        assert lock_holder(endpoint) == LockHolder(
            pid=os.getpid(), is_stopped=False, is_beating=True
        )


def test_a_daemon_that_works_or_turns_away_is_not_one_to_be_killed_P24(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{os.getpid()} identity\n")
    endpoint = f"ipc://{tmp_path}/client.sock"
    with lock.open():
        lost = ConnectionLost("no daemon answers", endpoint)
        assert "kill" not in explain_connection_lost(lost).hint, "it works"
        os.utime(lock, (0, 0))
        assert "kill" in explain_connection_lost(lost).hint, "it has done nothing since 1970"
        error = ConnectionLost("turned away", endpoint, "try again later", is_turned_away=True)
        turned_away = explain_connection_lost(error)
        assert (turned_away.message, turned_away.hint) == ("turned away", "try again later")


@pytest.mark.parametrize("written", ["", "no number\n", "-1 x\n", f"{2**22 - 1} gone\n"])
def test_what_names_no_process_is_no_holder(tmp_path: Path, written: str) -> None:
    (tmp_path / "lock").write_text(written)
    assert lock_holder(f"ipc://{tmp_path}/client.sock") is None
    assert lock_holder(f"ipc://{tmp_path}/nowhere/client.sock") is None


@pytest.fixture
def target_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSUP_ENDPOINT", "ipc:///environment.sock")
    path = tmp_path / "some.toml"
    path.write_text('[supervisor]\nruntime_dir = "run"\n')
    return path


def test_what_is_named_beats_what_follows_from_something_else(target_config: Path) -> None:
    both = Target(endpoint="ipc:///named.sock", config=target_config)
    assert both.find_endpoint() == "ipc:///named.sock"
    assert (
        Target(config=target_config).find_endpoint()
        == f"ipc://{target_config.parent}/run/client.sock"
    )
    assert Target().find_endpoint() == "ipc:///environment.sock"


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, f"x = {'9' * 5000}", "x", "x = '\xff'"])
def test_a_configuration_that_cannot_be_read_is_to_be_checked(
    target_config: Path, text: str
) -> None:
    target_config.write_text(text, encoding="latin-1")
    with pytest.raises(CliError) as caught:
        Target(config=target_config).find_endpoint()
    assert caught.value.status is ExitStatus.BAD_CONFIGURATION
    assert caught.value.hint == f"check it with `mlxsup config check {target_config}`"


def test_without_anything_it_is_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLXSUP_ENDPOINT", raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert Target().find_endpoint() == "ipc:///h/.mlxsup/run/client.sock"
    monkeypatch.setenv("MLXSUP_ENDPOINT", "")
    assert Target().find_endpoint() == "ipc:///h/.mlxsup/run/client.sock"


def test_a_file_that_names_no_runtime_folder_means_the_default_one(
    target_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    target_config.write_text("")
    assert Target(config=target_config).find_endpoint() == "ipc:///h/.mlxsup/run/client.sock"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("see `mlxsup status`", "see `mlxsup status OPTIONS`"),
        ("`mlxsup logs m`, `mlxsup stop`", "`mlxsup logs m OPTIONS`, `mlxsup stop OPTIONS`"),
        ("see `mlxsup logs -h`", "see `mlxsup logs -h`"),
        ("`mlxsup config check f`", "`mlxsup config check f`"),
        ("`mlxsup pull a/b`, `mlxsup log-level`", "`mlxsup pull a/b`, `mlxsup log-level OPTIONS`"),
        ("`kill -KILL 7`", "`kill -KILL 7`"),
        ("`mlxsup stop --endpoint ipc:///o`", "`mlxsup stop --endpoint ipc:///o`"),
        ("`mlxsup start --config o`", "`mlxsup start --config o`"),
    ],
)
def test_hints_repeat_the_options(hint: str, expected: str, tmp_path: Path) -> None:
    target = Target(endpoint="ipc:///a b", config=tmp_path)
    options = f"--endpoint 'ipc:///a b' --config {tmp_path}"
    assert target.repeat_in(hint) == expected.replace("OPTIONS", options)
    assert Target().repeat_in(hint) == hint


def test_a_daemon_is_not_to_be_started_where_it_would_not_be_found(
    monkeypatch: pytest.MonkeyPatch, target_config: Path
) -> None:
    hint = "start a daemon with `mlxsup start`"
    assert Target(endpoint="ipc:///x").repeat_in(hint) == ""
    assert Target().repeat_in(hint) == ""
    assert Target(config=target_config).repeat_in(hint) == (
        f"start a daemon with `mlxsup start --config {target_config}`"
    )
    monkeypatch.setenv("MLXSUP_ENDPOINT", "")
    assert Target().repeat_in(hint) == hint


@pytest.mark.parametrize(
    ("text", "endpoint", "status"),
    [
        ("[supervisor]\nruntime_dir = 7\n", None, 78),
        ("", "tcp://host:1", 64),
        ("", "ipc://", 64),
        ("", "", 64),
    ],
)
def test_what_names_no_endpoint_is_refused(
    target_config: Path, text: str, endpoint: str | None, status: int
) -> None:
    target_config.write_text(text)
    with pytest.raises(CliError) as raised:
        Target(endpoint=endpoint, config=target_config).find_endpoint()
    assert raised.value.status == status
