"""The log gate: no log may hold a word that no healthy run writes (J1), unless it was provoked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

UNWANTED = ("rope", "Stream(", "InvalidStateError", "Failed to", "Traceback", "never awaited")
"""Words that must not appear in any log. `rope` is a whole word: "property" is none."""

TRACEBACK = "Traceback"

SHOWN_CHARACTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Provoked:
    """An unwanted word that a test provokes in the log of one model's workers.

    Nothing excuses a traceback of the supervisor. Its log and its output may quote a worker's last
    words, though: a line that names the model and holds both word and pattern is such a quotation.

    Attributes:
        word: one of `UNWANTED`.
        model: whose workers write it.
        pattern: a regular expression found in the line that holds the word, or, for a traceback,
            in the line of the exception that ends it.
        at_most: how often it may appear, over all generations.
    """

    word: str
    model: str
    pattern: str
    at_most: int

    def covers(self, model: str, word: str, line: str) -> bool:
        """Whether this finding is the one that was provoked; the count aside."""
        return (self.model, self.word) == (model, word) and bool(re.search(self.pattern, line))

    def is_quoted(self, word: str, line: str) -> bool:
        """Whether a line of the supervisor's quotes it."""
        names_model = re.search(rf"(?<![\w.-]){re.escape(self.model)}(?![\w-])", line) is not None
        return word != TRACEBACK and names_model and self.covers(self.model, word, line)


def findings(text: str) -> Iterator[tuple[str, str]]:
    """Each line that holds an unwanted word, as (word, line that explains it)."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        for word in UNWANTED:
            if re.search(rf"\b{word}\b", line) if word == "rope" else word in line:
                yield word, _exception_of(lines, number) if word == TRACEBACK else line


def violations(
    own: Mapping[str, str], workers: Mapping[str, str], provoked: Iterable[Provoked]
) -> list[str]:
    """What the gate objects to, one sentence for each finding.

    Args:
        own: what the supervisor wrote, by the name of the file.
        workers: what the workers printed, by model.
        provoked: what the test provokes.
    """
    allowed = list(provoked)
    problems = [
        f"{word!r} in {name}: {line[:SHOWN_CHARACTERS]}"
        for name, text in own.items()
        for word, line in findings(text)
        if not any(one.is_quoted(word, line) for one in allowed)
    ]
    counts = Counter[Provoked]()
    for model, text in workers.items():
        for word, line in findings(text):
            covering = next((one for one in allowed if one.covers(model, word, line)), None)
            if covering is None:
                problems.append(f"{word!r} in the log of {model}: {line[:SHOWN_CHARACTERS]}")
            else:
                counts[covering] += 1
    return problems + [
        f"{one.word!r} {count} times in the log of {one.model}, at most {one.at_most} expected"
        for one, count in counts.items()
        if count > one.at_most
    ]


def _exception_of(lines: list[str], number: int) -> str:
    """The first line behind a traceback's header that is not indented deeper than the header."""
    header = lines[number]
    indent = len(header) - len(header.lstrip())
    for line in lines[number + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            return line
    return header
