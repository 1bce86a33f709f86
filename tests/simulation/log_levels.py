"""The oracle's own account of how much is logged: a change reaches workers that serve at once, and
others when they become READY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.log_level import ChangeLogLevel

from .books import Life
from .violation import check

if TYPE_CHECKING:
    from .record import Record

LEVELS = ("debug", "info", "warning", "error")
NO_LEVEL = "loud"


class LogLevels:
    """Who was told what."""

    def __init__(self) -> None:
        self._level = ""
        self._is_due = False
        self._due: set[ModelName] = set()
        self._refused: set[tuple[bytes, str]] = set()

    def asked(self, record: Record, connection: bytes, message: ChangeLogLevel) -> None:
        """Somebody changes it."""
        if message.level not in LEVELS:
            self._refused.add((connection, message.id))
            return
        self._level, self._is_due = message.level, True
        lives = [book.life for book in record.books.values() if book.life is not None]
        self._due = {one.model for one in lives if one.serves and not one.is_abandoned}
        record.count("log level changed")

    def is_ready(self, life: Life) -> None:
        """A worker has become READY."""
        if self._level:
            self._due.add(life.model)

    def set(self, level: str) -> None:
        """The daemon logs from this level on."""
        check("log level", self._is_due and level == self._level, level)
        self._is_due = False

    def told(self, life: Life, level: str) -> None:
        """A worker is notified."""
        is_right = life.model in self._due and level == self._level
        check("log level of a worker", is_right, f"{life.model}: {level}")
        self._due.remove(life.model)

    def fails(self, connection: bytes, id: str) -> None:
        """A command fails."""
        self._refused.discard((connection, id))

    def look(self) -> None:
        """After an event: everybody was told, and nonsense was refused."""
        check("no such log level", not self._refused, self._refused)
        check("log level not set", not self._is_due, self._level)
        check("log level not told", not self._due, self._due)
