"""Options that several commands share, and the types of what people type after them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.ids import TERMINAL
from mlxsup.protocol.keep_alive import SHORTEST_LOAD_S
from mlxsup.protocol.states import Priority
from mlxsup.protocol.text import parse_duration

from .exit_status import CliError, ExitStatus

if TYPE_CHECKING:
    from mlxsup.protocol.errors import RemoteError


def duration(text: str) -> float:
    """Return the seconds of an option's text, read as the `*_s` keys of the configuration are.

    Raises:
        click.BadParameter: the text is not a duration.
    """
    try:
        return parse_duration(text, default_unit="s")
    except ValueError:
        message = f"{text!r} is not a duration; use 90s, 10m, 2h or a number of seconds"
        raise click.BadParameter(message) from None


FOR_EVER = "-1"


def keep_alive(text: str) -> float:
    """Return the option's seconds: a duration, or -1 for ever.

    Raises:
        click.BadParameter: the text is neither.
    """
    return -1.0 if text == FOR_EVER else duration(text)


def keep_alive_of_load(text: str) -> float:
    """Return the same for `load`, which takes no 0: the model would go as soon as it is there.

    Raises:
        click.BadParameter: the text is neither, or is 0.
    """
    seconds = keep_alive(text)
    if 0 <= seconds < SHORTEST_LOAD_S:
        raise click.BadParameter(
            f"{text} would unload the model at once; use a longer time, or {FOR_EVER} to keep "
            "it loaded"
        )
    return seconds


keep_alive_option = click.option(
    "--keep-alive",
    metavar="S",
    type=keep_alive,
    help=(
        "Unload the model after being idle this long, such as 10m; 0: right after the answer; -1: "
        "never."
    ),
)

load_keep_alive_option = click.option(
    "--keep-alive",
    metavar="S",
    type=keep_alive_of_load,
    help="Unload the model after being idle this long, such as 10m; -1: never.",
)


PRIORITY = click.Choice([priority.value for priority in Priority])
"""A class, which a shell can complete."""


def priority_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --priority and --client, which the command gets under these names."""
    help_client = "The client, as in [clients], that sends the request; by default, your terminal."
    option = click.option("--client", metavar="NAME", default=TERMINAL, help=help_client)
    function = option(function)
    help_priority = "Waiting requests of a higher priority start first."
    return click.option("--priority", type=PRIORITY, help=help_priority)(function)


def new_file(text: str) -> Path:
    """Return a path of an option, but not `-`: what else these commands print goes to standard
    output.

    Raises:
        click.BadParameter: it is `-`.
    """
    if text == "-":
        raise click.BadParameter("- means standard output; choose a file instead")
    return Path(text)


TEMPLATE = "chat_template_kwargs"

OPTION_NAMES = {
    "prompt": "PROMPT",
    "response_format": "--schema",
    TEMPLATE: "--think",
    "timeout_s": "--timeout",
}
"""Names of parameters on the command line, where they are not simply `--parameter`."""


def _schema_format(text: str) -> dict[str, Any]:
    """Return what `response_format` takes, with the JSON schema in this file: the type of --schema.

    Raises:
        click.BadParameter: the file cannot be read, or is no JSON object.
    """
    path = Path(os.path.expanduser(text))
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise click.BadParameter(f"{path} is not a JSON schema, which must be an object")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _think(_: click.Context, __: click.Parameter, thinks: bool | None) -> dict[str, Any] | None:
    if thinks is None:
        return None
    from mlxsup.client.thinking import thinking_arguments

    return thinking_arguments(thinks=thinks)


ANSWER_OPTIONS = (
    click.option("--system", metavar="TEXT", help="The system prompt."),
    click.option("--max-tokens", metavar="N", type=int, help="Limit the answer to N tokens."),
    click.option("--temperature", metavar="T", type=float,
                 help="Randomness of sampling; 0 always picks the likeliest token."),
    click.option("--top-p", metavar="P", type=float,
                 help="Nucleus sampling: keep tokens up to this probability mass (0–1]."),
    click.option("--top-k", metavar="K", type=int, help="Keep this many of the likeliest tokens."),
    click.option("--min-p", metavar="P", type=float,
                 help="Drop tokens below this share of the likeliest one's probability."),
    click.option("--seed", metavar="S", type=int, help="Seed that makes sampling repeatable."),
    click.option("--think/--no-think", TEMPLATE, default=None, callback=_think,
                 help="Turn reasoning on or off, if the model supports both."),
    click.option("--schema", "response_format", metavar="FILE", type=_schema_format,
                 help="Answer with JSON that matches the schema in FILE."),
)  # fmt: skip


def answer_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; but for --system, the command gets them as parameters of `generate`."""
    for option in reversed(ANSWER_OPTIONS):
        function = option(function)
    return function


def refusal_of(parameters: Mapping[str, Any]) -> RemoteError | None:
    """Return how a request with these parameters of `Client.generate` is refused, if it is."""
    from mlxsup.protocol.body import RequestBody
    from mlxsup.protocol.errors import RemoteError
    from mlxsup.protocol.parameters import SAMPLING

    # The others are no part of a request's body: `Client.generate` checks them.
    checked = {*(field.name for field in fields(RequestBody)), *SAMPLING}
    body = {name: value for name, value in parameters.items() if name in checked}
    try:
        RequestBody.from_wire({**body, "messages": [{"role": "user", "content": "x"}]})
    except RemoteError as error:
        return error
    return None


def check_parameters(parameters: Mapping[str, Any], command: str) -> None:
    """Check what a request would refuse, before one is sent.

    Args:
        parameters: of `Client.generate`, without the prompt.
        command: how its help is found.
    """
    refusal = refusal_of(parameters)
    if refusal is not None:
        raise wrong_option(refusal.message, refusal.detail, command)


def below(preset: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of `Client.generate`, with those of a preset for what was not given."""
    given = {name: value for name, value in parameters.items() if value is not None}
    template = {**preset.get(TEMPLATE, {}), **given.get(TEMPLATE, {})}
    return {**parameters, **preset, **given, TEMPLATE: template or None}


def check_text(name: str, text: str, command: str) -> None:
    """Refuse a text that is empty, or cannot be encoded."""
    problem = "" if text else "text of at least one character"
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = "text that can be encoded as UTF-8, not lone surrogates"
    if problem:
        raise wrong_option(f"{name} must be {problem}", {}, command)


def wrong_option(message: str, detail: Mapping[str, Any], command: str) -> CliError:
    """Return the error of a parameter as one of the option that it comes from."""
    parameter = str(detail.get("parameter", ""))
    if parameter and message.startswith(f"{parameter} "):
        option = OPTION_NAMES.get(parameter, f"--{parameter.replace('_', '-')}")
        message = option + message.removeprefix(parameter)
    hint = f"see `{command} -h`"
    return CliError(message, code="invalid_request", hint=hint, status=ExitStatus.USAGE)
