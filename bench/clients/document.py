"""What was measured (docs/clients.json), and the tables of docs/clients.md that are made from it.

What passes is written by a program: a test renders it again and compares, so that no
row can say more than a run has seen.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxsup.protocol.version import VERSION

from .case import Case, Outcome, Verdict

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "clients.md"
RESULTS = DOCS / "clients.json"
END = "<!-- end -->"

PACKAGES = "packages"
PROGRAMS = "programs"
COMMANDS = {
    PACKAGES: "python -m bench clients",
    PROGRAMS: "python -m bench clients --programs",
}
"""The parts of the results, and what measures each."""

Results = dict[str, Any]
"""What the file of results has."""


def read_results() -> Results:
    """The results that are kept."""
    results: Results = json.loads(RESULTS.read_text())
    return results


def keep(results: Results) -> None:
    """Writes the results, and the page anew."""
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(rendered(PAGE.read_text(), results))


# ---------------------------------------------------------------- results


def package_results(
    cases: Sequence[Case], outcomes: Mapping[str, Sequence[Outcome]], commit: str
) -> dict[str, Any]:
    """How each case went with each server, and with which versions.

    Args:
        cases: those that were run.
        outcomes: by the server's name, in the same order.
        commit: of the tree that was measured.
    """
    names = ("openai", "anthropic", "mlx-lm", "mlx")
    versions = {"mlxsup": VERSION, **{name: version(name) for name in names}}
    where = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    rows = [
        {
            "package": case.package,
            "what": case.name,
            "outcomes": {
                server: {"verdict": str(found[place].verdict), "reason": found[place].reason}
                for server, found in outcomes.items()
            },
        }
        for place, case in enumerate(cases)
    ]
    return {"commit": commit, "date": _today(), "versions": versions, "where": where, "cases": rows}


def program_result(
    name: str, program_version: str, does: str, result: str, commit: str
) -> dict[str, str]:
    """How the turn of a program went.

    Args:
        name: of the program.
        program_version: of what is installed; empty if nothing is.
        does: what its turn shows.
        result: `yes`, or why not.
        commit: of the tree that was measured.
    """
    return {
        "program": name, "version": program_version, "does": does, "result": result,
        "commit": commit, "date": _today(),
    }  # fmt: skip


def with_program(results: Results, new: dict[str, str], order: Sequence[str]) -> Results:
    """The results with one that was measured anew.

    Args:
        results: those that are kept.
        new: of the program.
        order: the names of all programs; what is kept of any other is left out.
    """
    kept = {one["program"]: one for one in [*results[PROGRAMS], new]}
    return {**results, PROGRAMS: [kept[name] for name in order if name in kept]}


# ---------------------------------------------------------------- the page


def package_table(measured: Mapping[str, Any]) -> list[list[str]]:
    """A row for each case: how it went with each server, and why it did not pass."""
    servers = list(measured["cases"][0]["outcomes"])
    rows = [["package", "what", *servers, "why not"]]
    for case in measured["cases"]:
        found = [case["outcomes"][server] for server in servers]
        reasons = "; ".join(one["reason"] for one in found if one["reason"])
        rows.append([case["package"], case["what"], *(one["verdict"] for one in found), reasons])
    return rows


def program_table(measured: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """A row for each program."""
    head = ["program", "version", "what it does", "", "measured"]
    rows = [
        [f"`{one['program']}`", one["version"], one["does"], one["result"], _when(one)]
        for one in measured
    ]
    return [head, *rows]


def blocks(results: Results) -> dict[str, str]:
    """What the page has for each part."""
    return {
        PACKAGES: _package_block(results[PACKAGES]),
        PROGRAMS: "\n".join(markdown(program_table(results[PROGRAMS]))),
    }


def rendered(page: str, results: Results) -> str:
    """The page with the tables of these results."""
    for name, block in blocks(results).items():
        head, rest = page.split(_mark(name), 1)
        _, after = rest.split(END, 1)
        page = f"{head}{_mark(name)}\n{block}\n\n{END}{after}"
    return page


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row is its head."""
    head, *others = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *others]
    return [f"| {' | '.join(cells)} |".replace("  |", " |") for cells in lines]


def _package_block(measured: Mapping[str, Any]) -> str:
    """The versions, the totals, and the table."""
    versions = ", ".join(f"{name} {number}" for name, number in measured["versions"].items())
    cases = measured["cases"]
    passed = [
        f"{server} {sum(case['outcomes'][server]['verdict'] == Verdict.PASSED for case in cases)}"
        for server in cases[0]["outcomes"]
    ]
    totals = f"Of {len(cases)} cases pass: {', '.join(passed)}."
    head = f"{versions}; {measured['where']}; {_when(measured)}. {totals}"
    return "\n".join([head, "", *markdown(package_table(measured))])


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _when(measured: Mapping[str, str]) -> str:
    return f"{measured['date']}, `{measured['commit'][:9]}`"


def _mark(name: str) -> str:
    return f"<!-- {name}: {COMMANDS[name]} -->\n"
