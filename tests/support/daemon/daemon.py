"""A real daemon in a separate process, for tests and benchmarks; leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from mlxsup.client import Client

from support.daemon import warm
from support.daemon.log_gate import Provoked, violations
from support.daemon.warm import Process
from support.eventually import eventually

MAX_SHOWN = 200_000
"""Characters of logs that a test which fails prints."""


def toml_of(tables: dict[str, dict[str, Any]]) -> str:
    """Tables of plain values as TOML; a value that is a map becomes an inline table."""

    def value(item: object) -> str:
        if isinstance(item, bool):
            return str(item).lower()
        if isinstance(item, dict):
            return "{ " + ", ".join(f"{k} = {value(v)}" for k, v in item.items()) + " }"
        if isinstance(item, str):
            return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
        if isinstance(item, list):
            return f"[{', '.join(map(value, item))}]"
        return str(item)

    lines: list[str] = []
    for name, entries in tables.items():
        lines += [f"[{name}]", *(f"{key} = {value(item)}" for key, item in entries.items()), ""]
    return "\n".join(lines)


def fake(**options: Any) -> dict[str, Any]:
    """A model entry with the fake engine; `fake` options under that key."""
    return {"engine": "fake", "preload": True, **options}


class Daemon:
    """`mlxsup start` with its own configuration in a short temporary folder.

    Args:
        models: entries by name.
        supervisor: further keys of `[supervisor]`.
    """

    def __init__(
        self, models: dict[str, dict[str, Any]], supervisor: dict[str, Any] | None = None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
        self.config = self.folder / "config.toml"
        self.endpoint = f"ipc://{self.folder}/run/client.sock"
        self.logs = self.folder / "logs"
        self._provoked: list[Provoked] = []
        self.write_config(models, supervisor)
        self.process: Process | None = None
        self._output = self.folder / "output.txt"

    def write_config(
        self, models: dict[str, dict[str, Any]], supervisor: dict[str, Any] | None = None
    ) -> None:
        """Write the configuration file; without a warm pool, unless it is asked for."""
        top = {"runtime_dir": f"{self.folder}/run", "log_dir": f"{self.logs}", "warm_workers": 0}
        top |= supervisor or {}
        tables = {"supervisor": top} | {f'models."{name}"': e for name, e in models.items()}
        new = self.config.with_suffix(".new")
        new.write_text(toml_of(tables))
        new.replace(self.config)  # a reload that is under way reads the one or the other

    def __enter__(self) -> Self:
        with ExitStack() as unless_started:
            unless_started.push(self)  # what it has logged is shown, and nothing of it is left
            self.start()
            unless_started.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        processes = self.processes()
        try:
            if self.process is not None and self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(60)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    raise
            if error is None:
                assert [p for p in processes if is_alive(p)] == [], "processes are left"
                self.check_logs()
            else:
                print(self.output[-MAX_SHOWN:])
                print(self.log_text()[-MAX_SHOWN:])
        finally:
            for process in processes:
                if is_alive(process):
                    process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------ life

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """Starts it and returns when it answers."""
        with open(os.devnull) as nothing, self._output.open("a") as output:
            self.process = warm.start(
                self.start_command(),
                (nothing, output, output),
                {**os.environ, **(environment or {})},
            )
        process = self.process

        def answers() -> bool:
            assert process.poll() is None, f"the daemon ended: {self.output}"
            if not (self.folder / "run" / "client.sock").exists():
                return False
            try:
                with Client(self.endpoint) as client:
                    return bool(client.status()["pid"] == process.pid)
            except ConnectionError:
                return False

        eventually(answers)

    def kill(self) -> None:
        """SIGKILL to the supervisor, and nothing else."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def start_command(self) -> list[str]:
        """What `start` runs."""
        return self.command("start", "--config", str(self.config))

    # ------------------------------------------------------------ looking

    @staticmethod
    def command(*arguments: str) -> list[str]:
        """The command line of mlxsup."""
        return [sys.executable, "-m", "mlxsup.cli", *arguments]

    def run(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command of the command line against this daemon."""
        command = Daemon.command(*arguments, "--endpoint", self.endpoint)
        return warm.run_text(command, timeout_s=timeout_s)

    def client(self) -> Client:
        """A client of this daemon."""
        return Client(self.endpoint)

    @property
    def output(self) -> str:
        """What the daemon has printed."""
        return self._output.read_text() if self._output.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """The supervisor and its workers."""
        if self.process is None or self.process.poll() is not None:
            return []
        try:
            supervisor = psutil.Process(self.process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def log_text(self) -> str:
        """Every log file, with its name."""
        files = sorted(self.logs.glob("*")) if self.logs.exists() else []
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')}" for f in files)

    def provoke(self, word: str, *, model: str, pattern: str, at_most: int) -> None:
        """Tells the log gate what this test provokes in one worker's log; see `Provoked`."""
        self._provoked.append(Provoked(word=word, model=model, pattern=pattern, at_most=at_most))

    def check_logs(self) -> None:
        """Fails if a log holds a word that no healthy run writes (J1)."""
        own, workers = {"the daemon's output": self.output}, dict[str, str]()
        # Rotated files have a higher number the older they are.
        for file in sorted(self.logs.glob("*.log*"), reverse=True):
            model, _, _ = file.name.rpartition(".log")
            kind = own if model == "mlxsup" else workers
            kind[model] = kind.get(model, "") + file.read_text(errors="replace")
        problems = violations(own, workers, self._provoked)
        assert not problems, "\n".join([*problems, self.output, self.log_text()])


def is_alive(process: psutil.Process) -> bool:
    """Whether that very process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def row(client: Client, model: str) -> dict[str, Any]:
    """A model's row of the status."""
    return next(r for r in client.status()["models"] if r["name"] == model)


def wait_for_state(
    client: Client, model: str, states: str | Iterable[str], timeout_s: float = 60.0
) -> dict[str, Any]:
    """Waits until the model is in one of the states; returns its row."""
    wanted: Sequence[str] = [states] if isinstance(states, str) else list(states)
    return eventually(
        lambda: (seen := row(client, model))["state"] in wanted and seen,
        timeout_s=timeout_s,
        what=f"{model} in {' or '.join(wanted)}",
    )


def gone_within(processes: Sequence[psutil.Process], timeout_s: float) -> float:
    """Waits until all of them are gone; returns how long it took, in seconds."""
    start = time.monotonic()
    eventually(lambda: not any(is_alive(p) for p in processes), timeout_s=timeout_s)
    return time.monotonic() - start
