"""The turns that a person types in a chat, with prompt_toolkit: edited, completed and recalled."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
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

from .exit_status import CliError
from .terminal.keyboard import Keyboard
from .terminal.output import Output
from .terminal.writer import beneath, for_terminal

PROMPT = "> "
HISTORY_BYTES = 2**20
END_OF_PASTES = b"\x1b[?2004l"


def drawing_terminal() -> Vt100_Output:
    """Return the terminal of standard output, as prompt_toolkit draws on it."""
    terminal = Vt100_Output.from_pty(beneath(sys.stdout), os.environ.get("TERM"))
    # Not every terminal answers the question for the cursor's place, and an answer that comes late
    # would be read as typed.
    terminal.enable_cpr = False
    return terminal


def color_depth(output: Output) -> ColorDepth | None:
    """Return the depth without colours if they are not wanted; None lets prompt_toolkit choose."""
    return None if output.has_colour(sys.stdout) else ColorDepth.DEPTH_1_BIT


class TurnReader:
    """The reader of turns at a terminal."""

    def __init__(self, history: Path, commands: Sequence[str], output: Output) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            prompt_continuation="  ",
            completer=Commands(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            history=History(history),
            key_bindings=_keys(),
            input_processors=[_Shown(), TabsProcessor(char1=" ", char2=" ")],
            color_depth=color_depth(output),
            output=drawing_terminal(),
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

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class Commands(Completer):
    """The completer of commands at the beginning of a turn, and of the files behind /image."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """See `Completer`."""
        typed = document.text_before_cursor
        command, space, path = typed.partition(" ")
        if space and command == "/image":
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


class History(FileHistory):
    """Turns of earlier chats, in a file that its owner alone may read.

    One that cannot be read or written is no reason to stop.
    """

    def load_history_strings(self) -> Iterable[str]:
        """Give the entries, the newest first; a file that has grown loses the older half."""
        with suppress(OSError):
            if os.path.getsize(self.filename) > HISTORY_BYTES:
                with open(self.filename, "r+b") as file:
                    file.seek(-HISTORY_BYTES // 2, os.SEEK_END)
                    newer = file.read()
                    file.seek(0)
                    file.truncate()
                    file.write(newer[newer.find(b"\n# ") :])
            yield from super().load_history_strings()

    def store_string(self, string: str) -> None:
        """Append one entry."""
        if not string.strip():
            return
        with suppress(OSError):
            path = Path(os.fsdecode(self.filename))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            super().store_string(string)
