"""The tables of docs/clients.md: they are kept there by the runs that measured them."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from mlxsup.protocol.version import VERSION

from .case import Case, Outcome, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
END = "<!-- end -->"
PACKAGES = "packages: python -m bench clients"
PROGRAMS = "programs: python -m bench clients --programs"

PROGRAMS_HEAD = ("program", "version", "what it does", "")


def package_table(
    cases: Sequence[Case], outcomes: Mapping[str, Sequence[Outcome]]
) -> list[list[str]]:
    """A row for each case: how it went with each server, and why it did not pass.

    Args:
        cases: those that were run.
        outcomes: by the server's name, in the same order.
    """
    rows = [["package", "what", *outcomes, "why not"]]
    for place, case in enumerate(cases):
        here = [of_server[place] for of_server in outcomes.values()]
        reasons = [one.reason for one in here if one.verdict is not Verdict.PASSED]
        rows.append(
            [case.package, case.name, *(str(one.verdict) for one in here), "; ".join(reasons)]
        )
    return rows


def package_block(rows: Sequence[Sequence[str]]) -> str:
    """The versions, the totals, and the table."""
    names = ("openai", "anthropic", "mlx-lm", "mlx")
    shown = ", ".join(f"{name} {version(name)}" for name in names)
    where = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    head, *cases = rows
    passed = [
        f"{name} {sum(row[column] == Verdict.PASSED for row in cases)}"
        for column, name in enumerate(head[2:-1], 2)
    ]
    lines = [
        f"mlxsup {VERSION}, {shown}; {where}. Of {len(cases)} cases pass: {', '.join(passed)}.",
        "",
        *markdown(rows),
    ]
    return "\n".join(lines)


def program_rows(
    page: str, new: Mapping[str, Sequence[str]], order: Sequence[str]
) -> list[list[str]]:
    """The rows of the programs that the page has, with those that were measured anew.

    Args:
        page: its text.
        new: by the program's name.
        order: of all programs; a row of any other is left out.
    """
    lines = [line for line in block_of(page, PROGRAMS).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in _split(line)] for line in lines[2:]]
    kept: dict[str, Sequence[str]] = {row[0].strip("`"): row for row in cells}
    rows = kept | dict(new)
    return [list(PROGRAMS_HEAD), *(list(rows[name]) for name in order if name in rows)]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row is its head."""
    head, *others = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *others]
    return [f"| {' | '.join(cells)} |".replace("  |", " |") for cells in lines]


def block_of(page: str, name: str) -> str:
    """What stands between the mark of this name and the next end."""
    _, rest = page.split(f"<!-- {name} -->\n", 1)
    return rest.split(END, 1)[0]


def with_block(page: str, name: str, block: str) -> str:
    """The page with something else there."""
    head, rest = page.split(f"<!-- {name} -->\n", 1)
    _, after = rest.split(END, 1)
    return f"{head}<!-- {name} -->\n\n{block}\n\n{END}{after}"


def keep(name: str, block: str) -> None:
    """Writes a block into the page."""
    PAGE.write_text(with_block(PAGE.read_text(), name, block))


def _split(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return [cell.replace("\\|", "|") for cell in cells]
