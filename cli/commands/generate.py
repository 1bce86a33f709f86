"""`mlxsup generate`: one answer, as it comes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ..connection import Target, connect, daemon_options
from ..duration import duration
from ..exit_status import CliError, ExitStatus
from ..model_names import model_argument
from ..priority_options import priority_options
from ..terminal.live_line import LiveLine
from ..terminal.notices import notice_teller
from ..terminal.output import Output

if TYPE_CHECKING:
    from mlxsup.client import Result
    from mlxsup.client.client import Stream


TOP_P_HELP = "Nucleus sampling: keep tokens up to this probability mass (0–1]."


@click.command(short_help="Generate an answer.")
@model_argument
@click.argument("prompt")
@click.option("--max-tokens", metavar="N", type=int, help="Generate at most this many tokens.")
@click.option("--min-tokens", metavar="N", type=int, help="Generate at least this many tokens.")
@click.option("--temperature", metavar="T", type=float, help="0 picks the likeliest token.")
@click.option("--top-p", metavar="P", type=float, help=TOP_P_HELP)
@click.option(
    "--stop", metavar="TEXT", multiple=True, help="Text that ends the answer; may be repeated."
)
@click.option(
    "--stop-token-id",
    "stop_token_ids",
    metavar="ID",
    type=int,
    multiple=True,
    help="Token that ends the answer; may be repeated.",
)
@click.option(
    "--ignore-eos", is_flag=True, default=None, help="Continue past the model's end-of-text."
)
@click.option("--seed", metavar="S", type=int, help="Makes sampling repeatable.")
@click.option("--timeout", "timeout_s", metavar="S", type=duration, help="Time limit: 90s, 5m.")
@priority_options
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Show how fast it was.")
@daemon_options
def generate(
    model: str,
    prompt: str,
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    is_verbose: bool,
    target: Target,
    output: Output,
    **parameters: Any,
) -> None:
    """Example: mlxsup generate smollm2 "Once upon a time" --max-tokens 64

    Has MODEL continue PROMPT and prints the text as it comes; `-` reads PROMPT from stdin.
    """
    text = _read_stdin() if prompt == "-" else prompt
    with connect(target) as client, LiveLine(output) as line:
        stream = client.generate(
            model,
            prompt=text,
            stop=list(stop) or None,
            stop_token_ids=list(stop_token_ids) or None,
            on_notice=notice_teller(line),
            **parameters,
        )
        # Leaving the block cancels, on Ctrl-C or when nobody reads the output any longer, too.
        with stream:
            result = read_answer(stream, line, output)
    if output.is_json:
        output.object(result_map(model, stream.request_id, result))
    for warning in result.warnings:
        output.note(f"warning: {warning}")
    if is_verbose:
        output.note(output.style(speed_line(result), sys.stderr, dim=True))


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        message = f"the prompt on stdin is not UTF-8: {error.reason} at byte {error.start}"
        raise CliError(message, code="usage", status=ExitStatus.USAGE) from None


def read_answer(stream: Stream, line: LiveLine, output: Output) -> Result:
    """Prints the text of a stream as it comes, and gives its result.

    The model's reasoning is dimmed on a terminal, and shown nowhere else.

    Args:
        stream: read to its end.
        line: cleared before the first text.
        output: how to write output.
    """
    last, channel = "", "content"
    try:
        for delta in stream:
            if output.is_json or not delta.text:
                continue
            if delta.channel != channel:
                line.end_text()
                channel = delta.channel
            if channel == "content":
                line.make_way(delta.text, sys.stdout)
                output.answer(delta.text, sys.stdout)
                last = delta.text
            elif channel == "reasoning" and line.is_possible:
                line.make_way(delta.text, sys.stderr)
                output.answer(delta.text, sys.stderr, dim=True)
    finally:
        line.clear()
        # Otherwise the shell's prompt or an error would follow on the same line.
        if last and not last.endswith("\n") and sys.stdout.isatty():
            output.data("")
    for call in stream.result.tool_calls:
        called = f"{call['function']['name']}({call['function']['arguments']})"
        output.note(output.style(f"the model calls {called}", sys.stderr, dim=True))
    return stream.result


def result_map(model: str, request_id: str, result: Result) -> dict[str, Any]:
    """A result as `--json` prints it."""
    from dataclasses import asdict

    return {"model": model, "request_id": request_id, **asdict(result)}


def speed_line(result: Result) -> str:
    """How many tokens, how fast, how the time was spent, and what it cost."""
    usage, timings = result.usage, result.timings
    decode_s = timings.total_s - timings.first_token_s
    rate = (usage.completion_tokens - 1) / decode_s if decode_s > 0 else 0.0
    speed = f" ({rate:.1f} tokens/s)" if rate > 0 else ""
    return (
        f"{usage.completion_tokens} tokens in {timings.total_s:.2f} s{speed}, "
        f"first after {timings.first_token_s:.2f} s, {usage.engine_s:.2f} engine seconds, "
        f"prompt {usage.prompt_tokens} tokens, {result.finish_reason}"
    )
