"""The plan of folders that no configuration names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxsup.cli.commands.plan import plan_of, plan_of_folders
from mlxsup.supervisor.config.folders import config_of_folders

from support.hub_caches import MODEL, write_folder


def test_folders_are_planned_as_a_file_that_names_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "a")
    write_folder(tmp_path / "b", {**MODEL, "config.json": b"{"})
    folders = {"whole": tmp_path / "x" / os.pardir / "a", "broken": Path("b")}
    plan = plan_of_folders(folders)
    assert plan == plan_of(config_of_folders(folders)[0])
    whole, broken = plan["models"]
    assert whole["problem"] is None
    assert str(tmp_path / "b") in broken["problem"]
