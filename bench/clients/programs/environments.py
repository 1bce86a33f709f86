"""Where a program is installed: a virtual environment, or a folder of npm's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

FOLDER = Path(__file__).parents[3] / "build" / "clients"
INSTALL_LIMIT_S = 1800.0
MOST_SAID = 300


class NotInstalled(Exception):
    """A program cannot be installed here; the message says why."""


class Environment(Protocol):
    """Packages that are installed, or can be."""

    def install(self) -> None:
        """Installs them, if they are not there.

        Raises:
            NotInstalled: it cannot be done.
        """

    @property
    def version(self) -> str:
        """Of the first of them."""

    @property
    def folder(self) -> Path:
        """Where they are."""

    @property
    def bin(self) -> Path:
        """Where their commands are."""


@dataclass(frozen=True, slots=True)
class Pypi:
    """Packages of PyPI in a virtual environment.

    Attributes:
        packages: the program's first.
    """

    packages: Sequence[str]

    @property
    def folder(self) -> Path:
        """See `Environment`."""
        return FOLDER / self.packages[0]

    @property
    def bin(self) -> Path:
        """See `Environment`."""
        return self.folder / "bin"

    @property
    def version(self) -> str:
        """See `Environment`."""
        ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
        command = [str(self.bin / "python"), "-c", ask, self.packages[0]]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def install(self) -> None:
        """See `Environment`."""
        if _is_there(self.folder, self.packages):
            return
        _run([sys.executable, "-m", "venv", "--clear", str(self.folder)])
        pip = [str(self.bin / "python"), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", *self.packages])
        _stamp(self.folder).write_text(" ".join(self.packages))


@dataclass(frozen=True, slots=True)
class Npm:
    """Packages of npm in a folder.

    Attributes:
        packages: the program's first.
    """

    packages: Sequence[str]

    @property
    def folder(self) -> Path:
        """See `Environment`."""
        return FOLDER / self.packages[0].rpartition("/")[2]

    @property
    def bin(self) -> Path:
        """See `Environment`."""
        return self.folder / "node_modules" / ".bin"

    @property
    def version(self) -> str:
        """See `Environment`."""
        path = self.folder / "node_modules" / self.packages[0] / "package.json"
        return str(json.loads(path.read_text())["version"])

    def install(self) -> None:
        """See `Environment`."""
        if _is_there(self.folder, self.packages):
            return
        if shutil.which("npm") is None:
            raise NotInstalled("there is no npm")
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        _run(["npm", "install", *quiet, "--prefix", str(self.folder), *self.packages])
        _stamp(self.folder).write_text(" ".join(self.packages))


def _stamp(folder: Path) -> Path:
    """Names the packages, once they are all there."""
    return folder / ".installed"


def _is_there(folder: Path, packages: Sequence[str]) -> bool:
    """Whether just these were installed."""
    stamp = _stamp(folder)
    return stamp.exists() and stamp.read_text() == " ".join(packages)


def _run(command: Sequence[str]) -> None:
    """Runs a step of an installation."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False,
            stdin=subprocess.DEVNULL, env=dict(os.environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"it takes longer than {INSTALL_LIMIT_S:g} s to install") from None
    if done.returncode != 0:
        raise NotInstalled(" ".join((done.stderr or done.stdout).split())[-MOST_SAID:])
