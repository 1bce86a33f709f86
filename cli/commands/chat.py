"""`mlxsup chat`: a conversation with a model."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.folders import HISTORY_FILE
from mlxsup.protocol.tasks import Task

from ..arguments import (
    check_known,
    check_makes,
    is_writer,
    model_meant,
    only_model,
    optional_writer_argument,
)
from ..connection import (
    Target,
    connect,
    daemon_options,
    explain_connection_lost,
    explain_request_error,
)
from ..exit_status import CliError, ExitStatus
from ..options import (
    answer_options,
    below,
    check_parameters,
    check_text,
    keep_alive_option,
    priority_options,
    refusal_of,
)
from ..pictures import Picture, check_taker, image_option, read_picture, with_pictures
from ..terminal.answer import AnswerScreen, read_answer, result_map, show_remarks
from ..terminal.output import Output, width_of
from ..terminal.reader_watch import reader_watched
from ..terminal.text import counted, format_bytes
from .add import add_option, served_name

if TYPE_CHECKING:
    from mlxsup.client import Client, Result
    from mlxsup.client.client import Stream

COMMAND = "mlxsup chat"

WAY_OUT = "`/clear` starts a new conversation"
"""The hint if the context is full."""

ENDS = frozenset({"/bye", "/exit", "/quit"})
TYPED_ENDS = ENDS | {"bye", "exit", "quit"}
"""A line of a pipe may say just `exit` to the model."""
AGAIN = "Press Ctrl-C again, or Ctrl-D, to quit."
NOTHING = "-"
"""Typed instead of a value: none, or the default."""

HELP = {
    "/show": "show the model, the system prompt and the settings",
    "/system [TEXT]": "show or set the system prompt; - removes it",
    "/set [NAME VALUE]": "show or change a setting: max-tokens, temperature, top-p, top-k, min-p,"
    " seed, think; - restores the default",
    "/model [NAME]": "show or change the model",
    "/image [FILE]": "attach a picture to the next message; without FILE show what is attached; -"
    " drops it",
    "/retry": "answer the last message again",
    "/clear": "start a new conversation",
    "/bye": "quit, like Ctrl-D, /exit and /quit",
    "/help, /?": "show this help",
}
WORDS = frozenset([*(typed.split()[0].strip(",") for typed in HELP), "/?", *ENDS])
REMARKS = (
    "Ctrl-C stops an answer or clears the line. Tab completes a command.",
    "Alt-Enter starts a new line.",
)
NARROW = 60
"""With fewer columns than this, the meaning of a command stands below it."""


@click.command()
@optional_writer_argument
@image_option
@answer_options
@priority_options
@keep_alive_option
@add_option
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Show how fast each answer was.")
@daemon_options
def chat(
    model: str | None,
    images: tuple[Picture, ...],
    system: str | None,
    is_verbose: bool,
    is_sure: bool,
    target: Target,
    output: Output,
    **parameters: Any,
) -> None:
    """Example: mlxsup chat smollm2-135m

    Chats with MODEL: each line is a message, also of a pipe, and the model sees the whole
    conversation. Ctrl-C stops an answer, Ctrl-D quits, and /help lists the commands. MODEL may be
    left out if only one is configured.
    """
    check_parameters(parameters, COMMAND)
    if system is not None:
        check_text("--system", system, COMMAND)
    with connect(target) as client:
        model = model or only_model(client.status(), COMMAND)
        model, preset = served_name(
            model, client, target, output, is_sure=is_sure, makes=Task.GENERATE
        )
        parameters = below(preset, parameters)
        talk = Conversation(model=model, system=system, parameters=parameters)
        if images:
            check_taker(client.status(), model)
        talk.attached = list(images)
        is_typed = sys.stdin.isatty()
        chatting = Chat(client, talk, output, is_verbose=is_verbose, is_typed=is_typed)
        if not is_typed:
            chatting.run_lines()
            return
        output.note(f"Chat with {model}. /help for commands, Ctrl-D to quit.")
        chatting.run(_reader(output), target.explain)


def _reader(output: Output) -> Callable[[], str | None]:
    """Return what reads the turns of a person."""
    if not output.can_redraw(sys.stdout):
        return typed_line
    from ..turn_reader import TurnReader  # takes a while to import

    words = sorted([*WORDS, *(f"/set {name}" for name in SETTINGS)])
    return TurnReader(Path(HISTORY_FILE).expanduser(), words, output).read


def piped_line() -> str | None:
    """Read a line of standard input; None at its end."""
    data = sys.stdin.buffer.readline()
    try:
        return data.decode().rstrip("\r\n") if data else None
    except UnicodeDecodeError as error:
        message = f"the input is not UTF-8: {error.reason} at byte {error.start} of a line"
        raise CliError(message, status=ExitStatus.USAGE) from None


def typed_line() -> str | None:
    """Read a line from a terminal that only knows lines, or beside output that is no terminal."""
    click.echo("> ", nl=False, err=True)
    line = piped_line()
    if line is None:
        click.echo(err=True)
    return line


Message = dict[str, Any]
"""Its content is a text, or pictures and a text."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The turns and answers so far, bounded by the model's context: a longer one is refused.

    Attributes:
        model: which one answers.
        parameters: of `Client.generate`, without the messages.
        system: the system prompt; None for none.
        messages: turns and answers, in turns.
        asked: the messages up to the latest turn if no answer to it has come; None otherwise.
        attached: the pictures that go with the next turn.
    """

    model: str
    parameters: dict[str, Any]
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    asked: list[Message] | None = None
    attached: list[Picture] = field(default_factory=list)

    def ask(self, turn: str) -> list[Message]:
        """Begin a new turn, with what is attached; return the messages up to it."""
        content, self.attached = with_pictures(turn, self.attached), []
        self.asked = [*self.messages, {"role": "user", "content": content}]
        return self.asked

    def ask_again(self) -> list[Message] | None:
        """Return the messages up to the latest turn, None before the first one; its answer stays
        until another one has come."""
        return self.asked or self.messages[:-1] or None

    def to_send(self, asked: list[Message]) -> list[Message]:
        """Return the messages of a request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *asked]

    def take(self, asked: list[Message], answer: str) -> None:
        """Add an answer, whole or in part: the model must know what the user has read."""
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        self.asked = None

    def forget(self) -> None:
        """Begin anew, with the same model, system prompt and parameters."""
        self.messages, self.asked, self.attached = [], None, []


class Chat:
    """Takes turns and commands, until the input ends or `/bye`.

    Args:
        client: of the daemon.
        talk: what was said so far.
        is_verbose: whether to show how fast each answer was.
        is_typed: whether a person types, who sees what a command has done, may try again after an
            error, and mistypes commands; a line of a pipe may begin with a path.
    """

    def __init__(
        self,
        client: Client,
        talk: Conversation,
        output: Output,
        *,
        is_verbose: bool,
        is_typed: bool,
    ) -> None:
        self._client = client
        self._talk = talk
        self._output = output
        self._is_verbose = is_verbose
        self._is_typed = is_typed

    def run_lines(self) -> None:
        """Answer each turn of a pipe.

        Raises:
            CliError, RequestError, ConnectionLost: a turn failed; the later ones rely on it.
        """
        while (turn := piped_line()) is not None and turn.strip() not in ENDS:
            self._take(turn)

    def run(self, read: Callable[[], str | None], explain: Callable[[CliError], CliError]) -> None:
        """Answer each turn of a person; an error is shown, and the turn can be sent again."""
        from mlxsup.client import ConnectionLost, RequestError

        is_leaving = False
        while True:
            try:
                turn = read()
                if turn is None or turn.strip() in TYPED_ENDS:
                    return
                is_leaving = False
                self._take(turn)
            except KeyboardInterrupt as error:
                # At an empty line, the first one may have been meant for the answer before.
                if error.args and is_leaving:
                    return
                is_leaving = bool(error.args)
                self._output.note(AGAIN if is_leaving else "")
            except CliError as error:
                self._output.error(explain(error))
            except RequestError as error:
                self._output.error(explain(explain_request_error(error)))
            except ConnectionLost as error:
                self._output.error(explain(explain_connection_lost(error)))

    # ------------------------------------------------------------ answers

    def _take(self, turn: str) -> None:
        word, _, argument = turn.strip().partition(" ")
        is_alike = self._is_typed and word[:1] == "/" and word[1:].isalpha()
        if "\n" not in turn.strip() and (word in WORDS or is_alike):
            asked = self._obey(word, argument.strip())
        else:
            asked = self._talk.ask(turn.rstrip("\n")) if turn.strip() else None
        if asked is not None:
            self._answer(asked)

    def _answer(self, asked: list[Message]) -> None:
        from mlxsup.client import RequestError

        try:
            request_id, result = self._stream(asked)
        except RequestError as error:
            if error.code != "context_length_exceeded" or len(asked) == 1:
                raise
            raise CliError(error.message, code=str(error.code), hint=WAY_OUT) from None
        if result.text:
            # Even if it was cancelled.
            self._talk.take(asked, result.text)
        output = self._output
        if output.is_json:
            output.object(result_map(self._talk.model, request_id, result))
        elif not sys.stdout.isatty() and not result.text:
            output.data("")  # a line for each turn
        if result.finish_reason == "cancelled":
            output.note("Stopped.", "dim")
        if result.finish_reason == "length" and not self._talk.parameters["max_tokens"]:
            output.note(f"The context is full: {WAY_OUT}.", "dim")
        show_remarks(result, output, is_verbose=self._is_verbose)

    def _stream(self, asked: list[Message]) -> tuple[str, Result]:
        # Before anything is sent: an interrupt at any later moment cancels it.
        with (
            AnswerScreen(self._talk.model, self._output) as screen,
            reader_watched(self._client.close),
            interrupts_cancel() if self._is_typed else nullcontext(_leave_alone) as cancelled,
        ):
            stream = self._client.generate(
                self._talk.model,
                messages=self._talk.to_send(asked),
                on_notice=screen.notify,
                **self._talk.parameters,
            )
            with stream:
                cancelled(stream)
                return stream.request_id, read_answer(stream, screen, self._output)

    # ------------------------------------------------------------ commands

    def _obey(self, word: str, argument: str) -> list[Message] | None:
        """Carry out a command, and return the messages to be answered now, if there are any.

        Raises:
            CliError: it cannot be carried out; nothing has changed.
            RequestError, ConnectionLost: the daemon says so.
        """
        talk, note = self._talk, self._output.note
        match word:
            case "/system" if not argument:
                note(talk.system or "There is no system prompt.")
            case "/show":
                turns = counted(len(talk.messages) // 2, "answered message")
                system = talk.system or "none"
                note(f"Model: {talk.model}\nSystem prompt: {system}\n{self._settings()}\n{turns}")
            case "/system":
                talk.system = None if argument == NOTHING else argument
                self._confirm(f"System prompt {'removed' if argument == NOTHING else 'set'}.")
            case "/set" if not argument:
                note(self._settings())
            case "/set":
                # As Ollama has it: `/set parameter temperature 0.5`, `/set system TEXT`.
                name, _, value = argument.removeprefix("parameter ").strip().partition(" ")
                if name == "system":
                    return self._obey("/system", value.strip())
                self._set(name, value)
            case "/model" if not argument:
                rows = filter(is_writer, self._client.status()["models"])
                names = ", ".join(sorted(row["name"] for row in rows))
                note(f"Model: {talk.model}. Available: {names}.")
            case "/model":
                status = self._client.status()
                found = model_meant(status, argument)
                row = check_known(status, argument) if found is None else found.row
                check_makes(row, Task.GENERATE, Target())
                talk.model = row["name"] if found is None else found.name
                if found is not None:
                    talk.parameters = {**talk.parameters, **found.preset}
                self._confirm(f"Model: {argument}.")
            case "/image" if not argument:
                note(_attached(talk.attached))
            case "/image":
                if argument == NOTHING:
                    talk.attached = []
                else:
                    picture = read_picture(argument)
                    check_taker(self._client.status(), talk.model)
                    talk.attached.append(picture)
                self._confirm(_attached(talk.attached))
            case "/retry":
                if (asked := talk.ask_again()) is None:
                    raise CliError("there is no message to answer again")
                return asked
            case "/clear":
                talk.forget()
                self._confirm("Started a new conversation.")
            case "/help" | "/?":
                note(help_text(width_of(sys.stderr)))
            case _:
                raise CliError(f"unknown command {word}", hint="`/help` lists the commands")
        return None

    def _set(self, name: str, text: str) -> None:
        asked = SYNONYMS.get(name, name.replace("_", "-"))
        meant = [asked] if asked in SETTINGS else [one for one in SETTINGS if one.startswith(asked)]
        if len(meant) != 1:
            raise CliError(f"unknown setting {name}", hint=f"settings: {', '.join(SETTINGS)}")
        parameter, read, takes = SETTINGS[meant[0]]
        try:
            value = None if text.strip() == NOTHING else read(text.strip())
        except ValueError:
            hint = f"`/set {meant[0]} -` restores the default"
            raise CliError(f"{meant[0]} must be {takes}", hint=hint) from None
        changed = {**self._talk.parameters, parameter: value}
        if (refusal := refusal_of(changed)) is not None:
            raise CliError(refusal.message)
        self._talk.parameters = changed
        self._confirm(self._settings())

    def _settings(self) -> str:
        shown = []
        for name, (parameter, _, _) in SETTINGS.items():
            value = self._talk.parameters.get(parameter)
            if isinstance(value, dict):
                value = "on" if any(value.values()) else "off"
            if value is not None:
                shown.append(f"{name} {value}")
        return f"Settings: {', '.join(shown) or 'the defaults of the model'}."

    def _confirm(self, text: str) -> None:
        if self._is_typed:
            self._output.note(text)


def _attached(pictures: list[Picture]) -> str:
    """Return what goes with the next message."""
    if not pictures:
        return "No picture is attached."
    names = ", ".join(f"{one['at']} ({format_bytes(len(one['data']))})" for one in pictures)
    return f"Attached to the next message: {names}."


def _switch(text: str) -> dict[str, Any]:
    from mlxsup.client.thinking import thinking_arguments

    if text not in ("on", "off"):
        raise ValueError(text)
    return thinking_arguments(thinks=text == "on")


SETTINGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "max-tokens": ("max_tokens", int, "an integer"),
    "temperature": ("temperature", float, "a number"),
    "top-p": ("top_p", float, "a number"),
    "top-k": ("top_k", int, "an integer"),
    "min-p": ("min_p", float, "a number"),
    "seed": ("seed", int, "an integer"),
    "think": ("chat_template_kwargs", _switch, "on or off"),
}
"""By the name that /set takes: the parameter of `Client.generate`, what makes its value of a text,
and what it takes, for a person who has typed something else."""


SYNONYMS = {"num_predict": "max-tokens", "temp": "temperature"}


def help_text(columns: int | None) -> str:
    """Return what `/help` says, in lines that fit the terminal."""
    lines = click.HelpFormatter(width=columns)
    lines.write_dl(list(HELP.items()), col_max=0 if columns and columns < NARROW else 30)
    for remark in REMARKS:
        lines.write_text(remark)
    return lines.getvalue().rstrip("\n")


def _leave_alone(_: Stream) -> None:
    """Let an interrupt end the command."""


@contextmanager
def interrupts_cancel() -> Iterator[Callable[[Stream], None]]:
    """Let Ctrl-C cancel an answer, without interrupting the code that reads it (D4).

    Gives a function that takes the stream; an interrupt before there is one counts, too. A second
    one no longer waits for the daemon.
    """
    streams: list[Stream] = []
    has_come = False

    def cancel(*_: object) -> None:
        nonlocal has_come
        if has_come:
            raise KeyboardInterrupt
        has_come = True
        for stream in streams:
            stream.cancel()

    def watch(stream: Stream) -> None:
        streams.append(stream)
        if has_come:
            stream.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield watch
    finally:
        signal.signal(signal.SIGINT, before)
