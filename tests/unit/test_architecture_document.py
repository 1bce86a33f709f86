"""docs/architecture.md: the table of transitions is that of the code, and every path exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from mlxsup.supervisor.core.lifecycle.states import Phase
from mlxsup.supervisor.core.lifecycle.triggers import Trigger

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = ("", "supervisor", "supervisor/core", "supervisor/core/lifecycle", "worker", "docs")
"""Where a path of the page may begin."""


@pytest.fixture
def transition_table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tools.transition_table")


def test_the_table_is_that_of_the_rules(transition_table: ModuleType) -> None:
    page = PAGE.read_text()
    assert transition_table.with_table(page) == page, "python tools/transition_table.py"


def test_the_table_has_every_trigger_and_every_phase(transition_table: ModuleType) -> None:
    header, _, *rows = transition_table.table()
    assert header.count("|") == len(get_args(Phase)) + 2
    assert [row.split("|")[1].strip() for row in rows] == [t.__name__ for t in get_args(Trigger)]


def test_every_file_that_it_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.(?:py|md))`", PAGE.read_text())
    assert len(named) >= 35
    missing = [
        name for name in named if not any((ROOT / folder / name).is_file() for folder in FOLDERS)
    ]
    assert missing == []
