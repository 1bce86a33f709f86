"""`mlxsup init`: writes a configuration with the models that are on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlxsup.protocol.discovery import find_config
from mlxsup.protocol.folders import DEFAULT_CONFIG
from mlxsup.protocol.ids import DEFAULT_REVISION
from mlxsup.protocol.regular_file import room_hint
from mlxsup.protocol.tasks import NOUNS, Task

from ..connection import output_options
from ..exit_status import CliError
from ..options import new_file
from ..terminal.output import Output, confirm
from ..terminal.tables import listing
from ..terminal.text import format_bytes
from .models import with_capabilities

Entry = Mapping[str, Any]
"""A row of the catalogue, by a short `name`, with what the plan says of it alone: `needed_bytes`,
None if not known, and `verdict`. The file has what `fits`; the others stand in comments."""


@click.command()
@click.argument("file", type=new_file, envvar="MLXSUP_CONFIG", default=DEFAULT_CONFIG)
@output_options
def init(file: Path, output: Output) -> None:
    """Example: mlxsup init

    Finds the models on this machine and writes a configuration that serves all that fit into
    memory, under short names. FILE defaults to MLXSUP_CONFIG or ~/.mlxsup/config.toml. An existing
    file is never changed. If there is no model, it offers to download a small one.
    """
    from mlxsup.protocol.download import Repository
    from mlxsup.store.sources import EXAMPLE

    from ..catalogue import SEARCHED, catalogue
    from ..configuration import write_configuration
    from ..downloading import download

    path = file.expanduser().absolute()
    exists = CliError(
        f"{path} already exists; nothing was changed",
        code="file_exists",
        hint="`mlxsup add MODEL` adds a model; `mlxsup models` lists the models on this machine",
    )
    if os.path.lexists(path):
        raise exists
    rows = catalogue(None)
    if not rows and sys.stdin.isatty() and not output.is_json:
        output.note(f"no models found in {SEARCHED}")
        question = f"Download {EXAMPLE} (270 MB), a small one to begin with?"
        confirm(question, default=True, declined="nothing was written")
        download(Repository(EXAMPLE), output, again="mlxsup init")
        rows = catalogue(None)
    entries = _entries([row for row in rows if row["problem"] is None], output)
    left_out = [row for row in rows if row["problem"] is not None]
    served = [entry["name"] for entry in entries if entry["fits"]]
    if not served:
        raise _nothing(entries, left_out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_configuration(path, _text(entries, left_out))
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(path):
            raise exists from None
        message = f"cannot write {path}: {error.strerror or error}"
        hint = room_hint(error, "choose another file: `mlxsup init FILE`")
        raise CliError(message, code="output", hint=hint) from None
    if output.is_json:
        keys = ("name", "title", "repo", "path", "size_bytes", "needed_bytes", "fits")
        models = [{key: entry[key] for key in keys} for entry in entries]
        others = [{"title": row["title"], "problem": row["problem"]} for row in left_out]
        output.object({"path": str(path), "models": models, "left_out": others})
        return
    cells = [
        (one["name"], format_bytes(one["size_bytes"]), "yes" if one["fits"] else "no", one["title"])
        for one in entries
    ]
    headings, shown = with_capabilities(("MODEL", "SIZE", "FITS", "FROM"), cells, entries)
    output.show(listing(headings, shown, right=("SIZE",)))
    for entry in entries:
        if not entry["fits"]:
            remark = f"  {entry['name']}: {entry['verdict']}"
            output.data(remark, "dim")
    output.data(f"wrote {path}")
    found = find_config()
    is_found = found is not None and found.path.expanduser().absolute() == path
    where = "" if is_found else f" --config {shlex.quote(str(path))}"
    chats = [one["name"] for one in entries if one["fits"] and one["task"] == Task.GENERATE]
    use = f"chat {chats[0]}" if chats else "status"
    output.note(f"hint: `mlxsup start --detach{where}`, then `mlxsup {use}{where}`")


def _entries(rows: Sequence[Mapping[str, Any]], output: Output) -> list[Entry]:
    """Return an entry for each model, by a name that no other has."""
    from mlxsup.store.local_models import short_name

    from .plan import plan_of_folders

    taken = {"mlxsup", "mlxsup-gateway"}
    names = []
    for row in rows:
        names.append(short_name(row["title"], taken))
        taken.add(names[-1])
    planned: Mapping[str, Any] = {}
    if rows:
        folders = {name: Path(row["path"]) for name, row in zip(names, rows, strict=True)}
        try:
            planned = {one["name"]: one for one in plan_of_folders(folders, output)["models"]}
        except CliError:
            pass  # the system does not say how much memory there is: `start` will
    return [
        {**row, "name": name, **_judged(planned.get(name))}
        for name, row in zip(names, rows, strict=True)
    ]


def _judged(planned: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return whether a model fits, by what the plan says of it."""
    if planned is None:
        return {"needed_bytes": None, "fits": True, "verdict": "Whether it fits is not known"}
    if planned["problem"]:
        verdict = f"Cannot be loaded: {planned['problem']}"
        return {"needed_bytes": None, "fits": False, "verdict": verdict}
    needed, missing = planned["needed"]["bytes"], planned["missing_bytes"]
    verdict = "Fits into memory"  # how much it needs is known better after its first load
    if missing:
        verdict = f"Does not fit: needs {format_bytes(missing)} more memory"
    return {"needed_bytes": needed, "fits": not missing, "verdict": verdict}


def _text(entries: Sequence[Entry], left_out: Sequence[Mapping[str, Any]]) -> str:
    """Return the file."""
    from mlxsup.supervisor.config.lines import quoted, source_line, table_key

    from ..configuration import HEAD

    parts = [HEAD]
    for entry in entries:
        lines = [f"[models.{table_key(entry['name'])}]"]
        lines += [source_line(entry["repo"] or Path(entry["path"]))]
        if entry["repo"] and entry["revision"] != DEFAULT_REVISION:
            lines += [f"revision = {quoted(entry['revision'])}"]
        if not entry["fits"]:
            lines = [f"# {line}" for line in lines]
        about = f"{_summary(entry)}. {entry['verdict']}"
        parts.append("\n".join([_comment(about), *lines, ""]))
    if left_out:
        reasons = [_comment(f"{row['title']}: {row['problem']}") for row in left_out]
        parts.append("\n".join(["# Found as well, and cannot be served:", *reasons, ""]))
    return "\n".join(parts)


def _comment(text: str) -> str:
    """Return one line; names of files may contain anything."""
    return "# " + "".join(c if c.isprintable() else "\ufffd" for c in text)


def _summary(entry: Entry) -> str:
    """Return size, type, numbers and context of a model."""
    context = entry["context_length"]
    facts = (
        format_bytes(entry["size_bytes"]),
        entry["model_type"],
        entry["quantization"],
        f"makes {NOUNS[Task(entry['task'])]}" if entry["task"] != Task.GENERATE else "",
        "takes pictures" if "images" in entry["capabilities"] else "",
        f"{context} tokens of context" if context else "",
        f"from {entry['origin']}",
    )
    return ", ".join(filter(None, facts))


def _nothing(entries: Sequence[Entry], left_out: Sequence[Mapping[str, Any]]) -> CliError:
    """Return the error if no model can be served; nothing is written."""
    from ..catalogue import NONE_HINT, SEARCHED

    found = [f"{entry['title']}: {entry['verdict']}" for entry in entries]
    found += [f"{row['title']}: {row['problem']}" for row in left_out]
    message = f"no models found in {SEARCHED}"
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        message = f"none of the models on this machine can be served:{lines}"
    return CliError(message, code="no_models", hint=NONE_HINT)
