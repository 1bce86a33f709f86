"""Badly behaved clients, started and ended; `crowd.py` is what they do."""

from __future__ import annotations

from typing import Any

from .campaigns import TESTS, environment
from support.child import Child, EndedError
from support.verdict import NotShown


class Crowd(Child):
    """A process of badly behaved clients, which has begun."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("-m", "promises.crowd", *arguments, cwd=TESTS, env=environment())
        try:
            self.line()
        except EndedError as error:
            raise NotShown(f"the crowd did not begin: {error}") from None

    def result(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Tells it to end, and waits for what it says."""
        try:
            return self.end(timeout_s)
        except EndedError as error:
            raise NotShown(f"the crowd failed: {error}") from None
