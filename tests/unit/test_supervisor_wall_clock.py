"""No deadline is measured with a clock that people can set (P7)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mlxsup.supervisor.core.actions import Announce

from support.core_driver import Driver, entry

ROOT = Path(__file__).parents[2]
WALL_CLOCKS = {
    "time", "time_ns", "gmtime", "localtime", "ctime", "asctime", "strftime", "datetime", "date",
}  # fmt: skip
SHOWN_ONLY = {
    ("supervisor/flight_files.py", "__init__"),
    ("supervisor/logs.py", "begin"),
    ("supervisor/logs.py", "block"),
    ("supervisor/logs.py", "write"),
    ("supervisor/workers/incarnation.py", "_end"),
    ("protocol/text.py", "timestamp"),
}
"""Functions that write a moment down for people to read. `_end` gives it to `LastExit.at`."""


def wall_clock_readers(source: Path) -> Iterator[tuple[str, str]]:
    """Functions of a file that ask for the time of day."""
    for function in ast.walk(ast.parse(source.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("time", "datetime")
                and node.attr in WALL_CLOCKS
            ):
                yield str(source.relative_to(ROOT)), function.name


def test_the_wall_clock_is_read_only_where_a_moment_is_shown_P7() -> None:
    sources = [
        source
        for package in ("protocol", "supervisor", "worker", "client")
        for source in (ROOT / package).rglob("*.py")
    ]
    assert {found for source in sources for found in wall_clock_readers(source)} == SHOWN_ONLY
    for source in sources:
        names = {
            alias.name
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime")
            for alias in node.names
        }
        assert not names & WALL_CLOCKS, f"{source} imports {names}"


def story_of(at: float) -> list[object]:
    """All that the core does about a crash that happened at a moment of the wall clock."""
    driver = Driver([entry()])
    driver.load()
    driver.come_up()
    driver.serve("a")
    actions = driver.exit(signal="SIGKILL", at=at)
    driver.come_up()
    assert driver.row()["last_exit"]["at"] == at, "it is shown"
    decided = [action for action in actions if not isinstance(action, Announce)]
    return [*decided, driver.state(), driver.row()["restarts"], driver.dispatched()]


def test_the_moment_of_an_exit_decides_nothing_P7() -> None:
    assert story_of(1e9) == story_of(1e9 - 3600) == story_of(1e9 + 3600)
