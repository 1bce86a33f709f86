"""Every block of README, in order, as a newcomer runs them.

The home is empty but for a Hugging Face cache that holds the real small model, the environment for
the wheel, which is installed by README's own line; the libraries are lent.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from mlxsup.cli.port import refused_at
from mlxsup.protocol.folders import DEFAULT_LISTEN
from mlxsup.protocol.gateway import Address

from support.daemon.hub_caches import write_repository
from support.environments import Environment, outside_variables, run
from support.models.demo_model import demo_model_folder
from support.wheels import PROJECT, Built

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.timeout(1200)]

README = Path(__file__).parents[2] / "README.md"


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        line: of its first fence, from 1.
        language: what stands behind that fence; may be empty.
        text: what is between the fences.
    """

    line: int
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a block for a shell: lines with those that continue them, no comments."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [re.sub(r"\s+# .*", "", line) for line in joined.splitlines() if line]


def blocks() -> list[Block]:
    """Every fenced block, in order."""
    text = README.read_text()
    return [
        Block(text[: found.start()].count("\n") + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


REPO = "mlx-community/SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
ANSWER = "Paris"

PIP = """\
#!{python}
import os, re, sys
words = sys.argv[1:]
sources = [re.fullmatch(r"mlxsup(?:\\[([a-z,]+)\\])?", word) for word in words]
assert words[0] == "install" and set(filter(None, (sources[1][1] or "").split(","))) <= {extras}
how = ["install", "--quiet", "--no-deps", "--no-index", "{wheel}"]
os.execv("{python}", ["{python}", "-m", "pip", "--python", "{environment}", *how])
"""
"""In README `mlxsup` comes from the index; here it is the wheel. Its requirements are lent."""


def is_taken() -> bool:
    """True if another program listens where README has the gateway."""
    return refused_at(Address.parse(DEFAULT_LISTEN)) is not None


class Newcomer:
    """Somebody with a home, an environment and README.

    Args:
        home: their home; a short path, because sockets will be in it.
        environment: which `pip install` fills.
        wheel: what they install.
    """

    def __init__(self, home: Path, environment: Environment, wheel: Path) -> None:
        self._home = home
        self._environment = environment
        commands = environment.folder / "bin"
        extras = set(PROJECT["project"]["optional-dependencies"])
        python = environment.python
        text = PIP.format(python=sys.executable, wheel=wheel, environment=python, extras=extras)
        (commands / "pip").write_text(text)
        (commands / "pip").chmod(0o755)
        (home / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
        self._variables = {
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def run_block(self, block: Block) -> str:
        """Runs or checks one block; returns what it printed.

        Raises:
            AssertionError: it ended with an error.
        """
        if block.language == "text":
            return ""
        file = self._home / f"block-of-line-{block.line}"
        file.write_text(block.text)
        command = {
            "sh": ("sh", "-e", file),
            "python": (self._environment.python, file),
            "toml": ("sh", "-c", f"mlxsup config check {file}"),
        }[block.language]
        done = run(*command, cwd=self._home, **self._variables)
        said = f"{done.stdout}{done.stderr}"
        assert done.returncode == 0, f"README, line {block.line}: {block.text}\n{said}"
        return said

    def ask(self, block: Block) -> list[str]:
        """Runs a block, a command of which has a model answer; what that printed, as it came.

        Raises:
            AssertionError: a command ended with an error.
        """
        commands = block.commands
        [asks] = [at for at, command in enumerate(commands) if QUESTION in command]
        self._run_commands(block, commands[:asks])
        pieces = self._read_answer(block, commands[asks])
        self._run_commands(block, commands[asks + 1 :])
        return pieces

    def _run_commands(self, block: Block, commands: list[str]) -> None:
        text = "".join(f"{command}\n" for command in commands)
        self.run_block(Block(block.line, block.language, text))

    def _read_answer(self, block: Block, question: str) -> list[str]:
        errors = self._home / "errors"
        with (
            errors.open("wb") as said,
            subprocess.Popen(
                ["sh", "-e", "-c", question],
                stdout=subprocess.PIPE,
                stderr=said,
                cwd=self._home,
                env={**outside_variables(), **self._variables},
            ) as asking,
        ):
            assert asking.stdout is not None
            pieces = list(iter(partial(os.read, asking.stdout.fileno(), 65536), b""))
        assert asking.returncode == 0, f"README, line {block.line}: {errors.read_text()}"
        return [piece.decode() for piece in pieces]

    def stop(self) -> None:
        """Stops a daemon that is left."""
        run("sh", "-c", "mlxsup stop --now", cwd=self._home, **self._variables)


@contextmanager
def newcomer(built: Built, folder: Path) -> Iterator[Newcomer]:
    environment = Environment.make(folder / "env")
    environment.lend_libraries()
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as home:
        files = {path.name: path.read_bytes() for path in demo_model_folder().iterdir()}
        write_repository(Path(home) / ".cache/huggingface/hub", REPO, files)
        somebody = Newcomer(Path(home), environment, built.wheel)
        try:
            yield somebody
        finally:
            somebody.stop()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.skipif(is_taken(), reason=f"{DEFAULT_LISTEN} is taken")
def test_every_block_ends_well_and_the_first_answer_says_paris_before_it_ends(
    built: Built, tmp_path: Path
) -> None:
    answers = []
    with newcomer(built, tmp_path) as somebody:
        for block in blocks():
            if block.language == "sh" and QUESTION in block.text:
                answers.append(somebody.ask(block))
            else:
                somebody.run_block(block)
    [pieces] = answers
    assert ANSWER in "".join(pieces)
    assert len(pieces) > 1, "an answer that is streamed is there in part before its end"
