"""Badly behaved clients, started and ended; `crowd.py` is what they do."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from .campaigns import TESTS, environment
from .measure import require


class Crowd:
    """A process of badly behaved clients, which has begun."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "promises.crowd", *arguments],
            cwd=TESTS,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        require(self._process.stdout.readline() == "begun\n", "the crowd did not begin")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        with self._process:  # closes its pipes and waits for it
            pass

    @property
    def is_over(self) -> bool:
        """Whether it has done what it came for."""
        return self._process.poll() is not None

    def result(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Tells it to end, and waits for what it says."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        # Not `communicate`, which knows nothing of what `readline` has read beyond its line.
        text = self._process.stdout.read()
        require(self._process.wait(timeout_s) == 0, "the crowd failed")
        found: dict[str, Any] = json.loads(text)
        return found
