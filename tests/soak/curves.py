"""The curves of a run as a Markdown table and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from .samples import Curve, Sample

WIDTH, HEIGHT, EDGE = 760, 240, 56
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700", "#0a7ea4")
PICTURES = {"memory": "RSS in MB", "files": "files", "threads": "threads", "logs": "log in MB"}


def table(curves: Sequence[Curve]) -> str:
    """One row for each series."""
    lines = [
        "| series, after the warm-up | first | last | least | most | fitted growth | bound | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in curves:
        bound = "does not change" if one.limit is None else f"≤{one.limit:.3g}"
        numbers = (one.first, one.last, one.least, one.most)
        shown = " | ".join(f"{number:.4g}" for number in numbers)
        verdict = "MISSED" if one.problem else "kept"
        lines.append(f"| {one.name} | {shown} | {one.growth:+.2f} | {bound} | {verdict} |")
    return "\n".join(lines) + "\n"


def write_pictures(samples: Sequence[Sample], folder: Path) -> list[Path]:
    """One `soak-*.svg` for each of `PICTURES`."""
    paths = []
    for name, what in PICTURES.items():
        lines = {
            series.partition(" of ")[2]: [(s.at_s, s.values[series]) for s in samples]
            for series in samples[-1].values
            if series.startswith(f"{what} of ") and all(series in s.values for s in samples)
        }
        paths.append(folder / f"soak-{name}.svg")
        paths[-1].write_text(picture(what, lines))
    return paths


def picture(title: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """An SVG with a polyline for each series, over minutes, from 0."""
    points = [point for line in lines.values() for point in line] or [(0.0, 0.0)]
    most_s, most = max(1e-9, max(x for x, _ in points)), max(1e-9, max(y for _, y in points))

    def place(x: float, y: float) -> str:
        across = EDGE + x / most_s * (WIDTH - 2 * EDGE)
        return f"{across:.1f},{HEIGHT - EDGE / 2 - y / most * (HEIGHT - 1.5 * EDGE):.1f}"

    def text(x: float, y: float, words: str, colour: str = "#57606a") -> str:
        return f'<text x="{x:g}" y="{y:g}" fill="{colour}">{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(EDGE, 16, title),
        text(4, EDGE, f"{most:.4g}"),
        text(4, HEIGHT - EDGE / 2, "0"),
        text(WIDTH - 2 * EDGE, HEIGHT - 8, f"{most_s / 60:.1f} min"),
        f'<polyline fill="none" stroke="#d0d7de" points="{place(0, most)} {place(0, 0)}'
        f' {place(most_s, 0)}"/>',
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        along = " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{along}"/>')
        parts.append(text(EDGE + 110 * (1 + number), 16, name, colour))
    return "\n".join([*parts, "</svg>"]) + "\n"
