"""Prints findings: a line each, and below it why it matters and what fixes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ..terminal.columns import wrapped
from ..terminal.output import Output, width_of
from .finding import Finding, Level

COLOURS = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "red"}
ORDER = (Level.OK, Level.NOTE, Level.PROBLEM)
"""The most important ones come last, next to the prompt."""

WORD_WIDTH = len(Level.PROBLEM)
INDENT = WORD_WIDTH + 2


def count(findings: Iterable[Finding], level: Level) -> int:
    """How many of them are that bad."""
    return sum(one.level is level for one in findings)


def finding_maps(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """As `--json` prints them."""
    return [asdict(one) | {"level": one.level.value} for one in findings]


def report_lines(findings: Sequence[Finding], output: Output) -> list[str]:
    """The lines for people."""
    width = width_of(sys.stdout)
    lines: list[str] = []
    for level in ORDER:
        for one in findings:
            if one.level is level:
                lines += _lines(one, width, output)
    return [*lines, *wrapped(summary(findings), width)]


def summary(findings: Sequence[Finding]) -> str:
    """`2 problems, 1 note`."""
    problems, notes = count(findings, Level.PROBLEM), count(findings, Level.NOTE)
    noted = f"{notes} note{'' if notes == 1 else 's'}"
    if problems:
        found = f"{problems} problem{'' if problems == 1 else 's'}"
        return f"{found}, {noted}" if notes else found
    return f"nothing is broken; {noted}" if notes else "nothing is wrong"


def _lines(one: Finding, width: int | None, output: Output) -> list[str]:
    word = one.level.value.ljust(WORD_WIDTH)
    styled = output.style(word, sys.stdout, fg=COLOURS[one.level])
    first, *more = wrapped(f"{word}  {one.subject}: {one.what}", width)
    lines = [styled + first[len(word) :], *(" " * INDENT + text for text in _again(more, width))]
    for name, text in (("why", one.why), ("fix", one.fix)):
        if text:
            lines += wrapped(f"{name}: {text}", width, INDENT)
    if one.command:
        command = output.style(one.command, sys.stdout, bold=True)
        lines.append(f"{' ' * INDENT}run: {command}")  # never broken: it is to be copied
    return lines


def _again(more: Sequence[str], width: int | None) -> list[str]:
    """The rest of a sentence, wrapped for the indented lines."""
    if not more or width is None:
        return list(more)
    return [line.strip() for line in wrapped(" ".join(more), width - INDENT)]
