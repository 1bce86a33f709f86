"""Messages that change how much is logged while everything runs."""

from __future__ import annotations

from typing import ClassVar

from .message import Command, Message, record


@record
class ChangeLogLevel(Command):
    """Client → supervisor: log from this level on, in the daemon and its workers; answered at once.

    Attributes:
        level: one of `text.LOG_LEVELS`; until it is changed again, or the daemon ends.
    """

    TYPE: ClassVar[str] = "log_level"
    level: str


@record
class LogLevel(Message):
    """Supervisor → worker: log from this level on; nothing answers."""

    TYPE: ClassVar[str] = "set_log_level"
    level: str
