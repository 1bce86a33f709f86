"""Workers that outlived a supervisor that was killed: recorded while alive, ended by the next start
(E6).

A worker normally ends by itself when its supervisor dies. One that cannot (stopped, or stuck in
native code on a kernel without a parent-death signal) is found here.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlxsup.protocol.regular_file import replace_file

from ..process_identity import process_identity

RECORD_NAME = "workers.json"
KILL_LIMIT_S = 10.0
"""How long killed leftovers may take to end: the kernel frees about 6 GB of them per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A worker of an earlier supervisor.

    Attributes:
        model: the model that it served.
        pid: its pid.
        is_gone: whether it ended after it was killed.
    """

    model: str
    pid: int
    is_gone: bool


class WorkerRecord:
    """The file that lists the live workers; has one writer and is replaced atomically.

    Attributes:
        is_held: whether the folder is this daemon's. The record of another one is left alone.

    Args:
        runtime_dir: where the file is.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.is_held = True
        self._path = runtime_dir / RECORD_NAME
        # One entry for each live worker, and for leftovers that could not be ended.
        self._workers: dict[int, dict[str, str | int]] = {}
        self._is_written = True

    def add(self, model: str, pid: int) -> None:
        """A worker was spawned.

        Raises:
            OSError: the file cannot be written.
        """
        identity = process_identity(pid)
        if identity is not None:
            self._note(model, pid, identity)
            self._write()

    def remove(self, pid: int) -> None:
        """A worker's exit was seen.

        Raises:
            OSError: the file cannot be written.
        """
        if self._workers.pop(pid, None) is not None:
            self._write()

    def write_again(self) -> bool:
        """Try once more if the file could not be written, or is gone; return whether it is up to
        date."""
        if not self._is_written or (self._workers and not self._path.exists()):
            try:
                self._write()
            except OSError:
                return False
        return True

    def sweep(self) -> list[Orphan]:
        """Kill what is left of an earlier supervisor's workers, and nothing else.

        A process is one of them only if both its pid and its start time are in the file.

        Raises:
            OSError: the file cannot be written.
        """
        found: list[tuple[str, str, psutil.Process]] = []
        for model, pid, identity in _read(self._path):
            if process_identity(pid) != identity:
                continue
            try:
                process = psutil.Process(pid)
                kill_group(pid)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
            found.append((model, identity, process))
        _, alive = psutil.wait_procs([process for *_, process in found], timeout=KILL_LIMIT_S)
        for model, identity, process in found:
            if process in alive:  # the next start looks for it again
                self._note(model, process.pid, identity)
        self._write()
        return [
            Orphan(model=model, pid=process.pid, is_gone=process not in alive)
            for model, _, process in found
        ]

    def _note(self, model: str, pid: int, identity: str) -> None:
        self._workers[pid] = {"model": model, "pid": pid, "identity": identity}

    def _write(self) -> None:
        self._is_written = False
        if not self.is_held:
            return
        replace_file(self._path, json.dumps(list(self._workers.values())).encode())
        self._is_written = True


def live_workers(runtime_dir: Path) -> list[int]:
    """Return the pids of the workers in the record of this folder that still live.

    Raises:
        OSError: there is a record, and it cannot be read.
    """
    record = _read(runtime_dir / RECORD_NAME)
    return [pid for _, pid, identity in record if process_identity(pid) == identity]


def _read(path: Path) -> list[tuple[str, int, str]]:
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return []
    result = []
    for value in values if isinstance(values, list) else ():
        match value:
            case {"model": str(model), "pid": int(pid), "identity": str(identity)} if pid > 1:
                result.append((model, pid, identity))
    return result


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process and, because each worker leads its own group, to that group."""
    if os.getpgid(pid) == pid:
        os.killpg(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)
