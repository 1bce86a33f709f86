"""No decision hangs on the wall clock: it may jump by an hour (P7)."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("protocol", "supervisor", "worker", "client")
STAMPS = {"supervisor/worker_unit.py": 1, "supervisor/logs.py": 1}
"""Where a time of day is told to people, and how often."""

WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}


def test_the_wall_clock_is_read_for_stamps_only_P7() -> None:
    found: dict[str, int] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and (node.value.id, node.attr) in WALL
                ):
                    name = path.relative_to(ROOT).as_posix()
                    found[name] = found.get(name, 0) + 1
    assert found == STAMPS


def test_no_module_takes_a_clock_by_another_name_P7() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                    taken = {alias.name for alias in node.names}
                    assert taken <= {"datetime", "UTC", "timezone"}, path
