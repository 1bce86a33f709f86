"""docs/reliability.md: the part between two markers is the run's, all else is people's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .campaigns import ROOT
from .results import NOT_DOCS, UncleanTreeError, git

DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- figures: written by `make promises`; whatever is written here by hand is lost -->"
END = "<!-- end of the figures -->"
PROSE = (NOT_DOCS, ":(exclude)README.md")
"""All but what people write about the figures: README's claims change with them."""


def figures_of(text: str) -> str:
    """What stands between the markers.

    Raises:
        ValueError: a marker is missing, or there more than once.
    """
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError("the document needs each of its two markers once")
    return inside


def with_figures(text: str, lines: Sequence[str]) -> str:
    """The document with other figures.

    Raises:
        ValueError: as `figures_of`.
    """
    figures = "\n".join(["", "", *lines]).rstrip() + "\n\n"
    return text.replace(BEGIN + figures_of(text) + END, BEGIN + figures + END)


def write_figures(commit: str, lines: Sequence[str], document: Path = DOCUMENT) -> None:
    """Writes them.

    Raises:
        UncleanTreeError: the tree differs from the commit outside docs/ and README.md.
    """
    changed = git("diff", "--name-only", commit, "--", ".", *PROSE)
    if changed:
        raise UncleanTreeError(
            f"more than docs/ and README.md differs from {commit[:12]}:\n{changed}"
        )
    document.write_text(with_figures(document.read_text(), lines))
