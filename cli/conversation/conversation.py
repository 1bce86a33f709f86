"""What was said so far, to whom, and how it is to be answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A turn to be answered.

    Attributes:
        turn: what the user says.
        before: the messages before it.
    """

    turn: str
    before: list[Message]

    def messages(self) -> list[Message]:
        """The turn, behind what was said before."""
        return [*self.before, {"role": "user", "content": self.turn}]


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What was said so far. Bounded by the model's context: a longer conversation is refused.

    Attributes:
        model: which one answers.
        parameters: of `Client.generate`, without the messages.
        system: the system prompt; None for none.
        messages: turns and answers, in turns.
        unanswered: the latest turn if no answer to it has come; None otherwise.
        file: where it was saved or loaded last.
    """

    model: str
    parameters: dict[str, Any]
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    unanswered: str | None = None
    file: Path | None = None

    def ask(self, turn: str) -> Ask:
        """A new turn."""
        self.unanswered = turn
        return Ask(turn=turn, before=self.messages)

    def ask_again(self) -> Ask | None:
        """The latest turn once more; what was answered stays until there is another answer.

        Returns:
            None if nothing was said yet.
        """
        if self.unanswered is not None:
            return Ask(turn=self.unanswered, before=self.messages)
        if not self.messages:
            return None
        *before, asked, _ = self.messages
        return Ask(turn=asked["content"], before=before)

    def to_send(self, ask: Ask) -> list[Message]:
        """The messages of a request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *ask.messages()]

    def take(self, ask: Ask, answer: str) -> None:
        """An answer has come, whole or in part: the model must know what the user has read."""
        self.messages = [*ask.messages(), {"role": "assistant", "content": answer}]
        self.unanswered = None

    def forget(self) -> None:
        """Begins anew, with the same model, system prompt and parameters."""
        self.messages = []
        self.unanswered = None
