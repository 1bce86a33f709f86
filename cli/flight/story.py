"""What `why` says about a model, a request or a daemon: sentences, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxsup.protocol.flight import Recorded
from mlxsup.protocol.text import timestamp

from ..terminal.columns import wrapped
from ..terminal.quantities import format_duration

ADVICE = "what to do:"


@dataclass(slots=True, kw_only=True)
class Story:
    """What `why` says about one subject.

    Attributes:
        kind: `daemon`, `model` or `request`.
        name: of the model, or the id of the request; empty for the daemon.
        sentences: the most important first; those that belong to the one above begin with two
            blanks.
        advice: what to do, the most useful first.
        entries: what it is based on, oldest first.
    """

    kind: str
    name: str = ""
    sentences: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    entries: list[Recorded] = field(default_factory=list)

    def say(self, sentence: str, *, below: bool = False) -> None:
        """Adds a sentence; `below`: it belongs to the one above."""
        self.sentences.append(f"  {sentence}" if below else sentence)

    def lines(self, width: int | None) -> list[str]:
        """As people read it.

        Args:
            width: columns of the terminal; None for anything else.
        """
        lines = _fitted(self.sentences, width)
        if self.advice:
            lines += [ADVICE, *_fitted([f"  {one}" for one in self.advice], width)]
        return lines


def moment(at: float, now: float) -> str:
    """`2026-11-23T03:12:05Z (2m 5s ago)`."""
    return f"{timestamp(at)} ({format_duration(now - at)} ago)"


def seconds(value: float) -> str:
    """`0.9 s`, or `2m 5s`."""
    return f"{value:.1f} s" if value < 60 else format_duration(value)


def counted(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _fitted(sentences: Sequence[str], width: int | None) -> list[str]:
    lines: list[str] = []
    for sentence in sentences:
        text = sentence.lstrip(" ")
        lines += wrapped(text, width, len(sentence) - len(text))
    return lines
