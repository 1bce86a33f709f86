"""The worker's log: one line for each thing that happened, on standard error.

A line reads `2026-11-21T09:30:00.123Z INFO message key=value`. No line ever holds text of a prompt
or of an answer; requests appear as their keys.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TextIO

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class LineFormatter(logging.Formatter):
    """Puts the UTC time with milliseconds and the level before the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """See `logging.Formatter.formatTime`."""
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{second}.{int(record.msecs):03d}Z"


def configure(level: str, stream: TextIO) -> None:
    """Sends every logger of this process to the stream; `level` is a key of `LEVELS`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("mlxsup").setLevel(LEVELS[level])
    # A reader that is gone is seen by the parent watch; here it is no reason for a second error.
    logging.raiseExceptions = False


def line(message: str, **facts: object) -> str:
    """The message followed by its facts as `key=value`; values with blanks are quoted."""
    return " ".join([message, *(f"{name}={_show(value)}" for name, value in facts.items())])


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    if not text or any(character.isspace() or character in '"=' for character in text):
        return json.dumps(text, ensure_ascii=False)
    return text
