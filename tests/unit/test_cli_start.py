"""`mlxsup start`, with the supervisor played by hand."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mlxsup.cli.main import main
from mlxsup.cli.terminal.change_printer import MAX_WAITING, ChangePrinter
from mlxsup.cli.terminal.output import Output
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
