"""docs/gateway.md: its tables are those of the code, and it names every route."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from mlxsup.client import ErrorCode
from mlxsup.gateway import limits
from mlxsup.gateway.openai.errors import ROWS
from mlxsup.gateway.operator import ACTIONS
from mlxsup.protocol.gateway import DEFAULT_LISTEN, INSTALL_HINT
from mlxsup.supervisor.core.gateway import MOST_DELAY_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gateway.md").read_text()


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tools.gateway_document")


def test_its_tables_are_those_of_the_code(document: ModuleType) -> None:
    assert document.with_tables(PAGE) == PAGE, "python tools/gateway_document.py"


def test_every_error_of_a_daemon_has_a_status() -> None:
    assert list(ROWS) == list(ErrorCode)


def test_every_route_is_there_and_no_other() -> None:
    """Those of the page are looked at in test_gateway_page.py."""
    paths = sorted((ROOT / "gateway").rglob("*.py"))
    sources = [path.read_text() for path in paths if path.parent.name != "page"]
    written = [one for text in sources for one in re.findall(r'Route\(f?"(/[^"]+)"', text)]
    routes = [one.replace("{name:path}", "{id}") for one in written if "{action}" not in one]
    routes += [f"/models/{action}" for action in ACTIONS]
    shown = re.findall(r"^\| (?:GET|POST) `(/[^`]+)` \|", PAGE, re.MULTILINE)
    assert len(routes) == 15
    assert sorted(shown) == sorted(routes)


def test_the_limits_in_the_text_are_those_of_the_code() -> None:
    assert limits.HOLD_S == 5.0
    assert "For the first five seconds nothing is sent" in PAGE
    assert limits.COMMENT_INTERVAL_S == 1.0
    assert "at most once a second" in PAGE
    assert MOST_DELAY_S == 30.0
    assert PAGE.count("after at most 30 seconds") == 2
    assert DEFAULT_LISTEN in PAGE
    assert INSTALL_HINT in PAGE
