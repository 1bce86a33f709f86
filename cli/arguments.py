"""The arguments MODEL, REPO and ID: what a shell completes, and which model is meant."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from mlxsup.protocol.ids import LAST_REQUEST, MAX_ID_CHARACTERS
from mlxsup.protocol.tasks import NOUNS, Task

from .connection import Target, models_in, unknown_model
from .exit_status import CliError, ExitStatus
from .terminal.writer import for_terminal

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


LATEST = "latest"
"""Ollama's name for the tag of a model that has none."""

SAFE_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+=-]*")
"""What no shell expands, splits or takes for an option."""

ANSWER_LIMIT_S = 0.5
"""Pressing Tab waits no longer than this for a daemon."""


Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def _complete(
    context: click.Context, _: click.Parameter, incomplete: str, *, writes_text: bool | None
) -> list[CompletionItem]:
    """Return the names that begin so, each with the model's state if a daemon answers."""
    target = target_of(context)
    rows = ask_status(target)
    wanted = [row for row in rows if writes_text in (None, is_writer(row))]
    states = {row["name"]: str(row["state"]) for row in wanted}
    return completions((states if rows else _read_configuration(target)).items(), incomplete)


complete_model: Completer = partial(_complete, writes_text=None)
complete_writer: Completer = partial(_complete, writes_text=True)
"""Of the models that write text."""
complete_embedder: Completer = partial(_complete, writes_text=False)
"""Of the models that embed or rank."""


def completions(words: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    """Return what a shell may insert: words that begin so, none of which it would take for more.

    A shell inserts them as they are, and clients choose the ids of their requests: one called
    `x;rm -r ~` would be run with the next Enter.

    Args:
        words: each with what is said about it.
        incomplete: what has been typed so far.
    """
    from click.shell_completion import CompletionItem

    return [
        CompletionItem(word, help=for_terminal(about) or None)
        for word, about in words
        if word.startswith(incomplete) and SAFE_WORD.fullmatch(word)
    ]


model_argument = click.argument("model", shell_complete=complete_model)
embedder_argument = click.argument("model", shell_complete=complete_embedder)
optional_model_argument = click.argument(
    "model", required=False, metavar="[MODEL]", shell_complete=complete_model
)
"""MODEL of the commands that do without it if only one is configured."""
optional_writer_argument = click.argument(
    "model", required=False, metavar="[MODEL]", shell_complete=complete_writer
)
"""The same of commands that only models that write text answer."""


def is_writer(row: Mapping[str, Any]) -> bool:
    """True if a model of the status writes text, as far as that is known."""
    return row.get("task") in (None, Task.GENERATE)


def use_of(row: Mapping[str, Any]) -> str:
    """Return the command that uses a model, up to what it is sent: `chat qwen`."""
    name = shlex.quote(str(row["name"]))
    match row.get("task"):
        case Task.EMBED:
            return f"embed {name} TEXT"
        case Task.RERANK:
            return f"embed {name} --rank QUERY TEXT"
        case _:
            return f"chat {name}"


def check_makes(row: Mapping[str, Any], asked: Task, target: Target) -> None:
    """Raise if a model is known to make something else than it is asked for."""
    if row.get("task") not in (None, asked):
        makes = NOUNS[Task(row["task"])]
        raise CliError(
            f"{row['name']} makes {makes}, not {NOUNS[asked]}",
            code="invalid_request",
            hint=target.repeat_in(f"for {makes}: `mlxsup {use_of(row)}`"),
        )


def check_known(status: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the row of the model with this name or alias."""
    row = row_called(status, model)
    if row is None:
        raise unknown_name(status, model)
    return row


def target_of(context: click.Context) -> Target:
    """Return the daemon that the options so far name."""
    params = context.params
    config = params.get("config") or params.get("config_path")
    return Target(endpoint=params.get("endpoint"), config=Path(config) if config else None)


def ask_status(target: Target) -> list[dict[str, Any]]:
    """Return the models of a daemon that answers at once; none if none does."""
    # Filled by the thread at most once, and read after it has ended or been given up.
    answers: list[list[dict[str, Any]]] = []

    def ask() -> None:
        from mlxsup.client import Client, ConnectionLost, RequestError

        try:
            with Client(target.find_endpoint()) as client:
                answers.append(client.status()["models"])
        except (CliError, ConnectionLost, RequestError):
            # A shell has no place for errors: use the configuration instead.
            return

    thread = threading.Thread(target=ask, name="mlxsup-completion", daemon=True)
    thread.start()
    thread.join(ANSWER_LIMIT_S)
    return answers[0] if answers else []


def _read_configuration(target: Target) -> dict[str, str]:
    try:
        return dict.fromkeys(models_in(target.find().config).values(), "")
    except CliError:
        return {}


def row_called(status: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the row of the model with this name or alias; None if there is none."""
    rows: list[dict[str, Any]] = status["models"]
    named = next((row for row in rows if row["name"] == name), None)
    return named or next((row for row in rows if name in row.get("aliases", ())), None)


def names_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names that requests may give a model: with presets and adapters, too."""
    variants = (*row.get("presets", ()), *row.get("adapters", ()))
    return [row["name"], *(f"{row['name']}:{variant}" for variant in variants)]


def unknown_name(status: Mapping[str, Any], name: str) -> CliError:
    """Return the error for a name that means nothing, as a daemon would put it."""
    base = row_called(status, name.rpartition(":")[0])
    known = [row["name"] for row in status["models"]] if base is None else names_of(base)
    return unknown_model(name, known)


class ModelMeant(NamedTuple):
    """The meaning of a name in requests.

    Attributes:
        row: of the model.
        name: as the daemon knows it, which may end in that of an adapter.
        preset: parameters of the preset in `NAME:PRESET`.
    """

    row: dict[str, Any]
    name: str
    preset: Mapping[str, Any]


def model_meant(status: Mapping[str, Any], name: str) -> ModelMeant | None:
    """Return the meaning of a name, also of `NAME:PRESET` and `NAME:ADAPTER`; None: it has none."""
    if (row := row_called(status, name)) is not None:
        return ModelMeant(row, row["name"], {})
    base, _, variant = name.rpartition(":")
    if (row := row_called(status, base)) is None:
        return None
    if variant in row.get("adapters", ()):
        return ModelMeant(row, f"{row['name']}:{variant}", {})
    presets = {LATEST: {}, **row.get("presets", {})}
    return ModelMeant(row, row["name"], presets[variant]) if variant in presets else None


def only_model(status: Mapping[str, Any], command: str, after: str = "") -> str:
    """Return the name of the only model that writes text.

    Args:
        status: of the daemon.
        command: how it is typed, up to the name that is missing.
        after: what follows the name.
    """
    names = sorted(str(row["name"]) for row in status["models"] if is_writer(row))
    if len(names) == 1:
        return names[0]
    message = f"name a model: {', '.join(names) or 'none'}"
    hint = f"for example `{command} {names[0]}{after}`" if names else "`mlxsup add MODEL` adds one"
    raise CliError(message, hint=hint, status=ExitStatus.USAGE)


def complete_repository(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the repositories in the cache that begin so."""
    from mlxsup.store.hub_cache import find_cache, repositories  # other commands have no use for it

    try:
        found = list(repositories(find_cache()))
    except OSError:
        return []  # a shell has no place for errors
    return completions(((repo, "") for repo in found), incomplete)


def one_after_the_other(*completers: Completer) -> Completer:
    """Return what gives the words of the first, then those of the others."""
    return lambda *asked: [item for complete in completers for item in complete(*asked)]


complete_model_or_repository = one_after_the_other(complete_model, complete_repository)
complete_writer_or_repository = one_after_the_other(complete_writer, complete_repository)
repository_argument = click.argument("repo", shell_complete=complete_repository)


def complete_request(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the ids that begin so, of open requests, each with its model."""
    words = (
        (one["id"], f"{row['name']}, {kind}")
        for row in ask_status(target_of(context))
        for key, kind in (("rows", "running"), ("line", "waiting"), ("paused_rows", "paused"))
        for one in row[key]
    )
    return completions(words, incomplete)


def request_called(requests: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """Return the request that a daemon takes this for, of those that it has listed: an id, a number
    such as `#12` or `12`, or `last`; None if there is none."""
    listed = list(requests)
    found = [one for one in listed if one["id"] == name]
    found = found or [one for one in listed if one["number"] in (name, f"#{name}")]
    if not found and name == LAST_REQUEST:
        found = sorted(listed, key=lambda one: int(one["number"].removeprefix("#")))[-1:]
    return found[0] if found else None


def _request_id(_: click.Context, __: click.Parameter, name: str) -> str:
    """Refuse what is the id of no request."""
    if not name or len(name) > MAX_ID_CHARACTERS:
        raise CliError(
            "that is not the id of a request",
            hint="`mlxsup requests` lists their ids and numbers; `last` is the latest",
            status=ExitStatus.USAGE,
        )
    return name


request_argument = click.argument(
    "request", metavar="ID", shell_complete=complete_request, callback=_request_id
)
"""The id or the number of an open request, as `mlxsup requests` shows them, or `last`."""
