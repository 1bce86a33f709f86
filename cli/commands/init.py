"""`mlxsup init`: writes a configuration with the models that are on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mlxsup.protocol.folders import DEFAULT_CONFIG
from mlxsup.protocol.places import find_config
from mlxsup.store.search import short_name

from ..connection import output_options
from ..exit_status import CliError
from ..model_catalog import SEARCHED, catalogue, source_of
from ..new_file import NewFile
from ..schema_file import SCHEMA_LINE, SCHEMA_NAME, write_schema_next_to
from ..terminal.columns import columns, wrapped
from ..terminal.output import Output, width_of
from ..terminal.quantities import format_bytes
from .models import NONE_HINT

HEAD = f"""\
{SCHEMA_LINE}
# The configuration of mlxsup, written by `mlxsup init` from the models on this machine.
# See what fits with `mlxsup plan`; a change takes effect with `mlxsup reload`.
# All keys with their defaults are in {SCHEMA_NAME}, by which editors complete and check this file.

[defaults]
preload = false         # load on the first request; true: when the daemon starts
# idle_unload_s = "30m" # unload after this long without a request
"""
LEFT_OUT = "# Found as well, and cannot be served:\n"
COMMENT = "# "


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model of the file.

    Attributes:
        name: its short name.
        row: of the catalogue.
        needed_bytes: memory, as the plan has it; None if that is not known.
        missing_bytes: how much more than there is; 0 if it fits.
        problem: why it cannot be served after all; empty if it can.
    """

    name: str
    row: Mapping[str, Any]
    needed_bytes: int | None = None
    missing_bytes: int = 0
    problem: str = ""

    @property
    def is_served(self) -> bool:
        """Whether the file has it; otherwise it stands in a comment."""
        return not self.problem and not self.missing_bytes


@click.command()
@click.argument("file", type=NewFile(), envvar="MLXSUP_CONFIG", default=DEFAULT_CONFIG)
@output_options
def init(file: Path, output: Output) -> None:
    """Example: mlxsup init

    Finds the models on this machine and writes a configuration with all that fit into memory, by
    short names, to FILE: by default MLXSUP_CONFIG, or else ~/.mlxsup/config.toml. A file that
    exists is left as it is.
    """
    path = file.expanduser().absolute()
    if os.path.lexists(path):
        raise _exists(path)
    rows = catalogue(None)
    entries = _planned(_named([row for row in rows if row["problem"] is None]), output)
    left_out = [row for row in rows if row["problem"] is not None]
    if not any(entry.is_served for entry in entries):
        raise _nothing(entries, left_out)
    _write(path, _text(entries, left_out))
    if output.is_json:
        output.object(_value(path, entries, left_out))
        return
    output.data("\n".join(_lines(entries, output)))
    output.data(f"wrote {path}")
    served = next(entry.name for entry in entries if entry.is_served)
    where = "" if _is_found(path) else f" --config {shlex.quote(str(path))}"
    output.note(f"hint: `mlxsup start --detach{where}`, then `mlxsup chat {served}{where}`")


def _named(rows: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """An entry for each model, by a name that no other has."""
    taken = {"mlxsup", "mlxsup-gateway"}
    entries = []
    for row in rows:
        name = short_name(row["title"], taken)
        taken.add(name)
        entries.append(Entry(name=name, row=row))
    return entries


def _planned(entries: Sequence[Entry], output: Output) -> list[Entry]:
    """The entries with what the plan says of each alone."""
    from .plan import plan_of_folders

    if not entries:
        return []
    folders = {entry.name: Path(entry.row["path"]) for entry in entries}
    try:
        planned = {row["name"]: row for row in plan_of_folders(folders, output)["models"]}
    except CliError:
        return list(entries)  # nobody says how much memory there is: `start` will
    return [_with_plan(entry, planned[entry.name]) for entry in entries]


def _with_plan(entry: Entry, planned: Mapping[str, Any]) -> Entry:
    if planned["problem"]:
        return Entry(name=entry.name, row=entry.row, problem=planned["problem"])
    return Entry(
        name=entry.name,
        row=entry.row,
        needed_bytes=planned["needed"]["bytes"],
        missing_bytes=planned["missing_bytes"],
    )


def _text(entries: Sequence[Entry], left_out: Sequence[Mapping[str, Any]]) -> str:
    """The file."""
    from mlxsup.supervisor.config.lines import table_key

    parts = [HEAD]
    for entry in entries:
        lines = [f"[models.{table_key(entry.name)}]", *source_of(dict(entry.row)).split("\n")]
        if not entry.is_served:
            lines = [COMMENT + line for line in lines]
        parts.append("\n".join([_one_line(f"{_summary(entry)}. {_verdict(entry)}"), *lines, ""]))
    if left_out:
        reasons = [_one_line(f"{row['title']}: {row['problem']}") for row in left_out]
        parts.append(LEFT_OUT + "\n".join([*reasons, ""]))
    return "\n".join(parts)


def _one_line(text: str) -> str:
    """A comment; names of files may contain anything."""
    return COMMENT + "".join(c if c.isprintable() else "\ufffd" for c in text)


def _summary(entry: Entry) -> str:
    """Size, type, numbers and context of a model."""
    row = entry.row
    context = row["context_length"]
    facts = (
        format_bytes(row["size_bytes"]),
        row["model_type"],
        row["quantization"],
        f"{context} tokens of context" if context else "",
        f"from {row['origin']}",
    )
    return ", ".join(filter(None, facts))


def _verdict(entry: Entry) -> str:
    if entry.problem:
        return f"Cannot be loaded: {entry.problem}"
    if entry.missing_bytes:
        return f"Does not fit: needs {format_bytes(entry.missing_bytes)} more memory than there is"
    if entry.needed_bytes is None:
        return "Whether it fits is not known"
    return f"Fits: needs about {format_bytes(entry.needed_bytes)} of memory"


def _write(path: Path, text: str) -> None:
    """Writes the file and its schema, never over another configuration, and leaves no part of one.

    Raises:
        CliError: it exists by now, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _unwritten(path, error) from None
    try:
        file = open(path, "x", encoding="utf-8")  # noqa: SIM115 - closed below
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise _unwritten(path, error) from None
    try:
        with file:
            file.write(text)
        write_schema_next_to(path)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _unwritten(path, error) from None


def _unwritten(path: Path, error: OSError) -> CliError:
    message = f"cannot write {path}: {error.strerror or error}"
    return CliError(message, code="output", hint="name another FILE: `mlxsup init FILE`")


def _exists(path: Path) -> CliError:
    return CliError(
        f"{path} exists; it is left as it is",
        code="file_exists",
        hint="name another FILE, or see what could be added with `mlxsup models`",
    )


def _nothing(entries: Sequence[Entry], left_out: Sequence[Mapping[str, Any]]) -> CliError:
    """No model can be served; nothing is written."""
    found = [f"{entry.row['title']}: {_verdict(entry)}" for entry in entries]
    found += [f"{row['title']}: {row['problem']}" for row in left_out]
    if not found:
        return CliError(f"no models in {SEARCHED}", code="no_models", hint=NONE_HINT)
    text = "".join(f"\n  {line}" for line in found)
    message = f"none of the models on this machine can be served:{text}"
    return CliError(message, code="no_models", hint=NONE_HINT)


def _is_found(path: Path) -> bool:
    """Whether `start` reads this file without being told."""
    found = find_config()
    return found is not None and found.path.expanduser().absolute() == path


def _lines(entries: Sequence[Entry], output: Output) -> list[str]:
    width = width_of(sys.stdout)
    rows = [
        (
            entry.name,
            format_bytes(entry.row["size_bytes"]),
            "yes" if entry.is_served else "no",
            entry.row["title"],
        )
        for entry in entries
    ]
    headers, *blocks = columns(("MODEL", "SIZE", "FITS", "FROM"), rows, width, right=(1,))
    lines = [output.style(line, sys.stdout, bold=True) for line in headers]
    for entry, block in zip(entries, blocks, strict=True):
        lines += block
        if not entry.is_served:
            remark = wrapped(_verdict(entry), width, indent=2)
            lines += [output.style(line, sys.stdout, dim=True) for line in remark]
    return lines


def _value(
    path: Path, entries: Sequence[Entry], left_out: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """As `--json` prints it."""
    return {
        "path": str(path),
        "models": [
            {
                "name": entry.name,
                "title": entry.row["title"],
                "repo": entry.row["repo"],
                "path": entry.row["path"],
                "size_bytes": entry.row["size_bytes"],
                "needed_bytes": entry.needed_bytes,
                "fits": entry.is_served,
            }
            for entry in entries
        ],
        "left_out": [{"title": row["title"], "problem": row["problem"]} for row in left_out],
    }
