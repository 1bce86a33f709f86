"""`mlxsup chat`: a conversation with a model."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from mlxsup.protocol.folders import HISTORY_FILE

from ..connection import (
    Target,
    connect,
    daemon_options,
    explain_connection_lost,
    explain_request_error,
)
from ..exit_status import CliError
from ..model_names import check_known, model_argument
from ..priority_options import priority_options
from ..terminal.history import History
from ..terminal.live_line import LiveLine
from ..terminal.notices import notice_teller
from ..terminal.output import Output
from ..terminal.turns import PipeReader, Reader, TerminalReader
from .generate import TOP_P_HELP, read_answer, result_map, speed_line

if TYPE_CHECKING:
    from mlxsup.client import Client, Result
    from mlxsup.client.client import Stream


HELP = """\
/clear   forget the conversation
/exit    end the chat, as Ctrl-D does
/help    show this help
Ctrl-C cancels an answer or clears the line.
A backslash at the end of a line, or an open ``` block, continues the turn on
the next line."""


@click.command(short_help="Talk with a model.")
@model_argument
@click.option("--system", metavar="TEXT", help="The system prompt.")
@click.option("--max-tokens", metavar="N", type=int, help="At most this many tokens per answer.")
@click.option("--temperature", metavar="T", type=float, help="0 picks the likeliest token.")
@click.option("--top-p", metavar="P", type=float, help=TOP_P_HELP)
@click.option("--seed", metavar="S", type=int, help="Makes sampling repeatable.")
@priority_options
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Show how fast each answer was.")
@daemon_options
def chat(
    model: str,
    system: str | None,
    is_verbose: bool,
    target: Target,
    output: Output,
    **parameters: Any,
) -> None:
    """Example: mlxsup chat smollm2

    Chats with MODEL: each line is a turn, and each turn sends the whole conversation. Ctrl-C
    cancels an answer, Ctrl-D ends the chat, /help says more. Piped lines are turns too.
    """
    with connect(target) as client:
        check_known(client.status(), model)
        talk = Conversation(
            client,
            model,
            explain=target.explain,
            system=system,
            is_verbose=is_verbose,
            output=output,
            **parameters,
        )
        if not sys.stdin.isatty():
            talk.run(PipeReader())
            return
        output.note(f"chat with {model}; /help helps, Ctrl-D ends")
        talk.run(TerminalReader(History(Path(HISTORY_FILE).expanduser())))


class Conversation:
    """The conversation so far, and how to continue it.

    Args:
        client: of the daemon.
        model: the model that answers.
        explain: makes an error's hint be about this daemon.
        system: the system prompt.
        is_verbose: whether to show how fast each answer was.
        output: how to write output.
        parameters: of `Client.generate`.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        /,
        *,
        explain: Callable[[CliError], CliError],
        system: str | None,
        is_verbose: bool,
        output: Output,
        **parameters: Any,
    ) -> None:
        self._client = client
        self._explain = explain
        self._model = model
        self._system = [{"role": "system", "content": system}] if system else []
        self._is_verbose = is_verbose
        self._output = output
        self._parameters = parameters
        # Bounded by the model's context: a longer conversation is refused.
        self._messages: list[dict[str, Any]] = []

    def run(self, reader: Reader) -> None:
        """Answers turn after turn, until the input ends or `/exit`.

        Raises:
            RequestError, ConnectionLost: a turn failed, and nobody is there to try another.
        """
        while True:
            try:
                turn = reader.read()
                if turn is None or turn.strip() == "/exit":
                    break
                self._take(turn, reader)
            except KeyboardInterrupt:
                if not reader.is_interactive:
                    raise
                self._output.note("")
        if turn is None and reader.is_interactive:
            self._output.note("")

    def _take(self, turn: str, reader: Reader) -> None:
        command = turn.strip()
        if not command:
            return
        if command == "/help":
            self._output.note(HELP)
        elif command == "/clear":
            self._messages.clear()
            if reader.is_interactive:
                self._output.note("conversation cleared")
        elif reader.is_interactive and command.startswith("/") and command[1:].isalpha():
            self._output.note(f"unknown command {command}; /help lists them")
        elif reader.is_interactive:
            self._try_answer(turn)
        else:
            self._answer(turn, is_interactive=False)

    def _try_answer(self, turn: str) -> None:
        """Answers; an error is shown, and the turn can be sent again."""
        from mlxsup.client import ConnectionLost, RequestError

        try:
            self._answer(turn, is_interactive=True)
        except RequestError as error:
            self._output.error(self._explain(explain_request_error(error)))
        except ConnectionLost as error:
            self._output.error(self._explain(explain_connection_lost(error)))

    def _answer(self, turn: str, *, is_interactive: bool) -> None:
        asked = [*self._messages, {"role": "user", "content": turn}]
        # Before anything is sent: an interrupt at any later moment cancels it.
        with LiveLine(self._output) as line, _Interrupts(is_caught=is_interactive) as interrupts:
            stream = self._client.generate(
                self._model,
                messages=[*self._system, *asked],
                on_notice=notice_teller(line),
                **self._parameters,
            )
            with stream:
                interrupts.cancel(stream)
                result = read_answer(stream, line, self._output)
        if result.text:
            # Even if it was cancelled: the model must know what the user has read.
            self._messages = [*asked, {"role": "assistant", "content": result.text}]
        self._show_end(stream.request_id, result)

    def _show_end(self, request_id: str, result: Result) -> None:
        output = self._output
        if output.is_json:
            output.object(result_map(self._model, request_id, result))
        elif not sys.stdout.isatty() and not result.text.endswith("\n"):
            output.data("")
        for warning in result.warnings:
            output.note(f"warning: {warning}")
        if result.finish_reason == "cancelled":
            output.note(output.style("cancelled", sys.stderr, dim=True))
        if self._is_verbose:
            output.note(output.style(speed_line(result), sys.stderr, dim=True))


class _Interrupts:
    """Lets Ctrl-C end an answer cleanly, without interrupting the code that reads it (D4).

    Args:
        is_caught: False leaves interrupts alone.
    """

    def __init__(self, *, is_caught: bool) -> None:
        self._is_caught = is_caught
        self._was_interrupted = False
        self._stream: Stream | None = None
        self._before: Any = None

    def cancel(self, stream: Stream) -> None:
        """Lets interrupts cancel this stream, even one that came before the stream existed."""
        self._stream = stream
        if self._was_interrupted:
            stream.cancel()

    def __enter__(self) -> Self:
        if self._is_caught:
            self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_caught:
            signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, *_: object) -> None:
        self._was_interrupted = True
        if self._stream is not None:
            self._stream.cancel()
