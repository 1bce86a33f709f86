"""What systemd itself says of the units that `mlxsup service` writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mlxsup.cli.service.systemd_unit import unit_text

from support.service_facts import facts

ANALYZE = shutil.which("systemd-analyze")

pytestmark = pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")

MOST_EXPOSED = 3.0
"""Of 10; a unit without any hardening has 9.6."""


def analyze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run(
        [ANALYZE, *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},  # or it knows no user
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def written(folder: Path, *, is_system: bool, name: str = "mlxsup") -> Path:
    """A unit whose program exists, with everything in its path that a unit file could misread."""
    program = folder / "my %h $HOME" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = folder / "mlxsup.service"
    odd = facts(program=program, config=folder / "a %h $b.toml", is_system=is_system, user="root")
    unit.write_text(unit_text(odd))
    return unit


@pytest.mark.parametrize("is_system", [False, True])
def test_systemd_has_nothing_to_say_of_a_unit(tmp_path: Path, is_system: bool) -> None:
    scope = [] if is_system else ["--user"]
    done = analyze(
        tmp_path, "verify", "--man=no", *scope, str(written(tmp_path, is_system=is_system))
    )
    assert (done.returncode, ours(done)) == (0, [])


def test_what_systemd_does_not_know_would_be_found(tmp_path: Path) -> None:
    unit = written(tmp_path, is_system=True)
    unit.write_text(unit.read_text().replace("WatchdogSec=10", "WatchdogSeconds=10"))
    done = analyze(tmp_path, "verify", "--man=no", str(unit))
    assert any("WatchdogSeconds" in line for line in ours(done))


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What it says of our unit, and not of those of the machine."""
    return [line for line in done.stderr.splitlines() if "mlxsup" in line or "rror" in line]


def test_a_unit_of_the_machine_exposes_little(tmp_path: Path) -> None:
    unit = written(tmp_path, is_system=True)
    done = analyze(tmp_path, "security", "--offline=true", "--json=short", str(unit))
    assert done.returncode == 0, done.stderr
    exposure = sum(float(row["exposure"] or 0) for row in json.loads(done.stdout))
    shown = analyze(tmp_path, "security", "--offline=true", str(unit)).stdout
    overall = float(shown.rpartition("mlxsup.service: ")[2].split()[0])
    assert exposure > 0
    assert overall <= MOST_EXPOSED
