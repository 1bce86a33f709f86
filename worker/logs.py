"""The worker's log: one line per event, on standard error.

A line reads `2026-11-21T09:30:00.123Z INFO message key=value`. No line ever contains text of a
prompt or an answer; requests appear as their keys.
"""

from __future__ import annotations

import logging
from typing import TextIO

from mlxsup.protocol.log_format import LineFormatter


def configure(level: str, stream: TextIO) -> None:
    """Send every logger of this process to the stream; `level` is one of `LOG_LEVELS`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)
    # The parent watch notices a reader that is gone; here it must not cause a second error.
    logging.raiseExceptions = False


def set_level(level: str) -> None:
    """Change how much our own loggers write; `level` is one of `LOG_LEVELS`."""
    logging.getLogger("mlxsup").setLevel(level.upper())
