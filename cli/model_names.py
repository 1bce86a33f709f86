"""The argument MODEL, whose names a shell can complete."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .connection import Target, read_toml, unknown_model
from .model_rows import row_called
from .terminal.writer import for_terminal

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SAFE_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+=-]*")
"""What no shell expands, splits or takes for an option."""

ANSWER_LIMIT_S = 0.5
"""Pressing Tab waits no longer than this for a daemon."""


def complete_model(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names that begin so, each with the model's state if a daemon answers."""
    target = target_of(context)
    states = {row["name"]: str(row["state"]) for row in ask_status(target)}
    names = states or _read_configuration(target)
    return completions(names.items(), incomplete)


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
optional_model_argument = click.argument(
    "model", required=False, metavar="[MODEL]", shell_complete=complete_model
)
"""MODEL of the commands that do without it if only one is configured."""


def check_known(status: Mapping[str, Any], model: str) -> None:
    """Refuse a name that the daemon does not know, before anything is sent to it.

    Raises:
        CliError: with close matches and the configured names.
    """
    if row_called(status, model) is None:
        raise unknown_model(model, [row["name"] for row in status["models"]])


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

        from .exit_status import CliError

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
    from .exit_status import CliError

    try:
        path = target.find().config
        models = {} if path is None else read_toml(path).get("models", {})
    except CliError:
        return {}
    return dict.fromkeys(models, "") if isinstance(models, dict) else {}
