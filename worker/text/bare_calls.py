"""Tool calls without markers: an answer that is nothing but `{"name": …, "parameters": …}`.

Such text is held back only as long as it can still become a call of a known tool. No MLX here.
"""

from __future__ import annotations

from collections.abc import Collection

KEYS = ("name", "function", "type", "parameters", "arguments")
"""The JSON of a call begins with one of these."""

MAX_BEGINNING = 512
"""At most this many characters are held back before the first key and the name have come."""


class BareCallWatch:
    """Watches the content of one answer from its beginning.

    Attributes:
        text: what is held back.
        is_undecided: whether the content may still be a call.

    Args:
        names: names of the request's tools.
        is_call: true if all of the content is a call, whatever it looks like.
    """

    def __init__(self, names: Collection[str], *, is_call: bool = False) -> None:
        self._names = names
        self._is_call = self._is_begun = is_call
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._parts: list[str] = []
        self.is_undecided = True

    @property
    def text(self) -> str:
        """Returns what is held back."""
        return "".join(self._parts)

    @property
    def is_call_like(self) -> bool:
        """Whether the text began like a call of one of the tools."""
        return self._is_begun

    def add(self, text: str) -> str:
        """Text that cannot be part of a call: all of the content so far, or nothing."""
        if not self.is_undecided:
            return text
        self._parts.append(text)
        if self._is_call:
            return ""
        if not self._is_begun:
            beginning = self.text
            state = _begins(beginning, self._names)
            if state is None and len(beginning) <= MAX_BEGINNING:
                return ""
            self._is_begun = bool(state)
            text = beginning
        if self._is_begun and self._is_one(text):
            return ""
        self.is_undecided = self._is_begun = False
        held, self._parts = self.text, []
        return held

    def _is_one(self, text: str) -> bool:
        """Whether only whitespace and further calls follow a call's last brace."""
        for character in text:
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = character == "\\"
                self._is_in_string = character != '"'
            elif character in "}]":
                self._depth -= 1
            elif character == "{" or (self._depth and character == "["):
                self._depth += 1
            elif self._depth:
                self._is_in_string = character == '"'
            elif character != ";" and not character.isspace():
                return False
            if self._depth < 0:
                return False
        return True


def _begins(text: str, names: Collection[str]) -> bool | None:
    """Whether this begins like a call; None if that is undecided."""
    rest = text.lstrip()
    for expected in ("{", '"'):
        if not rest:
            return None
        if rest[0] != expected:
            return False
        rest = rest[1:] if expected == '"' else rest[1:].lstrip()
    key, quote, rest = rest.partition('"')
    if not quote:
        return None if any(known.startswith(key) for known in KEYS) else False
    if key not in ("name", "function"):
        return key in KEYS
    for expected in (":", '"'):
        rest = rest.lstrip()
        if not rest:
            return None
        if rest[0] != expected:
            return False
        rest = rest[1:]
    name, quote, _ = rest.partition('"')
    if not quote:
        return None if any(known.startswith(name) for known in names) else False
    return name in names
