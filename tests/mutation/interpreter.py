"""A copy of a tree and the warm process that runs pytest on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from .parts import Project
from .tree import environment_of
from support.verdict import NotShown

REAP_S = 60.0
"""A killed group is gone long before."""
START_S = 600.0
"""To import the libraries, which takes seconds."""

OF_WARM_PROCESS = {
    "OPENBLAS_NUM_THREADS": "1",  # it would start threads at import, which no child inherits
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
"""Variables that runs do not have: each request brings its own environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A copy with its warm process, which runs one thing at a time.

    Attributes:
        copy: the tree that bugs are planted in.
        process: `mutation.zygote`.
        connection: to it.
    """

    copy: Project
    process: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def start(cls, copy: Project) -> Interpreter:
        """Start one, and wait until it is warm.

        Raises:
            NotShown: if it holds what it must not, or does not start.
        """
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "mutation.zygote", str(theirs.fileno())],
            cwd=copy.root,
            env=environment_of(copy, OF_WARM_PROCESS),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        interpreter = cls(copy=copy, process=process, connection=ours)
        try:
            interpreter._receive(START_S)
        except NotShown:
            interpreter.close()
            raise
        return interpreter

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the warm process, which ends by itself if it is idle."""
        self.connection.close()
        try:
            self.process.wait(REAP_S)
        finally:
            self.process.kill()
            self.process.wait(REAP_S)

    def run(self, request: dict[str, Any], limit_s: float) -> int | None:
        """Do what `zygote.serve` describes in a new process group, which ends with it.

        Returns:
            The exit code as `Popen` has it; None if the run reached its limit and was killed.

        Raises:
            NotShown: if the warm process is gone.
        """
        try:
            self.connection.send_bytes(json.dumps(request).encode())
        except OSError as error:
            raise NotShown(f"the warm process is gone: {error}") from error
        child = self._receive(REAP_S)
        try:
            if self.connection.poll(limit_s):
                return int(self._receive(0.0))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # its children too, whatever became of it
        self._receive(REAP_S)
        return None

    def import_error(self, path: str, output: Path, limit_s: float) -> str:
        """Why a module cannot be imported, as its last words; empty if it can."""
        request = {
            "environment": environment_of(self.copy, {}),
            "output": str(output),
            "module": self.copy.module_of(path),
        }
        code = self.run(request, limit_s)
        if code == 0:
            return ""
        words = output.read_text("utf-8", "replace").strip().splitlines()
        return words[-1][:200] if words else f"its import ends with {code}"

    def _receive(self, limit_s: float) -> Any:
        try:
            if self.connection.poll(limit_s):
                return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise NotShown(f"the warm process is gone: {self.process.poll()}") from error
        raise NotShown(f"the warm process said nothing for {limit_s:g} s")
