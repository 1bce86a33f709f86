"""The form of what the worker and the gateway log about themselves."""

from __future__ import annotations

import logging

from .text import escaped


class PrintableFormatter(logging.Formatter):
    """Escapes in messages and tracebacks whatever is not printable but the ends of their lines."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return "\n".join(map(escaped, super().format(record).split("\n")))
