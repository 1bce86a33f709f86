"""The plan of `mlxsup plan` as people read it: a table, and what follows from it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .columns import kept_columns
from .output import Output, width_of
from .quantities import format_bytes

HEADERS = ("MODEL", "NEEDS", "WEIGHTS", "PROCESS", "CACHE", "CONTEXT", "ROWS", "FITS")
LEFT_ALIGNED = ("MODEL", "FITS")
DROPPED_FIRST = ("CACHE", "PROCESS", "WEIGHTS", "ROWS", "CONTEXT")
"""What a terminal that is too narrow for all columns does without, in this order."""

GAP = 2
MIN_MODEL_WIDTH = 8
ESTIMATED = "~"
"""Before a figure that nobody has measured."""


def head_lines(path: Path) -> list[str]:
    """The lines above the plan: which file it is of."""
    return [*_wrap(f"configuration: {path}", width_of(sys.stdout)), ""]


def plan_lines(output: Output, value: Mapping[str, Any]) -> list[str]:
    """The lines of the plan; on a terminal none is longer than it is wide.

    Args:
        output: adds colour.
        value: as `--json` prints it.
    """
    width = width_of(sys.stdout)
    rows = [_cells(model) for model in value["models"]]
    headers, rows, widths = _layout(rows, width)
    budget = value["budget"]
    lines = _wrap(f"budget: {format_bytes(budget['bytes'])} ({budget['reason']})", width)
    lines += ["", output.style(_line(headers, headers, widths), sys.stdout, bold=True)]
    for model, row in zip(value["models"], rows, strict=True):
        lines.append(_line(row, headers, widths))
        for remark in _remarks(model, are_swapped=value["swap"]):
            lines += [
                output.style(line, sys.stdout, dim=True) for line in _wrap(remark, width, indent=2)
            ]
    lines += ["", *_wrap(f"{ESTIMATED} is estimated; loading a model measures it", width)]
    if value["measurements"]:
        lines += _wrap(value["measurements"], width)
    return lines + _wrap(_conclusion(value), width)


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
    """What belongs to a row and has no place in it."""
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


def _layout(
    rows: Sequence[Sequence[str]], width: int | None
) -> tuple[list[str], list[list[str]], list[int]]:
    """The headers, cells and widths of the columns that a terminal has room for."""
    widths = [max(len(row[i]) for row in (HEADERS, *rows)) for i in range(len(HEADERS))]
    dropped_first = [HEADERS.index(header) for header in DROPPED_FIRST]
    least = [min(widths[0], MIN_MODEL_WIDTH), *widths[1:]]
    kept = kept_columns(least, width, GAP, dropped_first)
    shown = [widths[place] for place in kept]
    if width is not None:
        others = sum(shown[1:]) + GAP * (len(shown) - 1)
        shown[0] = min(shown[0], max(MIN_MODEL_WIDTH, width - others))
    return [HEADERS[p] for p in kept], [[row[p] for p in kept] for row in rows], shown


def _line(cells: Sequence[str], headers: Sequence[str], widths: Sequence[int]) -> str:
    name = cells[0] if len(cells[0]) <= widths[0] else f"{cells[0][: widths[0] - 1]}…"
    padded = [
        cell.ljust(width) if header in LEFT_ALIGNED else cell.rjust(width)
        for header, cell, width in zip(headers, (name, *cells[1:]), widths, strict=True)
    ]
    return (" " * GAP).join(padded).rstrip()


def _wrap(text: str, width: int | None, indent: int = 0) -> list[str]:
    begin = " " * indent
    if width is None:
        return [f"{begin}{text}"]
    return textwrap.wrap(text, width, initial_indent=begin, subsequent_indent=begin)
