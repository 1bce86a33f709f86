"""`mlxsup add`: makes the configuration, and the daemon that runs, serve one more model."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.discovery import find_config
from mlxsup.protocol.folders import DEFAULT_CONFIG
from mlxsup.protocol.tasks import Task

from ..arguments import (
    check_makes,
    complete_repository,
    model_meant,
    row_called,
    unknown_name,
    use_of,
)
from ..connection import (
    Target,
    connect,
    daemon_options,
    explain_request_error,
    status_of_daemon,
)
from ..exit_status import CliError
from ..terminal.output import Output, confirm

if TYPE_CHECKING:
    from mlxsup.client import Client
    from mlxsup.store.sources import Source

# `load`, `chat` and others import this file for `served_name`, so the store is imported below.


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The outcome of a request to serve a model.

    Attributes:
        name: what the configuration calls the model.
        path: the configuration file; None if the daemon that runs has none.
        alias: the other name that it has now; None if it was given none.
        is_new: true if it was not there before.
        is_served: true if a daemon serves it now.
    """

    name: str
    alias: str | None
    path: Path | None
    is_new: bool
    is_served: bool

    @property
    def sentence(self) -> str:
        """Return what was done."""
        where = f"to {self.path}" if self.path else "until the daemon ends; it has no file"
        if self.alias is not None:
            return f"added {self.alias} as another name of {self.name} {where}"
        return f"added {self.name} {where}" if self.is_new else f"{self.name} is already configured"

    @property
    def way_back(self) -> str:
        """Return how a model that was not there before is taken out again."""
        return f"`mlxsup rm {self.name}` takes it out again" if self.is_new else ""


@click.command()
@click.argument("source", metavar="MODEL", shell_complete=complete_repository)
@click.option(
    "--as", "name", metavar="NAME", help="Its name, or another one; by default, a short one."
)
@click.option("--no-load", "is_left", is_flag=True, help="Load it on the first request, not now.")
@daemon_options
def add(source: str, name: str | None, is_left: bool, target: Target, output: Output) -> None:
    """Example: mlxsup add mlx-community/SmolLM2-135M-Instruct

    Adds MODEL to the configuration and to a running daemon, which loads it. MODEL is OWNER/NAME or
    its address in a browser (downloaded if necessary), a short name such as qwen3:4b (`mlxsup
    search` lists them), a folder, a GGUF file (converted), or a model that `mlxsup models` lists.
    With --as, a model that is served already gets NAME as an alias. `mlxsup rm` removes either.
    """
    from ..changes import progress_shown

    added = serve_also(source, name, target, output)
    if added.is_served and not is_left:
        from mlxsup.client import RequestError

        with connect(target) as client, progress_shown(client, added.name, output):
            try:
                client.load(added.name)
            except RequestError as error:
                refused = explain_request_error(error)
                refused.hint = "; ".join(filter(None, [refused.hint, added.way_back]))
                raise refused from None
    value = {
        "name": added.name, "alias": added.alias, "path": str(added.path) if added.path else None,
        "added": added.is_new, "served": added.is_served,
    }  # fmt: skip
    output.result(value, added.sentence)
    if added.is_served:
        name = added.alias or added.name
        with connect(target) as client:
            row = row_called(client.status(), added.name) or {}
        output.note(target.repeat_in(f"hint: `mlxsup {use_of({**row, 'name': name})}`"))
    else:
        output.note(target.repeat_in("hint: `mlxsup start --detach` serves it"))


def serve_also(
    model: str,
    name: str | None,
    target: Target,
    output: Output,
    *,
    command: str = "add",
    makes: Task | None = None,
) -> Added:
    """Have the daemon that runs serve a model, or else write it into the file it would read.

    Args:
        model: as users name it.
        name: what to call it; None: by a short name.
        target: the daemon, or its file.
        output: for the progress of a download or a conversion.
        command: the one that continues an interrupted download.
        makes: what it has to be for; None: anything.

    Raises:
        CliError: it is no model, cannot be served, makes something else, or its entry cannot be
            written; then the configuration is as it was.
    """
    from mlxsup.store.sources import find_source
    from mlxsup.supervisor.config.entries import adding, change_file

    from ..configuration import configuration_errors, make_configuration, refusals

    again = f"mlxsup {command} {shlex.quote(model)}"
    called = "" if os.path.lexists(Path(model).expanduser()) else model

    def made_ready(source: Source) -> Source:
        return _made_ready(source, target, output, again=again, makes=makes)

    status = status_of_daemon(target)
    path = file_of(target)
    with configuration_errors(path), refusals():
        if status is not None:
            return _add_to_daemon(model, called, name, status, target, made_ready)
        sources: list[Source] = []
        if not path.expanduser().exists():  # nothing is written for a model that is none
            sources = [made_ready(find_source(model))]
            make_configuration(path)
        edit = change_file(
            path,
            lambda config: adding(
                config,
                called,
                name,
                find=lambda: sources[0] if sources else find_source(model),
                ready=lambda one: one if sources else made_ready(one),
            ),
        )
    alias = edit.answer.get("alias")
    is_new = edit.change is not None and alias is None
    return Added(name=edit.name, alias=alias, path=path, is_new=is_new, is_served=False)


def add_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add -y and --add, which the command gets as `is_sure`."""
    return click.option(
        "-y",
        "--add",
        "is_sure",
        is_flag=True,
        help="Add MODEL without asking if it is not served yet.",
    )(function)


def served_name(
    model: str,
    client: Client,
    target: Target,
    output: Output,
    *,
    is_sure: bool,
    makes: Task | None = None,
) -> tuple[str, Mapping[str, Any]]:
    """Return what requests call a model, which the daemon is given now if it is not served yet, and
    the parameters of its preset.

    Args:
        model: a name of the daemon, also `NAME:PRESET` or `NAME:ADAPTER`, or what `add` takes.
        client: of the daemon.
        target: the same daemon.
        output: for the progress of a download or a conversion.
        is_sure: whether the user wants that, and need not be asked.
        makes: what it has to be for; None: anything.
    """
    status = client.status()

    def checked(name: str) -> str:
        row = row_called(status, name)
        if makes is not None and row is not None:
            check_makes(row, makes, target)
        return name

    if (known := model_meant(status, model)) is not None:
        return checked(known.name), known.preset
    from mlxsup.store.sources import RefusedModelError, find_source, is_reference, servable

    from ..configuration import refusals

    try:
        source = find_source(model)
        for row in status["models"]:
            if _is_row_of(source, row):
                return checked(str(row["name"])), {}
        if source.folder is not None and not source.is_gguf:
            servable(source)
    except RefusedModelError as error:
        if error.code == "unknown_model" or not is_reference(model):
            raise unknown_name(status, model) from None
        with refusals():
            raise
    if not is_sure:
        ask_to_add(model, target, output)
    added = serve_also(model, None, target, output, makes=makes)
    output.note("; ".join(filter(None, [added.sentence, target.repeat_in(added.way_back)])))
    return added.name, {}


def ask_to_add(model: str, target: Target, output: Output) -> None:
    """Return if the user wants a model that is not served to be added."""
    if output.is_json or not sys.stdin.isatty():
        raise CliError(
            f"{model} is not served yet",
            code="unknown_model",
            hint=target.repeat_in(f"`mlxsup add {shlex.quote(model)}` adds it"),
        )
    question = f"{model} is not served yet. Add it now?"
    confirm(question, default=True, declined="nothing was added")


def _add_to_daemon(
    model: str,
    called: str,
    name: str | None,
    status: Mapping[str, Any],
    target: Target,
    made_ready: Callable[[Source], Source],
) -> Added:
    """Have the daemon add a model, which is downloaded or converted here, where progress is seen.

    Args:
        model, name, target: as for `serve_also`.
        called: the model, if it may be a name of the configuration.
        status: of the daemon.
        made_ready: downloads or converts it.
    """
    from mlxsup.store.sources import find_source

    reference, revision = called, None
    if row_called(status, called) is None:
        source = find_source(model)
        if not any(_is_row_of(source, row) for row in status["models"]):
            source = made_ready(source)
        reference = source.repo or str(source.folder)
        revision = source.revision if source.repo else None
    with connect(target) as client:
        done = client.add(reference, name=name, revision=revision)
    path = Path(done["config_path"]) if done["config_path"] else None
    is_new = done["model"] in done["added"]
    alias = done.get("alias")
    return Added(name=done["model"], alias=alias, path=path, is_new=is_new, is_served=True)


def _is_row_of(source: Source, row: Mapping[str, Any]) -> bool:
    return source.is_that_of(row.get("repo") or "", row.get("revision") or "", row["folder"] or "")


def file_of(target: Target) -> Path:
    """Return the file that `start` would read or make."""
    found = find_config(target.config)
    return found.path if found is not None else Path(DEFAULT_CONFIG).expanduser()


def _made_ready(
    source: Source, target: Target, output: Output, *, again: str, makes: Task | None
) -> Source:
    """Download or convert what a worker could not load as it is.

    Args:
        source: the model.
        target, output, makes: as for `serve_also`.
        again: the command that continues an interrupted download.

    Raises:
        CliError: that fails, or the model makes something else.
        RefusedModelError: it cannot be served even then.
    """
    from mlxsup.store.model_folder import describe
    from mlxsup.store.sources import Source, servable

    from ..downloading import checked_repository, download

    if source.folder is None:
        repository = checked_repository(source.repo, source.revision)
        folder = Path(download(repository, output, again=again).folder)
        source = replace(source, folder=folder)
    elif source.is_gguf:
        from ..conversion import converted

        made = converted(source.folder, output)
        return Source(title=made.name, folder=made)
    source = servable(source)
    if makes is not None and source.folder is not None:
        check_makes({"name": source.title, "task": describe(source.folder).task}, makes, target)
    return source
