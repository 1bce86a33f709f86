"""`mlxsup generate`: one answer, as it comes.

The prompt becomes a message, because an instruction model answers a bare question with an empty
line. Only the worker knows whether there is a chat template, so the request says what to do
without one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.tasks import Task

from ..arguments import model_meant, only_model, optional_writer_argument
from ..connection import Target, connect, daemon_options
from ..exit_status import CliError, ExitStatus, interrupt_says, misuse
from ..options import (
    TEMPLATE,
    answer_options,
    below,
    check_parameters,
    check_text,
    duration,
    keep_alive_option,
    priority_options,
    wrong_option,
)
from ..pictures import Picture, check_taker, image_option, with_pictures
from ..terminal.answer import (
    AnswerScreen,
    cancelled_text,
    read_answer,
    result_map,
    show_remarks,
)
from ..terminal.output import Output
from ..terminal.reader_watch import reader_watched
from ..terminal.text import counted
from .add import add_option, served_name

if TYPE_CHECKING:
    from mlxsup.client import Client

COMMAND = "mlxsup generate"
MISSING_PROMPT = "Missing argument 'PROMPT'."


@click.command()
@optional_writer_argument
@click.argument("prompt", required=False, metavar="PROMPT")
@click.option(
    "--raw", is_flag=True, help="Continue PROMPT as plain text, without the chat template."
)
@image_option
@answer_options
@click.option(
    "--stop", metavar="TEXT", multiple=True, help="Text that ends the answer; may be repeated."
)
@click.option("--timeout", "timeout_s", metavar="S", type=duration, help="Time limit: 90s, 5m.")
@priority_options
@keep_alive_option
@add_option
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Show how fast it was.")
@daemon_options
def generate(
    model: str | None,
    prompt: str | None,
    raw: bool,
    images: tuple[Picture, ...],
    system: str | None,
    stop: tuple[str, ...],
    is_verbose: bool,
    is_sure: bool,
    target: Target,
    output: Output,
    **parameters: Any,
) -> int:
    """Example: mlxsup generate smollm2-135m "What is the capital of France?"

    Sends PROMPT to MODEL and prints the answer as it arrives; `-` reads PROMPT from stdin. MODEL
    may be left out if only one is configured. PROMPT is sent as a chat message; a model without a
    chat template continues it, as with --raw.
    """
    parameters["stop"] = list(stop) or None
    check_parameters(parameters, COMMAND)
    if raw and (system is not None or parameters[TEMPLATE] is not None):
        raise wrong_option("--raw cannot be combined with --system or --think", {}, COMMAND)
    if raw and images:
        raise wrong_option("--raw cannot be combined with --image", {}, COMMAND)
    if model is None:
        raise misuse(MISSING_PROMPT, COMMAND)
    with connect(target) as client:
        if prompt is None:
            model, prompt = _only_model(client, model), model
        text = read_stdin() if prompt == "-" else prompt
        given = _input(text, system, list(images), is_raw=raw)
        model, preset = served_name(
            model, client, target, output, is_sure=is_sure, makes=Task.GENERATE
        )
        if images:
            check_taker(client.status(), model)
        asked = {**below(preset, parameters), **given}
        if raw:
            asked[TEMPLATE] = None
        # A reader that leaves is noticed while nothing is written, too: a load may take minutes.
        screen = AnswerScreen(model, output)
        with (
            interrupt_says(lambda: cancelled_text(screen)),
            screen,
            reader_watched(client.close),
            # Leaving the block cancels, on Ctrl-C or when the reader of the output is gone.
            client.generate(model, on_notice=screen.notify, **asked) as stream,
        ):
            result = read_answer(stream, screen, output)
    if output.is_json:
        output.object(result_map(model, stream.request_id, result))
    show_remarks(result, output, is_verbose=is_verbose)
    if result.finish_reason != "cancelled":
        return ExitStatus.OK
    # By another command: Ctrl-C ends this one before.
    output.note(f"cancelled after {counted(result.usage.completion_tokens, 'token')}")
    return ExitStatus.FAILED


def _only_model(client: Client, word: str) -> str:
    """Return the model that is meant if a single word was given."""
    status = client.status()
    if model_meant(status, word) is not None:
        raise misuse(MISSING_PROMPT, COMMAND)
    return only_model(status, COMMAND, " PROMPT")


def _input(
    text: str, system: str | None, pictures: list[Picture], *, is_raw: bool
) -> dict[str, Any]:
    """Return the prompt as parameters of `Client.generate`."""
    check_text("PROMPT", text, COMMAND)
    if is_raw:
        return {"prompt": text}
    messages: list[dict[str, Any]] = [{"role": "user", "content": with_pictures(text, pictures)}]
    if system is not None:
        check_text("--system", system, COMMAND)
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages, "messages_as_text": True}


def read_stdin() -> str:
    """Return the prompt that is piped in."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        message = f"the prompt on stdin is not UTF-8: {error.reason} at byte {error.start}"
        raise CliError(message, status=ExitStatus.USAGE) from None
