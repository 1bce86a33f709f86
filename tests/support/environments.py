"""Virtual environments of tests, with nothing of the checkout on their paths."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest


def outside_variables() -> dict[str, str]:
    """The variables of this process without those that lead to this checkout or to a daemon."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MLXSUP"))}


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without anything of this checkout on its path."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**outside_variables(), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_well(*command: str | Path, cwd: Path) -> str:
    """Runs a command that must succeed; returns what it printed."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment.

    Attributes:
        folder: where it is.
        elsewhere: a working folder far from the checkout.
    """

    folder: Path
    elsewhere: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        """A new one, with nothing installed, pip neither."""
        venv.create(folder, symlinks=True, with_pip=False)
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        return cls(folder=folder, elsewhere=elsewhere)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where its packages are."""
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs the tests' own pip for this environment."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        return run(*pip, *arguments, cwd=self.elsewhere)

    def pip_well(self, *arguments: str | Path) -> None:
        """Runs pip, which must succeed."""
        done = self.pip(*arguments)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    def install(self, *what: str | Path) -> None:
        """Installs wheels that are there, without what they require."""
        how = ("--quiet", "--no-deps", "--no-index", "--no-compile")
        self.pip_well("install", *how, *what)

    def lend_libraries(self) -> None:
        """Makes the libraries of the running environment importable here, after what is here.

        Files of a kind that run at the start of Python, the editable install of mlxsup among them,
        are not looked at in a folder that is only named in a file like this one.
        """
        lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.site_packages / "lent.pth").write_text("".join(f"{path}\n" for path in sorted(lent)))

    def says(self, *command: str) -> str:
        """What a program of this environment prints, run in a folder far from the checkout."""
        return run_well(self.folder / "bin" / command[0], *command[1:], cwd=self.elsewhere)

    def evaluates(self, code: str) -> str:
        """What a piece of Python prints there."""
        return self.says("python", "-c", code).strip()


def need_registry(done: subprocess.CompletedProcess[str], what: str) -> None:
    """Skips if no package registry can be reached; any other trouble is a failure."""
    said = done.stdout + done.stderr
    if done.returncode and any(
        sign in said
        for sign in (
            "NewConnectionError",
            "NameResolutionError",
            "ConnectTimeoutError",
            "ProxyError",
        )
    ):
        pytest.skip(f"no package registry can be reached, which {what} would come from")
    assert done.returncode == 0, said
