"""packaging/docker: its commands exist, and what it copies is not kept out."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tools.check_docs import wrong_command

from support.wheels import PROJECT

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "packaging" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
START = (DOCKER / "start").read_text()


@pytest.mark.parametrize("line", re.findall(r"^(?:    |exec )(mlxsup .*)$", START, re.MULTILINE))
def test_commands_of_the_first_process_exist(line: str) -> None:
    words = line.partition(">")[0].replace('"$model"', "model").split()
    assert wrong_command(words[1:]) is None


def test_first_start_adds_the_models_and_makes_one_key_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "mlxsup").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\necho secret\n')
    (tmp_path / "mlxsup").chmod(0o755)
    variables = {"HOME": str(tmp_path), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["sh", "-c", f"umask 022; sh {DOCKER}/start o/first 'a folder'"]
    for _ in range(2):
        subprocess.run(command, env=variables, check=True, capture_output=True)
    added, started = ["add o/first", "add a folder"], ["start --http 0.0.0.0:8484"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [*added, "key new first --operator", *started, *added, *started]
    key = tmp_path / "first-key"
    assert (key.read_text(), key.stat().st_mode & 0o777) == ("secret\n", 0o600)


def test_healthcheck_is_a_command() -> None:
    [words] = re.findall(r"^    CMD \[(.*)\]$", DOCKERFILE, re.MULTILINE)
    command = re.findall(r'"([^"]*)"', words)[1:]
    assert wrong_command(command) is None
    assert "--check" in command, "without it, `status` succeeds whatever it shows"


def test_backend_is_an_extra_and_every_source_of_the_build_is_let_in() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    backends = re.findall(r"BACKEND=(\w+)", DOCKERFILE)
    assert set(backends) == {"cpu", "cuda"} <= set(extras)
    allowed = set(re.findall(r"^!([\w./]+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    packages = {link.name for link in (ROOT / "typings" / "mlxsup").iterdir() if link.is_symlink()}
    assert packages | {"typings", "README.md", "LICENSE", "pyproject.toml"} <= allowed
    assert "packaging/docker" in allowed
