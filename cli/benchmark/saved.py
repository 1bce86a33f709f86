"""Runs in files: one is written once, and read to be compared with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..exit_status import CliError, ExitStatus
from .figures import FIGURES
from .sizes import Cell, Wishes

KIND = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A run that was measured earlier.

    Attributes:
        path: of its file.
        measured_at: when.
        conditions: what it was measured with, by what people call it.
        cells: the values of each figure, by size.
    """

    path: Path
    measured_at: str
    conditions: Mapping[str, str]
    cells: Mapping[Cell, Mapping[str, list[float]]]

    @property
    def wishes(self) -> Wishes:
        """The same sizes."""
        return Wishes(
            prompt_tokens=tuple(dict.fromkeys(cell.prompt_tokens for cell in self.cells)),
            output_tokens=tuple(dict.fromkeys(cell.output_tokens for cell in self.cells)),
            concurrency=tuple(dict.fromkeys(cell.concurrency for cell in self.cells)),
        )


def conditions_of(value: Mapping[str, Any]) -> dict[str, str]:
    """What a run was measured with, by what people call it.

    Args:
        value: as `--json` prints it.
    """
    machine = value["machine"]
    return {
        "model": str(value["model"]),
        "through": str(value["through"]),
        "backend": str(value["backend"]),
        "machine": f"{machine['system']} {machine['architecture']}, {machine['cores']} cores",
        **{name: str(version) for name, version in machine["versions"].items()},
    }


def read_saved(path: Path) -> SavedRun:
    """The run in a file that `write_new` has written, or `--json` printed.

    Raises:
        CliError: usage; it cannot be read, or has no run.
    """
    try:
        value = json.loads(path.read_text())
        cells = {
            Cell(
                prompt_tokens=int(one["prompt_tokens"]),
                output_tokens=int(one["output_tokens"]),
                concurrency=int(one["concurrency"]),
            ): _values(one["figures"])
            for one in value["cells"]
        }
        if value["kind"] != KIND or not cells:
            raise ValueError("it has no figures")
        return SavedRun(
            path=path,
            measured_at=str(value["measured_at"]),
            conditions=conditions_of(value),
            cells=cells,
        )
    except OSError as error:
        raise _unusable(f"{path}: {error.strerror}", _HINT) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        message = f"{path} is no run of `mlxsup bench`"
        raise _unusable(message, _HINT) from None


_HINT = "`mlxsup bench MODEL --output FILE` writes one"


def _unusable(message: str, hint: str) -> CliError:
    return CliError(message, code="file", hint=hint, status=ExitStatus.USAGE)


def _values(figures: Mapping[str, Any]) -> dict[str, list[float]]:
    found = {figure.name: figures.get(figure.name) for figure in FIGURES}
    return {
        name: [float(value) for value in about["values"]] for name, about in found.items() if about
    }


def check_new(path: Path) -> None:
    """Refuses a file that cannot be written, before anything has been measured for it.

    Raises:
        CliError: usage; it exists, or its folder does not, or nothing may be written there.
    """
    if os.path.lexists(path):
        raise _unusable(f"{path} exists", "name another file: a run is never overwritten")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "is not writable" if folder.is_dir() else "does not exist"
        raise _unusable(f"{path}: the folder {folder} {what}", "name another file")


def write_new(path: Path, text: str) -> None:
    """Writes a run.

    Raises:
        CliError: the file exists by now, or cannot be written; then there is none.
    """
    try:
        with path.open("x") as file:
            try:
                file.write(text + "\n")
                file.flush()
            except OSError:
                path.unlink()
                raise
    except OSError as error:
        hint = "the figures are above"
        raise CliError(f"{path}: {error.strerror}", code="file", hint=hint) from None
