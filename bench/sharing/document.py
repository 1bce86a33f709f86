"""docs/sharing.md: between two markers it is written from docs/sharing.json, the rest by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .claims import CLAIMS, Claim
from .figures import ROOT, Figure, load, shown
from support.verdict import Verdict

DOCUMENT = ROOT / "docs" / "sharing.md"
PICTURES = ROOT / "docs" / "images" / "sharing"
BEGIN = "<!-- figures: written by `make sharing`; whatever is written here by hand is lost -->"
END = "<!-- end of the figures -->"
NOT_MEASURED = "*not measured*"
HEAD = ("", "claim", "on", "target", "figure", "next to", "runs", "commit", "")

CAPTIONS = {
    "bound": "What two accounts have received, over weight: the difference in parts of the bound",
    "shares": "Shares of three accounts with weights 1:2:4, and Jain's index at 10:1",
    "waits": "How long requests below a flood wait, in units of twice `aging_s`",
    "hits": "Requests that find their model loaded: 12 models, a budget for 4",
    "cost": "A step before and after sharing, and a dispatch from lines of different lengths",
}
"""What is seen in each picture."""


def verdict_text(verdict: Verdict) -> str:
    """A miss must be seen."""
    return f"**{verdict}**" if verdict is Verdict.MISSED else str(verdict)


def row(claim: Claim, found: Figure | None) -> tuple[str, ...]:
    """The cells of one claim."""
    start = (f'<a id="{claim.id}"></a>', claim.what, claim.on)
    if found is None:
        return (*start, claim.target, NOT_MEASURED, "", "", "", "")
    peers = "; ".join(f"{name}: {shown(claim, theirs)}" for name, theirs in found.peers.items())
    text = shown(claim, found.found) + (f". {found.note}" if found.note else "")
    runs, commit = f"{found.runs:,}", f"`{found.commit[:9]}`"
    return (*start, found.target, text, peers, runs, commit, verdict_text(found.verdict))


def table(figures: Mapping[str, Figure]) -> list[str]:
    """One row for each claim, in Markdown."""
    rows = [HEAD, *(row(claim, figures.get(claim.id)) for claim in CLAIMS)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return [lines[0], "|" + "---|" * len(HEAD), *lines[1:]]


def pictures(folder: Path = PICTURES) -> list[str]:
    """Those that have been drawn."""
    return [
        line
        for name, caption in CAPTIONS.items()
        if (folder / f"{name}.png").exists()
        for line in (f"![{caption}](images/sharing/{name}.png)", "", f"*{caption}.*", "")
    ]


def machines(figures: Mapping[str, Figure]) -> list[str]:
    """Where all of it was measured."""
    return [f"Measured on {name}." for name in sorted({one.machine for one in figures.values()})]


def written(figures: Mapping[str, Figure]) -> list[str]:
    """All lines between the markers."""
    return [*table(figures), "", *machines(figures), "", *pictures()]


def with_figures(text: str, lines: Sequence[str]) -> str:
    """The document with other figures.

    Raises:
        ValueError: a marker is missing, or there more than once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError("docs/sharing.md needs each of its two markers once")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return "\n".join([before + BEGIN, "", *lines]).rstrip() + f"\n\n{END}{after}"


def render() -> None:
    """Writes the document anew."""
    DOCUMENT.write_text(with_figures(DOCUMENT.read_text(), written(load())))
