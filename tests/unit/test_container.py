"""packaging/docker: its commands exist, and what it copies is not kept out."""

from __future__ import annotations

import re
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


def test_healthcheck_is_a_command() -> None:
    [words] = re.findall(r"^    CMD \[(.*)\]$", DOCKERFILE, re.MULTILINE)
    assert wrong_command(re.findall(r'"([^"]*)"', words)[1:]) is None


def test_backend_is_an_extra_and_every_source_of_the_build_is_let_in() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    backends = re.findall(r"BACKEND=(\w+)", DOCKERFILE)
    assert set(backends) == {"cpu", "cuda"} <= set(extras)
    allowed = set(re.findall(r"^!([\w./]+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    packages = {link.name for link in (ROOT / "typings" / "mlxsup").iterdir() if link.is_symlink()}
    assert packages | {"typings", "README.md", "LICENSE", "pyproject.toml"} <= allowed
    assert "packaging/docker" in allowed
