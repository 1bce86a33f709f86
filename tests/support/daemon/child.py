"""A child process that is asked and answers in lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

END_S = 120.0


class EndedError(Exception):
    """A child has ended without the answer that it owes."""


class Child:
    """A Python process with pipes; leaving the block kills it, unless it has ended before.

    Its standard error is that of this process.

    Attributes:
        pid: of the process.

    Args:
        arguments: behind `python`.
        cwd: where it runs; None for the folder of this process.
        env: its environment; None for that of this process.
    """

    def __init__(
        self, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._arguments = [str(argument) for argument in arguments]
        self._process = subprocess.Popen(
            [sys.executable, *self._arguments],
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def line(self) -> dict[str, Any]:
        """What it says next.

        Raises:
            EndedError: nothing; it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EndedError(self._how())
        return dict(json.loads(line))

    def ask(self, job: object = None) -> dict[str, Any]:
        """Gives it a line, and returns its answer.

        Raises:
            EndedError: it has ended instead.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EndedError(self._how()) from None
        return self.line()

    def end(self, timeout_s: float = END_S) -> dict[str, Any]:
        """Ends its standard input, and waits; returns what it says last, or nothing.

        Args:
            timeout_s: how long it may take; then it is killed.

        Raises:
            subprocess.TimeoutExpired: it took longer.
            EndedError: it has failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        is_late = threading.Event()

        def cut() -> None:
            is_late.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, cut)
        timer.start()
        try:
            # Before it is waited for, because it may say more than a pipe holds; and not by
            # `communicate`, which knows nothing of what `readline` has read beyond its line.
            with self._process.stdout:
                said = self._process.stdout.read()
            self._process.wait()
        finally:
            timer.cancel()
            timer.join()
        if is_late.is_set():
            raise subprocess.TimeoutExpired(self._arguments, timeout_s)
        if self._process.returncode:
            raise EndedError(self._how())
        return dict(json.loads(said or "{}"))

    def kill(self) -> None:
        """Ends it at once; one that has ended is left as it is."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it was given and has not read
                pipe.close()

    def _how(self) -> str:
        return f"{' '.join(self._arguments[:2])} ended with {self._process.wait()}"
