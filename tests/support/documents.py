"""Reading the project's own documents: sections and tables of Markdown."""

from __future__ import annotations

import re


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one of its level or above.

    Raises:
        AssertionError: there is no such heading, or more than one.
    """
    lines, levels = text.splitlines(), []
    is_code = False
    for line in lines:
        is_code ^= line.startswith("```")
        match = None if is_code else re.match(r"(#+) (.*)$", line)
        levels.append((len(match.group(1)), match.group(2)) if match else (0, ""))
    found = [number for number, (level, name) in enumerate(levels) if level and name == title]
    assert len(found) == 1, f"{len(found)} headings are called {title!r}"
    start = found[0]
    depth = levels[start][0]
    ends = [n for n in range(start + 1, len(lines)) if 0 < levels[n][0] <= depth]
    return "\n".join(lines[start + 1 : ends[0] if ends else len(lines)])


def rows_of(text: str) -> list[list[str]]:
    """The cells of the first table, without its heading; none where there is no table."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows or line.startswith("#"):
            break
    return rows[2:]
