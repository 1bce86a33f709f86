"""What a person can type in a chat besides turns: `/set temperature 0.7`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..answer_options import refusal_of
from ..exit_status import CliError
from ..model_names import check_known
from ..terminal.output import Output, width_of
from . import saved_file
from .conversation import Ask, Conversation
from .help import help_lines

if TYPE_CHECKING:
    from mlxsup.client import Client

EXIT = "/exit"
NOTHING = "-"
"""Typed instead of a value: none, or the default."""


def _switch(text: str) -> dict[str, Any]:
    from mlxsup.client.thinking import thinking_arguments

    if text not in ("on", "off"):
        raise ValueError(text)
    return thinking_arguments(thinks=text == "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What /set can set.

    Attributes:
        parameter: of `Client.generate`.
        read: makes its value of what was typed.
        takes: for a person who has typed something else.
    """

    parameter: str
    read: Callable[[str], Any]
    takes: str


SETTINGS = {
    "max-tokens": Setting(parameter="max_tokens", read=int, takes="an integer"),
    "temperature": Setting(parameter="temperature", read=float, takes="a number"),
    "top-p": Setting(parameter="top_p", read=float, takes="a number"),
    "top-k": Setting(parameter="top_k", read=int, takes="an integer"),
    "min-p": Setting(parameter="min_p", read=float, takes="a number"),
    "seed": Setting(parameter="seed", read=int, takes="an integer"),
    "think": Setting(parameter="chat_template_kwargs", read=_switch, takes="on or off"),
}


class SlashCommands:
    """Carries out commands on one conversation.

    Args:
        conversation: what they change.
        client: asked for the models.
        output: how to write output.
        is_interactive: whether somebody sees that a command has done something.
    """

    def __init__(
        self, conversation: Conversation, client: Client, output: Output, *, is_interactive: bool
    ) -> None:
        self._talk = conversation
        self._client = client
        self._output = output
        self._is_interactive = is_interactive
        self._commands: dict[str, Callable[[str], Ask | None]] = {
            "/system": self._system,
            "/set": self._set,
            "/model": self._model,
            "/retry": self._retry,
            "/clear": self._clear,
            "/save": self._save,
            "/load": self._load,
            "/help": self._help,
            "/?": self._help,
        }

    def knows(self, line: str) -> bool:
        """Whether this turn is a command; in a terminal, so is a word that looks like one."""
        word = line.partition(" ")[0]
        if "\n" in line or not word.startswith("/"):
            return False
        return word in self._commands or (self._is_interactive and word[1:].isalpha())

    def run(self, line: str) -> Ask | None:
        """Carries out a command.

        Returns:
            What is to be answered now; None for nothing.

        Raises:
            CliError: it cannot be carried out; nothing has changed.
            RequestError, ConnectionLost: the daemon says so.
        """
        word, _, argument = line.partition(" ")
        command = self._commands.get(word)
        if command is None:
            raise CliError(f"unknown command {word}; /help lists them")
        return command(argument.strip())

    def _system(self, text: str) -> None:
        if not text:
            self._output.note(self._talk.system or "no system prompt")
            return
        self._talk.system = None if text == NOTHING else text
        self._confirm("system prompt removed" if text == NOTHING else "system prompt set")

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not name:
            self._output.note(self._settings_line())
            return
        setting = SETTINGS.get(name.replace("_", "-"))
        if setting is None:
            raise CliError(f"/set knows no {name}; it knows {', '.join(SETTINGS)}")
        value = None
        if text.strip() != NOTHING:
            try:
                value = setting.read(text.strip())
            except ValueError:
                raise CliError(f"/set {name} takes {setting.takes}, or - for the default") from None
        changed = {**self._talk.parameters, setting.parameter: value}
        refusal = refusal_of(changed)
        if refusal is not None:
            raise CliError(refusal.message)
        self._talk.parameters = changed
        self._confirm(self._settings_line())

    def _settings_line(self) -> str:
        shown = []
        for name, setting in SETTINGS.items():
            value = self._talk.parameters.get(setting.parameter)
            if isinstance(value, dict):
                value = "on" if any(value.values()) else "off"
            if value is not None:
                shown.append(f"{name} {value}")
        return ", ".join(shown) or "everything is as the model's entry says"

    def _model(self, name: str) -> None:
        status = self._client.status()
        if not name:
            names = ", ".join(sorted(row["name"] for row in status["models"]))
            self._output.note(f"{self._talk.model} answers; configured: {names}")
            return
        check_known(status, name)
        self._talk.model = name
        self._confirm(f"{name} answers from now on")

    def _retry(self, _: str) -> Ask | None:
        ask = self._talk.ask_again()
        if ask is None:
            raise CliError("there is nothing to answer again")
        return ask

    def _clear(self, _: str) -> None:
        self._talk.forget()
        self._confirm("conversation cleared")

    def _save(self, name: str) -> None:
        path = _path(name) if name else self._talk.file
        if path is None:
            raise CliError("/save takes the name of a file")
        saved_file.save(self._talk, path)
        self._confirm(f"saved to {path}")

    def _load(self, name: str) -> None:
        if not name:
            raise CliError("/load takes the name of a file")
        saved_file.load(self._talk, _path(name))
        count = len(self._talk.messages) // 2
        self._confirm(f"loaded {count} answered turn{'' if count == 1 else 's'}")

    def _help(self, _: str) -> None:
        self._output.note("\n".join(help_lines(width_of(sys.stderr))))

    def _confirm(self, text: str) -> None:
        if self._is_interactive:
            self._output.note(text)


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))
