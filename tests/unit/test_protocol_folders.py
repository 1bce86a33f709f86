"""Where files are, what they and their lines are called, and the longest path of a socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.protocol import folders
from mlxsup.protocol.folders import (
    GENERATION_HEADER,
    check_runtime_dir,
    check_socket_path,
    generation_header,
    log_path,
    worker_socket_name,
)
from mlxsup.protocol.text import LOG_LEVELS, timestamp


def test_everything_is_below_one_folder_of_the_user() -> None:
    found = {name: value for name, value in vars(folders).items() if str(value).startswith("~")}
    assert found == {
        "DEFAULT_RUNTIME_DIR": "~/.mlxsup/run",
        "DEFAULT_LOG_DIR": "~/.mlxsup/logs",
        "DEFAULT_CONFIG": "~/.mlxsup/config.toml",
        "HISTORY_FILE": "~/.mlxsup/history",
        "CONNECTED_DIR": "~/.mlxsup/connected",
        "MODELS_DIR": "~/.mlxsup/models",
        "DEMO_MODEL_FOLDER": "~/.mlxsup/models/smollm2",
    }


def test_files_are_called_as_the_operations_document_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    runtime, logs = Path("<runtime_dir>"), Path("<log_dir>")
    worker = worker_socket_name(1)
    for name in (
        runtime / folders.LOCK_NAME,
        runtime / folders.CLIENT_SOCKET_NAME,
        log_path(logs, folders.DAEMON_LOG_NAME),
        log_path(logs, "MODEL"),
    ):
        assert f"\n| `{name}` |" in text
    assert f"\n| `{runtime / worker}`, `{worker}{folders.BEAT_SUFFIX}`, … |" in text


def test_the_line_above_the_output_of_a_process_is_read_as_it_was_written() -> None:
    line = generation_header(12, 345, timestamp(0.0))
    assert line == "--- generation 12 pid 345 1970-01-01T00:00:00Z"
    match = GENERATION_HEADER.match(line)
    assert match is not None
    assert match.group(1) == "12"
    for other in (f" {line}", "--- generation x pid 345 ", "--- generation 12 pid 345"):
        assert GENERATION_HEADER.match(other) is None


def test_a_socket_path_is_refused_with_its_length_and_the_limit() -> None:
    path = "/" + "ö" * 51
    check_socket_path(path)
    with pytest.raises(ValueError, match=r"^the socket path ") as caught:
        check_socket_path(path + "x")
    assert str(caught.value) == (
        f"the socket path {path}x has 104 bytes; at most 103 work on every system"
    )


def test_a_runtime_folder_has_room_for_the_longest_socket_name_of_a_long_life() -> None:
    longest = "/w9999999.sock.beat"
    folder = "/" + "x" * (103 - len(longest) - 1)
    check_runtime_dir(Path(folder))
    with pytest.raises(ValueError, match=rf"^the socket path {folder}x{longest} has 104 bytes; "):
        check_runtime_dir(Path(folder + "x"))


def test_levels_of_logs_go_from_the_least_to_the_most_important() -> None:
    assert LOG_LEVELS == ("debug", "info", "warning", "error")
