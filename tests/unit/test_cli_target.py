"""Which daemon a command means."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.cli.connection import Target
from mlxsup.cli.exit_status import CliError, ExitStatus


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSUP_ENDPOINT", "ipc:///environment.sock")
    path = tmp_path / "some.toml"
    path.write_text('[supervisor]\nruntime_dir = "run"\n')
    return path


def test_what_is_named_beats_what_follows_from_something_else(config: Path) -> None:
    both = Target(endpoint="ipc:///named.sock", config=config)
    assert both.find_endpoint() == "ipc:///named.sock"
    assert Target(config=config).find_endpoint() == f"ipc://{config.parent}/run/client.sock"
    assert Target().find_endpoint() == "ipc:///environment.sock"


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, f"x = {'9' * 5000}", "x", "x = '\xff'"])
def test_a_configuration_that_cannot_be_read_is_to_be_checked(config: Path, text: str) -> None:
    config.write_text(text, encoding="latin-1")
    with pytest.raises(CliError) as caught:
        Target(config=config).find_endpoint()
    assert caught.value.status is ExitStatus.BAD_CONFIGURATION
    assert caught.value.hint == f"check it with `mlxsup config check {config}`"


def test_without_anything_it_is_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLXSUP_ENDPOINT", raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert Target().find_endpoint() == "ipc:///h/.mlxsup/run/client.sock"
    monkeypatch.setenv("MLXSUP_ENDPOINT", "")
    assert Target().find_endpoint() == "ipc:///h/.mlxsup/run/client.sock"


def test_a_file_that_names_no_runtime_folder_means_the_default_one(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    config.write_text("")
    assert Target(config=config).find_endpoint() == "ipc:///h/.mlxsup/run/client.sock"


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
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    hint = "start a daemon with `mlxsup start`"
    assert Target(endpoint="ipc:///x").repeat_in(hint) == ""
    assert Target().repeat_in(hint) == ""
    assert Target(config=config).repeat_in(hint) == (
        f"start a daemon with `mlxsup start --config {config}`"
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
    config: Path, text: str, endpoint: str | None, status: int
) -> None:
    config.write_text(text)
    with pytest.raises(CliError) as raised:
        Target(endpoint=endpoint, config=config).find_endpoint()
    assert raised.value.status == status
