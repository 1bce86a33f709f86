"""A chat's conversation: what was said, and the file that keeps it."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .exit_status import CliError
from .new_file import new_file, replaced_file
from .pictures import Picture, with_pictures

Message = dict[str, Any]
Content = str | list[dict[str, Any]]
"""A text, or pictures and a text."""

SCHEMA_VERSION = 1
MAX_BYTES = 64 * 1024**2
"""Of a saved conversation: more than any request may have."""

ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn to be answered, and the messages before it."""

    turn: Content
    before: list[Message]

    def messages(self) -> list[Message]:
        """Return the turn, behind what was said before."""
        return [*self.before, {"role": "user", "content": self.turn}]


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The turns and answers so far, bounded by the model's context: a longer one is refused.

    Attributes:
        model: which one answers.
        parameters: of `Client.generate`, without the messages.
        system: the system prompt; None for none.
        messages: turns and answers, in turns.
        unanswered: the latest turn if no answer to it has come; None otherwise.
        attached: the pictures that go with the next turn.
        file: where it was saved or loaded last.
    """

    model: str
    parameters: dict[str, Any]
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    unanswered: Content | None = None
    attached: list[Picture] = field(default_factory=list)
    file: Path | None = None

    def ask(self, turn: str) -> Ask:
        """Begin a new turn, with what is attached."""
        self.unanswered, self.attached = with_pictures(turn, self.attached), []
        return Ask(self.unanswered, self.messages)

    def ask_again(self) -> Ask | None:
        """Return the latest turn once more, None before the first one; its answer stays until
        another one has come."""
        if self.unanswered is not None:
            return Ask(self.unanswered, self.messages)
        if not self.messages:
            return None
        *before, asked, _ = self.messages
        return Ask(asked["content"], before)

    def to_send(self, ask: Ask) -> list[Message]:
        """Return the messages of a request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *ask.messages()]

    def take(self, ask: Ask, answer: str) -> None:
        """Add an answer, whole or in part: the model must know what the user has read."""
        self.messages = [*ask.messages(), {"role": "assistant", "content": answer}]
        self.unanswered = None

    def forget(self) -> None:
        """Begin anew, with the same model, system prompt and parameters."""
        self.messages, self.unanswered, self.attached = [], None, []

    def save(self, path: Path) -> None:
        """Write one JSON object for its owner alone; only the chat's own file is replaced."""
        last = self.unanswered
        value = {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "system": self.system,
            "messages": self.messages if last is None else Ask(last, self.messages).messages(),
        }
        text = json.dumps(value, ensure_ascii=False, indent=2, default=_in_base64) + "\n"
        try:
            with replaced_file(path) if self.file == path else new_file(path) as file:
                file.write(text.encode("utf-8", "replace"))
        except FileExistsError:
            raise CliError(f"{path} already exists; choose another name") from None
        except OSError as error:
            raise CliError(f"cannot write {path}: {error.strerror}") from None
        except ValueError as error:  # a zero byte in its name
            raise CliError(f"cannot write {path}: {error}") from None
        self.file = path

    def load(self, path: Path) -> None:
        """Replace what was said and the system prompt by what the file has.

        Raises:
            CliError: it cannot be read, or is no conversation; nothing has changed then.
        """
        self.system, messages = _read(path)
        self.file = path
        self.unanswered = messages.pop()["content"] if len(messages) % 2 else None
        self.messages = messages


def _read(path: Path) -> tuple[str | None, list[Message]]:
    """Return the system prompt and the messages of a saved conversation."""
    value: Any = None
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        value = json.loads(data) if len(data) <= MAX_BYTES else None
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        pass
    match value:
        case {"schema_version": version, "system": str() | None as system, "messages": [*messages]}:
            if version == SCHEMA_VERSION and all(map(_is_message, messages, range(MAX_BYTES))):
                return system, [one | {"content": _content_of(one["content"])} for one in messages]
    raise CliError(f"{path} was not written by /save")


def _is_message(value: object, place: int) -> bool:
    match value:
        case {"role": str(role), "content": content, **rest}:
            is_content = isinstance(content, str) or _content_of(content) is not None
            return is_content and not rest and role == ROLES[place % 2]
    return False


def _in_base64(data: object) -> str:
    """Return a picture as JSON has it."""
    assert isinstance(data, bytes)
    return base64.b64encode(data).decode()


def _content_of(value: Any) -> Any:
    """Return the content of a message from a file; None if it is none."""
    match value:
        case str():
            return value
        case [*pictures, {"type": "text", "text": str()} as text]:
            try:
                return [
                    {"type": "image", "data": base64.b64decode(one["data"]), "at": str(one["at"])}
                    for one in pictures
                ] + [text]
            except (ValueError, TypeError, KeyError):
                return None
    return None
