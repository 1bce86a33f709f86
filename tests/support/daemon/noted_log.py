"""A daemon's log that keeps its lines for a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlxsup.supervisor.logs import DaemonLog


class Log(DaemonLog):
    """What is logged, line by line; entries of the flight recorder among them."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.flight: Any = SimpleNamespace(write=lambda entry: self.lines.append(("flight", entry)))

    def write(self, level: str, message: str, **facts: object) -> None:
        self.lines.append((level, message, facts))

    def block(self, text: str) -> None:
        self.lines.append((text,))

    def change_level(self, level: str) -> None:
        self.lines.append(("level", level))
