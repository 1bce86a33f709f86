"""What a check says when a promise is broken: its short name, and the particulars."""

from __future__ import annotations


class Violation(Exception):
    """A promise is broken.

    Args:
        name: of the check, as the summary and the list of planted bugs print it.
        detail: what was seen and what was expected.
    """

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


def check(name: str, is_kept: object, detail: object = "") -> None:
    """Raises Violation unless `is_kept`; not an assert, so that `python -O` keeps it."""
    if not is_kept:
        raise Violation(name, str(detail))
