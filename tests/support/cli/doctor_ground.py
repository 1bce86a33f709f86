"""A user's home for `mlxsup doctor`: its own folder, configuration, shell, and tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from support.cli.cli import environment, run_cli
from support.daemon.daemon import fake, toml_of
from support.daemon.hub_caches import write_folder

TIME_LIMIT_S = 120.0


class Ground:
    """A folder that is a home and the current folder, with a sound `mlxsup.toml` in it.

    Attributes:
        folder: the home.
        config: the configuration file.
        variables: added to the environment of the shell.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mlxsup-d-", dir="/tmp"))
        self.config = self.folder / "mlxsup.toml"
        (self.folder / "tools").mkdir()
        write_folder(self.folder / "model")
        self.variables = {
            "HOME": str(self.folder),
            "HF_HOME": str(self.folder / "hf"),
            "PATH": f"{self.folder / 'tools'}{os.pathsep}{os.environ['PATH']}",
        }
        self.tool("mlxsup", f'exec {sys.executable} -m mlxsup.cli "$@"')
        self.write(fake(preload=False))  # no model is estimated, which takes seconds

    # ------------------------------------------------------------ what is there

    def model(self) -> dict[str, Any]:
        """The entry of a model with complete files."""
        return {"path": str(self.folder / "model")}

    def write(self, entry: dict[str, Any], **tables: dict[str, Any]) -> None:
        """Writes the configuration.

        Args:
            entry: of the model m.
            tables: others; keys of `supervisor` are added to those that there are.
        """
        top = {"runtime_dir": str(self.folder / "run"), "log_dir": str(self.folder / "logs")}
        supervisor = top | tables.pop("supervisor", {})
        self.config.write_text(toml_of({"supervisor": supervisor, **tables, "models.m": entry}))

    def tool(self, name: str, line: str) -> None:
        """A program on the path of the shell."""
        path = self.folder / "tools" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    # ------------------------------------------------------------ what runs

    def shell(self, lines: str) -> subprocess.CompletedProcess[str]:
        """Runs lines of a shell."""
        return subprocess.run(
            ["/bin/sh", "-c", lines],
            cwd=self.folder,
            env=environment(**self.variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )

    def doctor(self) -> tuple[int, list[dict[str, str]]]:
        """The exit code of `mlxsup doctor` and its findings; the current folder must be this."""
        done = run_cli("doctor", "--json", **self.variables)
        assert done.stdout, (done.returncode, done.stderr)
        return done.returncode, json.loads(done.stdout)["findings"]

    def end(self, pid: int) -> None:
        """SIGKILL, and waits until it is gone."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.kill()
            psutil.wait_procs([process], TIME_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for lock in self.folder.rglob("lock"):
            with suppress(ValueError, IndexError):
                pid = int(lock.read_text().split()[0])
                if pid != os.getpid():
                    self._end_daemon(pid)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_daemon(self, pid: int) -> None:
        """Ends a daemon of this home, and nobody else who has its pid by now."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if str(self.folder) in process.environ().get("HOME", ""):
                workers = process.children(recursive=True)
                process.kill()
                psutil.wait_procs([process, *workers], TIME_LIMIT_S)
