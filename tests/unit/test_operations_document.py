"""docs/operations.md names everything there is, as the code has it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.exit_status import ExitStatus
from mlxsup.cli.service.launchd_plist import plist_text
from mlxsup.cli.service.systemd_unit import unit_text
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.folders import CLIENT_SOCKET_NAME, LOCK_NAME
from mlxsup.protocol.gateway import DEFAULT_LISTEN
from mlxsup.protocol.launch import PERMANENT_EXITS, TEXT_LIMIT_STEPS, ExitCode
from mlxsup.protocol.states import State
from mlxsup.supervisor import log_files, runtime_folder
from mlxsup.supervisor.app import INTERNAL_EXIT_CODE
from mlxsup.supervisor.core.lifecycle.life import KILL_LIMIT_S
from mlxsup.supervisor.core.settings import RestartSettings
from mlxsup.supervisor.memory.measurements import FILE_NAME
from mlxsup.supervisor.signals import ENDING
from mlxsup.supervisor.sockets import clients, limits, worker_link
from mlxsup.supervisor.workers.leftovers import RECORD_NAME
from mlxsup.worker.parent_watch import ORPHANED_EXIT
from mlxsup.worker.process import TERMINATED_EXIT

from support.documents import rows_of, section
from support.service_facts import facts, mac_facts

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text()
EXAMPLE = tomllib.loads((ROOT / "config.example.toml").read_text())


def first_cells(title: str) -> list[str]:
    """The first column of the table under a heading, without marks."""
    return [row[0].strip("`") for row in rows_of(section(TEXT, title))]


def example_tables() -> dict[str, dict[str, Any]]:
    model = dict(next(iter(EXAMPLE["models"].values())))
    restart, sampling = model.pop("restart"), model.pop("sampling")
    model = {"path": model.pop("path"), "repo": None, **model}
    return {
        "`[supervisor]`": EXAMPLE["supervisor"],
        "`[gateway]`": {
            "listen": DEFAULT_LISTEN,
            "names": {},
            "hosts": [],
            "origins": [],
            "keys": "auto",
        },
        "`[clients.NAME]`": EXAMPLE["clients"]["*"],
        "`[models.NAME]`": model,
        "`[models.NAME.restart]`": restart,
        "`[models.NAME.sampling]`": sampling,
    }


@pytest.mark.parametrize("title", example_tables())
def test_every_setting_is_there_with_its_default_and_its_unit(title: str) -> None:
    expected = example_tables()[title]
    rows = rows_of(section(TEXT, title))
    assert [row[0].strip("`") for row in rows] == list(expected)
    for key, default, unit, what in rows:
        name = key.strip("`")
        assert what, name
        if name in ("path", "repo"):
            assert default == "none"
            continue
        assert tomllib.loads(f"value = {default.strip('`')}")["value"] == expected[name], name
        endings = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_dir": "folder"}
        for ending, word in endings.items():
            if name.endswith(ending):
                assert unit == word, name


def test_every_state_is_there_with_what_to_do() -> None:
    rows = rows_of(section(TEXT, "The states of a model"))
    assert [row[0] for row in rows] == [state.value for state in State]
    assert all(row[1] and row[2] for row in rows)


def test_the_delays_of_backing_off_are_those_of_the_defaults() -> None:
    settings = RestartSettings()
    delays = [
        min(settings.backoff_initial_s * 2**n, settings.backoff_max_s)
        for n in range(settings.max_restarts - 1)
    ]
    shown = ", ".join(f"{delay:g}" for delay in delays[:-1]) + f" and {delays[-1]:g} seconds"
    assert f"up to {shown}" in " ".join(TEXT.split())


def test_every_exit_code_of_a_worker_is_there() -> None:
    rows = {row[0]: row for row in rows_of(section(TEXT, "What a worker exits with"))}
    numbers = {int(code) for code in rows if code.isdigit()}
    assert numbers == {int(c) for c in ExitCode} | {ORPHANED_EXIT, TERMINATED_EXIT}
    permanent = {int(code) for code, row in rows.items() if row[2] == "before READY: FAILED"}
    assert permanent == {int(code) for code in PERMANENT_EXITS}


def test_every_exit_code_of_a_command_is_there() -> None:
    numbers = [int(cell) for cell in first_cells("What a command exits with")]
    assert numbers == sorted({int(status) for status in ExitStatus} | {INTERNAL_EXIT_CODE})


def test_every_error_code_is_there_with_what_to_do() -> None:
    rows = rows_of(section(TEXT, "Error codes"))
    assert [row[0].strip("`") for row in rows] == [code.value for code in ErrorCode]
    assert all(row[1] for row in rows)


def test_the_limits_are_those_of_the_code() -> None:
    rows = {row[0]: f"{row[1]} · {row[2]}" for row in rows_of(section(TEXT, "Limits"))}
    known: dict[str, list[float]] = {
        "connections of clients": [
            limits.MAX_CONNECTIONS,
            clients.REFUSAL_S,
            clients.MAX_REFUSED,
        ],
        "connections of one process": [limits.MAX_OF_ONE_PROCESS],
        "connections for processes that have none yet": [limits.KEPT_FOR_NEWCOMERS],
        "open files": [
            runtime_folder.RESERVED_FILES,
            runtime_folder.FILES_PER_MODEL,
            limits.MIN_CONNECTIONS,
            worker_link.FILES_OF_SPAWN,
        ],
        "messages above 64 KiB that are read at once": [clients.MAX_LARGE, clients.LARGE_LIMIT_S],
        "requests and commands open on one connection": [clients.MAX_OPEN_PER_CONNECTION],
        "bytes that wait for one client": [clients.MAX_UNSENT_BYTES / 2**20, clients.MAX_UNSENT_S],
        "bytes that wait for all clients": [clients.MAX_UNSENT_IN_ALL_BYTES / 2**20],
    }
    for what, numbers in known.items():
        for number in numbers:
            assert re.search(rf"(?<![\d,]){number:,.0f}(?![\d,]*\d)", rows[what]), (what, number)
    assert f"too few files may be open ({runtime_folder.files_needed(0):,}, and" in TEXT
    assert KILL_LIMIT_S == 10.0
    assert "given up ten seconds later" in TEXT


def test_preparing_a_prompt_may_take_as_long_as_is_said() -> None:
    assert TEXT_LIMIT_STEPS == 10.0
    assert "preparing one prompt may take ten times as long" in TEXT


# ---------------------------------------------------------------- log lines


def calls_in(folder: str) -> Iterator[ast.Call]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield node


def texts(node: ast.expr) -> list[str]:
    """The values that an expression may have, where they are written down."""
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def daemon_lines() -> set[tuple[str, str]]:
    """(level, message) of every line that the supervisor logs."""
    found = set()
    for call in calls_in("supervisor"):
        is_write = isinstance(call.func, ast.Attribute) and call.func.attr == "write"
        if is_write and len(call.args) == 2 and (levels := texts(call.args[0])):
            (message,) = texts(call.args[1])
            found.add((levels[0], message))
    return found


def worker_lines() -> set[tuple[str, str]]:
    """(level, message) of every line that a worker logs."""
    found = set()
    for call in calls_in("worker"):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not (isinstance(owner, ast.Name) and owner.id == "logger"):
            continue
        assert isinstance(call.func, ast.Attribute)
        (line,) = call.args
        assert isinstance(line, ast.Call), "log lines are made by logs.line"
        (message,) = texts(line.args[0])
        found.add((call.func.attr, message))
    return found


@pytest.mark.parametrize(
    ("title", "lines"), [("In `mlxsup.log`", daemon_lines()), ("In `MODEL.log`", worker_lines())]
)
def test_every_log_line_is_there_with_its_level(title: str, lines: set[tuple[str, str]]) -> None:
    assert len(lines) > 5
    rows = rows_of(section(TEXT, title))
    assert {(row[0], row[1].strip("`")) for row in rows} == lines
    assert all(row[2] for row in rows)


def test_the_size_of_logs_is_that_of_the_code() -> None:
    assert log_files.MAX_LOG_BYTES == 10 * 2**20
    assert log_files.LOG_FILES == 3
    assert (
        "grown to 10 MiB is renamed to `.1`, and that one to `.2`; older ones are dropped"
        in " ".join(TEXT.split())
    )


# ---------------------------------------------------------------- files, signals, services


def test_files_and_signals_are_those_of_the_code() -> None:
    files = " ".join(first_cells("Files and sockets"))
    for name in (LOCK_NAME, CLIENT_SOCKET_NAME, RECORD_NAME, FILE_NAME, "mlxsup.log"):
        assert f"/{name}" in files
    signals = " ".join(first_cells("Signals"))
    for number in ENDING:
        assert number.name in signals


def test_the_services_are_the_files_that_are_written() -> None:
    (unit,) = re.findall(r"^```ini\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert unit == unit_text(facts())
    (plist,) = re.findall(r"^```xml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert plist == plist_text(mac_facts())


def test_what_a_service_manager_hears_is_what_the_code_sends() -> None:
    source = (ROOT / "supervisor" / "service_manager.py").read_text()
    rows = rows_of(section(TEXT, "systemd").partition("What systemd learns")[2])
    table = " ".join(row[0] for row in rows)
    sent = set(re.findall(r"\b([A-Z_]+)=(?=1\"|\{)", source))
    said = set(re.findall(r"[A-Z_]+(?==)", table))
    assert sent == said | {"MONOTONIC_USEC"}
