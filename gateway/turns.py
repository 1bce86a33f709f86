"""The turns of a chat, as chat templates take them."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

BETWEEN_TEXTS = "\n"
"""Parts of a text are paragraphs; a chat template takes one text."""

JOINED = frozenset({"user", "system"})


def append_turn(turns: list[Message], message: Message) -> None:
    """Adds a message; texts of the user in a row are one, because many templates want turns."""
    last = turns[-1] if turns else {}
    if message["role"] == last.get("role") and message["role"] in JOINED:
        last["content"] += BETWEEN_TEXTS + message["content"]
    else:
        turns.append(message)
