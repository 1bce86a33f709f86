"""What the doctor reads in the files of services, and what it says of them."""

from __future__ import annotations

import plistlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.doctor.checks.service import check_services
from mlxsup.cli.doctor.facts import Service
from mlxsup.cli.doctor.finding import Level
from mlxsup.cli.doctor.gathering.services import read_job, read_unit


@pytest.mark.parametrize(
    ("line", "program", "config"),
    [
        ("ExecStart=/a/mlxsup start --config /c/d.toml", "/a/mlxsup", "/c/d.toml"),
        ('ExecStart=:"/a b/mlxsup" start --config "/c/100%%.toml"', "/a b/mlxsup", "/c/100%.toml"),
        ("ExecStart=-/a/mlxsup start --config=/c", "/a/mlxsup", "/c"),
        ("ExecStart=/a/mlxsup start", "/a/mlxsup", None),
    ],
)
def test_a_unit_says_what_it_starts(
    tmp_path: Path, line: str, program: str, config: str | None
) -> None:
    unit = tmp_path / "mlxsup.service"
    unit.write_text(f"[Unit]\nDescription=x\n\n[Service]\n{line}\nRestart=on-failure\n")
    service = read_unit(unit, lingers=False)
    assert (service.problem, service.program, service.has_program) == ("", program, False)
    assert service.config == (None if config is None else Path(config))
    assert service.lingers is False


def test_the_home_of_a_unit_is_the_users(tmp_path: Path) -> None:
    unit = tmp_path / "mlxsup.service"
    unit.write_text("[Service]\nExecStart=%h/mlxsup start\n")
    assert read_unit(unit, lingers=None).program == str(Path.home() / "mlxsup")


@pytest.mark.parametrize("text", ["", "[Service]\n", '[Service]\nExecStart="open\n'])
def test_a_unit_that_starts_nothing_is_a_problem(tmp_path: Path, text: str) -> None:
    unit = tmp_path / "mlxsup.service"
    unit.write_text(text)
    [finding] = check_services([read_unit(unit, lingers=None)], None)
    assert finding.level is Level.PROBLEM
    assert "does not say what to start" in finding.what


def test_a_job_says_what_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "mlxsup.plist"
    words = ["/a/mlxsup", "start", "--service", "--config", "/c"]
    path.write_bytes(plistlib.dumps({"ProgramArguments": words}))
    service = read_job(path)
    assert (service.program, service.config) == ("/a/mlxsup", Path("/c"))
    assert not service.is_interactive
    path.write_bytes(plistlib.dumps({"ProgramArguments": words, "ProcessType": "Interactive"}))
    assert read_job(path).is_interactive
    for damaged in (b"", b"<plist", plistlib.dumps([]), plistlib.dumps({})):
        path.write_bytes(damaged)
        assert read_job(path).problem == "does not say what to start"


SOUND = Service(
    path=Path("/u"), manager="systemd", program="/a/mlxsup", has_program=True,
    is_own_program=True, config=Path("/c"), has_config=True, lingers=True,
)  # fmt: skip


def changed(**values: Any) -> Service:
    return replace(SOUND, **values)


@pytest.mark.parametrize(
    ("service", "level", "words"),
    [
        (SOUND, Level.OK, "/u starts /a/mlxsup"),
        (changed(has_program=False), Level.PROBLEM, "which is not there"),
        (changed(is_own_program=False), Level.NOTE, "another mlxsup"),
        (changed(has_config=False), Level.PROBLEM, "names /c, which does not exist"),
        (changed(config=Path("/d")), Level.NOTE, "names /d, and commands here read /c"),
        (changed(lingers=False), Level.NOTE, "only while you are logged in"),
        (changed(manager="launchd", is_interactive=False), Level.NOTE, "ProcessType"),
    ],
)
def test_what_is_said_of_a_service(service: Service, level: Level, words: str) -> None:
    [finding] = check_services([service], Path("/c"))
    assert finding.level is level
    assert words in finding.what
    assert level is Level.OK or finding.fix or finding.command
