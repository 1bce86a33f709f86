"""The turns that a person types in a chat, with prompt_toolkit: edited, completed and recalled."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import History as BaseHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.processors import (
    Processor,
    TabsProcessor,
    Transformation,
    TransformationInput,
)
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from .conversation import PROMPT, PROMPT_ON, continued
from .exit_status import CliError
from .terminal.keyboard import Keyboard
from .terminal.output import Output
from .terminal.writer import beneath, for_terminal

MAX_ENTRIES = 1000
END_OF_PASTES = b"\x1b[?2004l"


class TurnReader:
    """The reader of turns at a terminal."""

    def __init__(self, history: Path, commands: Sequence[str], output: Output) -> None:
        terminal = Vt100_Output.from_pty(beneath(sys.stdout), os.environ.get("TERM"))
        # Not every terminal answers the question for the cursor's place, and an answer that comes
        # late would be read as typed.
        terminal.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=lambda _, __, wraps: " " * len(PROMPT_ON) if wraps else PROMPT_ON,
            completer=Commands(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            history=History(history),
            key_bindings=_keys(),
            input_processors=[_Shown(), TabsProcessor(char1=" ", char2=" ")],
            color_depth=None if output.has_colour(sys.stdout) else ColorDepth.DEPTH_1_BIT,
            output=terminal,
        )

    def read(self) -> str | None:
        """Return the next turn, which is empty after Ctrl-C; None at the end of the input.

        Raises:
            CliError: the keys made no text.
            KeyboardInterrupt: Ctrl-C at an empty line, with an argument.
        """
        keyboard = Keyboard(END_OF_PASTES)
        keyboard.save()
        try:
            turn = self._session.prompt()
            turn.encode()
        except KeyboardInterrupt:
            if not self._session.default_buffer.text:
                raise KeyboardInterrupt(PROMPT) from None
            return ""
        except EOFError:
            return None
        except UnicodeEncodeError:
            raise CliError("the message is not UTF-8 and was not sent") from None
        finally:
            keyboard.give_back()
        return turn


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def end_line(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        longer = continued(buffer.text)
        if longer is None:
            buffer.validate_and_handle()
        elif buffer.document.is_cursor_at_the_end:
            buffer.document = Document(longer)
        else:
            buffer.newline(copy_margin=False)

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class Commands(Completer):
    """The completer of commands at the beginning of a turn, and of the files behind them."""

    OF_FILES = ("/image", "/load", "/save")

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """See `Completer`."""
        typed = document.text_before_cursor
        command, space, path = typed.partition(" ")
        if space and command in self.OF_FILES:
            yield from self._paths.get_completions(Document(path), complete_event)
            return
        for word in self._words:
            if typed and word.startswith(typed):
                yield Completion(word, start_position=-len(typed))


class _Shown(Processor):
    """Shows pasted and recalled text with signs for characters that would steer the terminal."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        """See `Processor`."""
        fragments = transformation_input.fragments
        return Transformation([(one[0], for_terminal(one[1], is_answer=True)) for one in fragments])


class History(BaseHistory):
    """Turns of earlier chats: one JSON string per line, readable by its owner alone.

    A file that cannot be read or written is no reason to stop.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterator[str]:
        """Give the latest entries, the newest first; a file that has grown is shortened."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        entries = [entry for line in lines if (entry := _entry_in(line))][-MAX_ENTRIES:]
        if len(lines) > 2 * MAX_ENTRIES:
            shorter = self._path.with_name(f"{self._path.name}.new")
            shorter.unlink(missing_ok=True)
            _append(shorter, entries)
            shorter.replace(self._path)
        yield from reversed(entries)

    def store_string(self, string: str) -> None:
        """Append one entry."""
        if not string.strip():
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _append(self._path, [string])
        except OSError:
            return


def _append(path: Path, entries: list[str]) -> None:
    data = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, data.encode("utf-8", "replace"))
    finally:
        os.close(descriptor)


def _entry_in(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, str) else None
