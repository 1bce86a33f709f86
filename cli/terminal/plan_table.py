"""The plan of `mlxsup plan` as people read it: a table, and what follows from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import width_of
from .tables import Column, table
from .text import format_bytes, indented, wrapped
from .writer import for_terminal

if TYPE_CHECKING:
    from rich.text import Text

COLUMNS = (
    Column("MODEL", least=8),
    Column("NEEDS", is_right=True),
    Column("WEIGHTS", is_right=True, given_up=3),
    Column("PROCESS", is_right=True, given_up=2),
    Column("CACHE", is_right=True, given_up=1),
    Column("CONTEXT", is_right=True, given_up=5),
    Column("ROWS", is_right=True, given_up=4),
    Column("FITS"),
)

ESTIMATED = "~"
"""Before a figure that no load has measured."""


def head_lines(path: Path) -> list[str]:
    """Return the lines above the plan: which file it is of."""
    return [*wrapped(f"configuration: {path}", width_of(sys.stdout)), ""]


def plan_lines(value: Mapping[str, Any], width: int | None) -> Iterator[Text]:
    """Yield the lines of the plan.

    Args:
        value: as `--json` prints it.
        width: columns of the terminal; None to cut nothing.
    """
    from rich.text import Text  # every command would wait for it

    budget = value["budget"]
    yield Text(for_terminal(f"budget: {format_bytes(budget['bytes'])} ({budget['reason']})\n"))
    header, *rows = table(COLUMNS, [_cells(model) for model in value["models"]], width)
    yield header
    for model, row in zip(value["models"], rows, strict=True):
        yield row
        for remark in _remarks(model, are_swapped=value["swap"]):
            for line in indented(for_terminal(remark), width):
                yield Text(line, style="dim")
    yield Text(f"\n{ESTIMATED} is estimated; loading a model measures it")
    if value["measurements"]:
        yield Text(for_terminal(value["measurements"]))
    yield Text(for_terminal(_conclusion(value)))


def _conclusion(value: Mapping[str, Any]) -> str:
    loaded = [model["name"] for model in value["models"] if model.get("is_loaded")]
    if value["change"] is not None:
        return f"not everything fits: {value['change']}"
    if not value["fits"]:
        wrong = ", ".join(model["name"] for model in value["models"] if model["problem"])
        return f"everything else fits; cannot be loaded: {wrong}"
    if not loaded:
        return "each model fits, loaded on request"
    return f"everything fits: {', '.join(loaded)} ({format_bytes(value['needed_bytes'])})"


def _cells(model: Mapping[str, Any]) -> list[str]:
    if model["problem"]:
        return [model["name"], *["-"] * 6, "?"]
    tokens, length = model["context_tokens"], model["context_length"]
    return [
        model["name"],
        _size(model["needed"]),
        _size(model["weights"]),
        _size(model["process"]),
        _size(model["cache"]),
        str(tokens) if tokens == length else f"{tokens}/{length}",
        f"{model['rows']}/{model['max_concurrency']}",
        _fits(model),
    ]


def _fits(model: Mapping[str, Any]) -> str:
    if model["is_loaded"]:
        return "yes"
    if model["missing_bytes"]:
        return "no"
    return "instead" if model["goes"] else "later"


def _remarks(model: Mapping[str, Any], *, are_swapped: bool) -> list[str]:
    """Return what belongs to a row and has no place in it."""
    if model["problem"]:
        return [model["problem"]]
    remarks = [model["remark"]] if model["remark"] else []
    if model["raised_bytes"]:
        more = format_bytes(model["raised_bytes"])
        remarks.append(f"needs {more} more than otherwise, because it ran out of memory before")
    if model["missing_bytes"]:
        remarks.append(f"{format_bytes(model['missing_bytes'])} more than there is")
    elif model["goes"]:
        how = "in turns if they are busy" if are_swapped else "once they are idle"
        remarks.append(f"loaded in place of {', '.join(model['goes'])}, {how}")
    elif not model["is_loaded"]:
        remarks.append("loaded on request, next to the others")
    if not model["context_tokens"] and not model["missing_bytes"]:
        remarks.append("its memory leaves no room for a request")
    return remarks


def _size(figure: Mapping[str, Any]) -> str:
    mark = ESTIMATED if figure["source"] == "estimated" else ""
    return f"{mark}{format_bytes(figure['bytes'])}"
