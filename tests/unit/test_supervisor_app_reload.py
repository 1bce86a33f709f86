"""A reload is one event: what models need goes with the settings and the entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor import app as app_module
from mlxsup.supervisor.core.events import Reloaded

from support.needs import GIB, need
from support.played_app import Case


def test_the_core_gets_the_needs_of_the_file_with_everything_else_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[models.m]\npath = "{tmp_path}"\n')
    needs = {ModelName("m"): need(GIB)}
    case = Case(monkeypatch, config_path=path)
    monkeypatch.setattr(app_module, "room_for", lambda *_: 10)
    case.briefing.needs_of = lambda config: needs
    case.run(lambda: case.reload())
    [reloaded] = case.core.events
    assert isinstance(reloaded, Reloaded)
    assert reloaded.needs == needs
    assert [entry.name for entry in reloaded.models] == ["m"]
