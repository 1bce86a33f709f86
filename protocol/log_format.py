"""The form of what the worker and the gateway log about themselves."""

from __future__ import annotations

import logging

from .text import escaped, timestamp


class LineFormatter(logging.Formatter):
    """Puts the UTC time with milliseconds and the level before the message; escapes in messages and
    tracebacks all that is not printable but the ends of their lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return "\n".join(map(escaped, super().format(record).split("\n")))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """See `logging.Formatter.formatTime`."""
        return timestamp(record.created, has_milliseconds=True)
