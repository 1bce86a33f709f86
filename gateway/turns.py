"""The turns of a chat, as chat templates take them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

Message = dict[str, Any]

BETWEEN_TEXTS = "\n"
"""Parts of a text are paragraphs; a chat template takes one text."""

JOINED = frozenset({"user", "system"})


def join_turns(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with texts of the user in a row as one: many templates want turns.

    The time it takes grows with the length of the texts, however many there are.
    """
    turns: list[Message] = []
    for role, run in groupby(messages, key=lambda message: message["role"]):
        if role in JOINED:
            text = BETWEEN_TEXTS.join(message["content"] for message in run)
            turns.append({"role": role, "content": text})
        else:
            turns += run
    return turns
