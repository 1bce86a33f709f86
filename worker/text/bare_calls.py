"""Tool calls without markers: `{"name": …, "parameters": …}`, or `NAME(key=value)`.

JSON may begin anywhere in the content, a call in Python's form only at its beginning; nothing but
further calls may follow. Such text is held back only as long as it can still become calls of known
tools. No MLX here.
"""

from __future__ import annotations

from collections.abc import Collection

KEYS = ("name", "function", "type", "parameters", "arguments")
"""The JSON of a call begins with one of these."""

MAX_BEGINNING = 512
"""At most this many characters are held back before the first key and the name have come."""

_OPEN, _CLOSE = "([{", ")]}"


class BareCallWatch:
    """Watches the content of one answer from its beginning.

    Attributes:
        is_call_like: true if what is held back begins like a call of one of the tools.
        begun: how many of such calls have begun.

    Args:
        names: names of the request's tools.
        is_call: true if all of the content is a call, whatever it looks like.
    """

    def __init__(self, names: Collection[str], *, is_call: bool = False) -> None:
        self._names = names
        self._is_call = self.is_call_like = is_call
        self._is_first = True  # nothing but white space has come
        self._held: list[str] = []
        self.begun = 0
        self._latest_at = 0
        self._beginning = ""  # of the next call, not certain yet
        self._depth = 0
        self._quote = ""  # around the string that the text is in
        self._is_escaped = False

    @property
    def text(self) -> str:
        """Return what is held back."""
        return "".join(self._held)

    @property
    def latest(self) -> str:
        """Return the latest call so far."""
        return "".join(self._held[self._latest_at :])

    def is_plain(self, text: str) -> bool:
        """True if `add` would return this text as it is, and keep nothing of it in mind."""
        return not self._held and not self._is_first and "{" not in text

    def add(self, text: str) -> str:
        """Return text that cannot be part of a call; may be empty."""
        if self._is_call:
            self._held.append(text)
            return ""
        shown: list[str] = []
        while text:
            if not self._held and not self._is_first:
                before, brace, text = text.partition("{")
                shown.append(before)
                text = brace + text
            for at, character in enumerate(text):
                self._held.append(character)
                if not self._goes_on(character):
                    shown.append(self._let_go())
                    text = text[at + 1 :]
                    break
            else:
                break
        return "".join(shown)

    def _let_go(self) -> str:
        """Return what is held back, which is no call."""
        held = self.text
        self._held, self._beginning, self._depth, self._quote = [], "", 0, ""
        self.is_call_like = self._is_first = self._is_escaped = False
        return held

    def _goes_on(self, character: str) -> bool:
        """True if what is held back may still be calls alone, with this character."""
        if not self._depth:
            if self.is_call_like and not self._beginning and character in " \t\r\n;,":
                return True
            self._beginning += character
            begins = _begins(self._beginning, self._names, may_be_python=self._is_first)
            if begins:
                self.is_call_like = True
                self.begun += 1
                self._latest_at = len(self._held) - len(self._beginning)
                for one in self._beginning:
                    self._read(one)
                self._beginning = ""
            return begins or (begins is None and len(self._beginning) <= MAX_BEGINNING)
        self._read(character)
        return self._depth >= 0

    def _read(self, character: str) -> None:
        """Follow brackets and strings."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = character == "\\"
            if character == self._quote:
                self._quote = ""
        elif character in _OPEN:
            self._depth += 1
        elif character in _CLOSE:
            self._depth -= 1
        elif self._depth and character in "\"'":
            self._quote = character


def _begins(text: str, names: Collection[str], *, may_be_python: bool) -> bool | None:
    """True if a text begins like a call; None if that is undecided."""
    rest = text.lstrip()
    if not rest:
        return None
    if may_be_python:
        if rest[0] == "[":
            rest = rest[1:].lstrip()
            if not rest:
                return None
        if rest[0] != "{":
            name, bracket, _ = rest.partition("(")
            if bracket:
                return name.strip() in names
            return None if any(known.startswith(name) for known in names) else False
    for expected in ("{", '"'):
        if not rest:
            return None
        if rest[0] != expected:
            return False
        rest = rest[1:] if expected == '"' else rest[1:].lstrip()
    key, quote, rest = rest.partition('"')
    if not quote:
        return None if any(known.startswith(key) for known in KEYS) else False
    if key not in ("name", "function", "type"):
        return key in KEYS
    for expected in (":", '"'):
        rest = rest.lstrip()
        if not rest:
            return None
        if rest[0] != expected:
            return key == "function" and rest[0] == "{"
        rest = rest[1:]
    name, quote, _ = rest.partition('"')
    expected_names = ("function",) if key == "type" else names
    if not quote:
        return None if any(known.startswith(name) for known in expected_names) else False
    return name in expected_names
