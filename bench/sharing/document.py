"""docs/sharing.md: between two markers it is written from docs/sharing.json, the rest by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..claim import NOT_MEASURED, Claim, Place, markdown, shown, verdict_text
from .claims import CLAIMS
from .figures import ROOT, Figure, load

PLACE = Place(
    document=ROOT / "docs" / "sharing.md",
    begin="<!-- figures: written by `make sharing`; whatever is written here by hand is lost -->",
    end="<!-- end of the figures -->",
)
PICTURES = ROOT / "docs" / "images" / "sharing"
HEAD = ("", "claim", "on", "target", "figure", "next to", "runs", "commit", "")

CAPTIONS = {
    "bound": "What two accounts have received, over weight: the difference in parts of the bound",
    "shares": "Shares of three accounts with weights 1:2:4, and Jain's index at 10:1",
    "waits": "How long requests below a flood wait, in units of twice `aging_s`",
    "hits": "Requests that find their model loaded: 12 models, a budget for 4",
    "cost": "A step before and after sharing, and a dispatch from lines of different lengths",
}
"""What is seen in each picture."""


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
    return markdown(HEAD, (row(claim, figures.get(claim.id)) for claim in CLAIMS))


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


def render() -> None:
    """Writes the document anew."""
    PLACE.fill(written(load()))
