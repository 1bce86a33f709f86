"""mlxsup from its wheel by uv and pipx: installed, and run without an installation.

Everything is real: requirements from the registry, in a home of the test, and the demo model.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from support.cli.installed_daemon import daemon_of
from support.environments import Environment, need_registry, run
from support.models.demo_model import demo_model_folder
from support.wheels import Built

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.timeout(1800)]

EXTRA = "cpu"
QUESTION = "What is the capital of France?"
TOOLS = ("uv", "pipx")


class Home:
    """A user's home with uv and pipx, and without mlxsup.

    Args:
        folder: the home.
        tools: the environment of uv and pipx.
    """

    def __init__(self, folder: Path, tools: Environment) -> None:
        self._folder = folder
        self._tools = tools

    @property
    def local(self) -> Environment:
        """Where both put the commands of what they install."""
        return Environment(folder=self._folder / ".local", elsewhere=self._folder)

    def run_well(self, tool: str, *arguments: str) -> str:
        """Runs one of the tools, which must succeed; returns what it printed."""
        local, path = self._folder / ".local", os.environ["PATH"]
        done = run(
            self._tools.folder / "bin" / tool, *arguments, cwd=self._folder,
            HOME=str(self._folder), PATH=f"{self._tools.folder}/bin{os.pathsep}{path}",
            UV_PYTHON=sys.executable, UV_CACHE_DIR=str(self._folder / "cache"),
            UV_TOOL_DIR=str(local / "uv"), UV_TOOL_BIN_DIR=str(local / "bin"),
            PIPX_DEFAULT_PYTHON=sys.executable, PIPX_HOME=str(local / "pipx"),
            PIPX_BIN_DIR=str(local / "bin"),
        )  # fmt: skip
        assert done.returncode == 0, f"{tool} {arguments}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment.make(tmp_path_factory.mktemp("tools") / "env")
    need_registry(environment.pip("install", "--quiet", *TOOLS), "uv and pipx")
    return environment


@pytest.fixture
def home(tools: Environment, tmp_path: Path) -> Home:
    return Home(tmp_path, tools)


def answer_of_installed(home: Home) -> str:
    """What the installed command prints when a real model is asked."""
    with daemon_of(home.local, model=f'path = "{demo_model_folder()}"') as config:
        return home.local.says("mlxsup", "generate", "m", QUESTION, "--config", str(config))


@pytest.mark.parametrize(
    "install", [("uv", "tool", "install"), ("pipx", "install")], ids=lambda words: words[0]
)
def test_it_is_installed_and_its_command_answers(
    built: Built, home: Home, install: tuple[str, ...]
) -> None:
    home.run_well(*install, f"{built.wheel}[{EXTRA}]")
    assert home.local.says("mlxsup", "--version").startswith("mlxsup ")
    assert "Paris" in answer_of_installed(home)


def test_uvx_runs_the_demo_without_an_installation(built: Built, home: Home) -> None:
    """In an environment of uv there is no pip, which downloads the model."""
    said = home.run_well("uvx", "--from", f"{built.wheel}[{EXTRA}]", "mlxsup", "demo")
    assert "one: 40 tokens, the same text as before, resumed 3 times\n" in said
    assert "two: 40 tokens, the same text as before\n" in said
    assert "all processes have ended\n" in said
    assert shutil.which("mlxsup", path=str(home.local.folder / "bin")) is None
