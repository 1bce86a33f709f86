"""What a campaign says of a promise: every campaign's exit code, and what the documents print."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """How a promise stands after a run."""

    KEPT = "kept"
    MISSED = "MISSED"
    """It was broken, or its figure is past its target."""
    NOT_SHOWN = "not shown"
    """The run could not judge: a fault never struck, a mutant hung, the disk was full."""
    REPORTED = "reported"
    """The figure has no target."""


EXIT_CODES = {Verdict.KEPT: 0, Verdict.REPORTED: 0, Verdict.MISSED: 4, Verdict.NOT_SHOWN: 3}
"""What `python -m campaign` and the like exit with; any other code, 1 of a traceback too, means not
shown."""


class NotShown(Exception):
    """A campaign could not do what it was to judge by.

    Args:
        reason: why, as the document will say it.
    """
