"""What the command line says if the system refuses something."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mlxsup.cli import main as cli

NOWHERE = "ipc:///nowhere/client.sock"


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/some/file")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """The exit code, and what was printed."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_a_file_that_is_refused_is_named_and_is_not_called_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.root, "invoke", refuse)
    code, out, err = run(capsys, "status")
    assert (code, out) == (1, "")
    assert err.startswith("error: /some/file: Permission denied\nhint: ")
    code, out, err = run(capsys, "status", "--json")
    assert (code, err) == (1, "")
    error = json.loads(out)["error"]
    assert (error["code"], error["message"]) == ("system", "/some/file: Permission denied")


@pytest.mark.parametrize(
    "command", [("start", "--config"), ("plan", "--config"), ("config", "check")]
)
def test_a_configuration_that_the_system_does_not_open_is_a_bad_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / ("x" * 300)
    code, _, err = run(capsys, *command, str(path))
    assert code == 78
    assert os.strerror(errno.ENAMETOOLONG) in err


def test_what_the_system_takes_for_no_name_of_a_file_is_no_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "show", "x" * 300, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "unknown_model")


def test_what_rm_could_not_remove_is_named_and_so_is_what_removes_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--o--n").mkdir()
    monkeypatch.setattr(shutil, "rmtree", refuse)
    code, out, _ = run(capsys, "rm", "o/n", "--yes", "--endpoint", NOWHERE, "--json")
    error = json.loads(out)["error"]
    assert (code, error["code"]) == (1, "not_removed")
    assert "part of it is left: /some/file: Permission denied" in error["message"]
    assert f"`mlxsup rm o/n --endpoint {NOWHERE}`" in error["hint"]
