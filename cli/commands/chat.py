"""`mlxsup chat`: a conversation with a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.folders import HISTORY_FILE

from ..answer_options import answer_options, check_parameters, check_text
from ..connection import (
    Target,
    connect,
    daemon_options,
    explain_connection_lost,
    explain_request_error,
)
from ..conversation.conversation import Ask, Conversation
from ..conversation.interrupts import Interrupts
from ..conversation.slash_commands import EXIT, SlashCommands
from ..exit_status import CliError
from ..keep_alive_option import keep_alive_option
from ..model_names import check_known, optional_model_argument
from ..only_model import only_model
from ..priority_options import priority_options
from ..terminal.answer import read_answer, result_map, show_remarks
from ..terminal.answer_line import AnswerLine
from ..terminal.history import History
from ..terminal.output import Output
from ..terminal.reader_watch import reader_watched
from ..terminal.turns import PipeReader, Reader, TerminalReader

if TYPE_CHECKING:
    from mlxsup.client import Client, Result

COMMAND = "mlxsup chat"

WAY_OUT = "`/clear` forgets the conversation; `/save FILE` before it keeps a copy"
"""What helps if the context is full."""


@click.command()
@optional_model_argument
@answer_options
@priority_options
@keep_alive_option
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Show how fast each answer was.")
@daemon_options
def chat(
    model: str | None,
    system: str | None,
    is_verbose: bool,
    target: Target,
    output: Output,
    **parameters: Any,
) -> None:
    """Example: mlxsup chat smollm2

    Chats with MODEL: each line is a turn, and each turn sends the whole conversation. Ctrl-C
    cancels an answer, Ctrl-D ends the chat, /help says more. Piped lines are turns too. MODEL may
    be left out if only one is configured.
    """
    check_parameters(parameters, COMMAND)
    if system is not None:
        check_text("--system", system, COMMAND)
    with connect(target) as client:
        status = client.status()
        model = model or only_model(status, COMMAND)
        check_known(status, model)
        talk = Conversation(model=model, system=system, parameters=parameters)
        is_typed = sys.stdin.isatty()
        commands = SlashCommands(talk, client, output, is_interactive=is_typed)
        chatting = Chat(
            client, talk, commands, explain=target.explain, is_verbose=is_verbose, output=output
        )
        if not is_typed:
            chatting.run(PipeReader())
            return
        output.note(f"chat with {model}; /help helps, Ctrl-D ends")
        chatting.run(TerminalReader(History(Path(HISTORY_FILE).expanduser())))


class Chat:
    """Takes turns, until the input ends.

    Args:
        client: of the daemon.
        talk: what was said so far.
        commands: what can be typed besides turns.
        explain: makes an error's hint be about this daemon.
        is_verbose: whether to show how fast each answer was.
        output: how to write output.
    """

    def __init__(
        self,
        client: Client,
        talk: Conversation,
        commands: SlashCommands,
        /,
        *,
        explain: Callable[[CliError], CliError],
        is_verbose: bool,
        output: Output,
    ) -> None:
        self._client = client
        self._talk = talk
        self._commands = commands
        self._explain = explain
        self._is_verbose = is_verbose
        self._output = output

    def run(self, reader: Reader) -> None:
        """Answers turn after turn, until the input ends or `/exit`.

        Raises:
            CliError, RequestError, ConnectionLost: a turn failed, and nobody is there to try
                another.
        """
        while True:
            try:
                turn = reader.read()
                if turn is None or turn.strip() == EXIT:
                    break
                if not turn.strip():
                    continue
                if reader.is_interactive:
                    self._try(turn)
                else:
                    self._take(turn, is_interactive=False)
            except KeyboardInterrupt:
                if not reader.is_interactive:
                    raise
                self._output.note("")
        if turn is None and reader.is_interactive:
            self._output.note("")

    def _try(self, turn: str) -> None:
        """Takes a turn; an error is shown, and the turn can be sent again."""
        from mlxsup.client import ConnectionLost, RequestError

        try:
            self._take(turn, is_interactive=True)
        except CliError as error:
            self._output.error(self._explain(error))
        except RequestError as error:
            self._output.error(self._explain(explain_request_error(error)))
        except ConnectionLost as error:
            self._output.error(self._explain(explain_connection_lost(error)))

    def _take(self, turn: str, *, is_interactive: bool) -> None:
        command = turn.strip()
        is_command = self._commands.knows(command)
        ask = self._commands.run(command) if is_command else self._talk.ask(turn)
        if ask is not None:
            self._answer(ask, is_interactive=is_interactive)

    def _answer(self, ask: Ask, *, is_interactive: bool) -> None:
        from mlxsup.client import RequestError

        try:
            request_id, result = self._stream(ask, is_interactive=is_interactive)
        except RequestError as error:
            if error.code != "context_length_exceeded" or not ask.before:
                raise
            raise CliError(error.message, code=str(error.code), hint=WAY_OUT) from None
        if result.text:
            # Even if it was cancelled.
            self._talk.take(ask, result.text)
        self._show_end(request_id, result)

    def _stream(self, ask: Ask, *, is_interactive: bool) -> tuple[str, Result]:
        # Before anything is sent: an interrupt at any later moment cancels it.
        with (
            AnswerLine(self._talk.model, self._output) as line,
            reader_watched(self._client.close),
            Interrupts(is_caught=is_interactive) as interrupts,
        ):
            stream = self._client.generate(
                self._talk.model,
                messages=self._talk.to_send(ask),
                on_notice=line.tell,
                **self._talk.parameters,
            )
            with stream:
                interrupts.cancel(stream)
                return stream.request_id, read_answer(stream, line, self._output)

    def _show_end(self, request_id: str, result: Result) -> None:
        output = self._output
        if output.is_json:
            output.object(result_map(self._talk.model, request_id, result))
        elif not sys.stdout.isatty() and not result.text.endswith("\n"):
            output.data("")
        if result.finish_reason == "cancelled":
            output.note(output.style("cancelled", sys.stderr, dim=True))
        is_full = result.finish_reason == "length" and not self._talk.parameters["max_tokens"]
        if is_full:
            output.note(output.style(f"the context is full: {WAY_OUT}", sys.stderr, dim=True))
        show_remarks(result, output, is_verbose=self._is_verbose)
