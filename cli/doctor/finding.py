"""What the doctor says of one thing, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing is broken."""
    PROBLEM = "problem"
    """Something does not work, or will not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it is about, in a word or two.
        level: how bad it is.
        what: a sentence without a full stop.
        why: why it matters; empty if all is well.
        fix: what to do, for people; empty if all is well, or if `command` does it.
        command: one line for a shell that fixes it; empty if no command alone does.
    """

    subject: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""
    command: str = ""


def ok(subject: str, what: str) -> Finding:
    """All is well with it."""
    return Finding(subject=subject, level=Level.OK, what=what)


def note(subject: str, what: str, *, why: str, fix: str = "", command: str = "") -> Finding:
    """Something to know."""
    return Finding(subject=subject, level=Level.NOTE, what=what, why=why, fix=fix, command=command)


def problem(subject: str, what: str, *, why: str, fix: str = "", command: str = "") -> Finding:
    """Something to fix."""
    return Finding(
        subject=subject, level=Level.PROBLEM, what=what, why=why, fix=fix, command=command
    )
