"""Reads tool calls from a model's text, into the one form that clients see. No MLX here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]
"""The parameters of each function that a request offers, as JSON Schema, by its name."""

ToolCallParser = Callable[[str, Tools, bool], list[dict[str, Any]]]
"""Takes the text of a call or of several, the request's tools, and whether to be lenient; returns
calls, each with `name` and `arguments`, and `id` if the format has one. Raises anything."""

_BEGUN = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"]+)"(?:\s*,\s*"arguments"\s*:\s*(?P<arguments>\{.*))?',
    re.DOTALL,
)

_ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class CallIds(Enum):
    """The form of call ids; the templates of some families accept no others."""

    OURS = re.compile(r"[!-~]{1,128}")
    """`call_` and 24 hexadecimal digits; an id that the model gave is kept."""
    NINE = re.compile(r"[a-zA-Z0-9]{9}")
    """Nine letters and digits, as Mistral's templates demand."""
    NUMBERED = re.compile(r"functions\.[^\s:]{1,100}:\d{1,9}")
    """`functions.NAME:NUMBER`, from which Kimi reads the name of a result."""

    def fits(self, call_id: object) -> bool:
        """True if a template of this family accepts the id."""
        return isinstance(call_id, str) and self.value.fullmatch(call_id) is not None

    def make(self, name: str, number: int, key: str) -> str:
        """Makes an id for a call that has none.

        Args:
            name: the function's name.
            number: the call's number, from 0.
            key: the same key and number make the same id.
        """
        if self is CallIds.NUMBERED:
            return f"functions.{name}:{number}"
        digest = hashlib.blake2b(f"{key}:{number}".encode(), digest_size=12)
        if self is CallIds.OURS:
            return f"call_{digest.hexdigest()}"
        value, letters = int.from_bytes(digest.digest()), []
        for _ in range(9):
            value, letter = divmod(value, len(_ALPHANUMERIC))
            letters.append(_ALPHANUMERIC[letter])
        return "".join(letters)


class ToolCallReader:
    """Reads the calls of one answer: the gate that every call passes, whatever parser found it.

    Attributes:
        names: names of the functions that the request offers.

    Args:
        tools: the request's tools; some formats need them to know which argument is a number.
        seed: the request's seed: a call's id is derived from it, so that it is the same when the
            answer is made again.
    """

    def __init__(self, tools: list[dict[str, Any]] | None, seed: int) -> None:
        functions = [tool["function"] for tool in tools or ()]
        self._tools: Tools = {str(f["name"]): f.get("parameters") or {} for f in functions}
        self.names = frozenset(self._tools)
        self._seed = seed
        self._ids: list[str] = []

    @property
    def count(self) -> int:
        """Calls read so far."""
        return len(self._ids)

    def read(
        self,
        text: str,
        parse: ToolCallParser,
        ids: CallIds = CallIds.OURS,
        *,
        is_lenient: bool = False,
    ) -> list[str] | None:
        """Return each call as a line of JSON in OpenAI's form; None if the text is no call, or if
        the request does not offer the function.

        Args:
            text: the text of one call or of several.
            parse: the parser of the model's format.
            ids: the form of the ids.
            is_lenient: whether to read what the model has written almost rightly.
        """
        if not self.names:
            return None
        lines: list[str] = []
        made: list[str] = []
        try:
            for call in parse(text, self._tools, is_lenient):
                if call["name"] not in self.names:
                    return None
                made.append(self._id(call, ids, made))
                lines.append(_line(call["name"], _json(call["arguments"]), made[-1]))
        except Exception:  # noqa: BLE001
            # A parser gets whatever a model has written: a failure means text, never an error.
            return None
        self._ids += made
        return lines or None

    def read_cut(self, text: str, ids: CallIds) -> str | None:
        """Return a call in JSON that was cut off as a line, with the arguments that have come; None
        if the name of an offered function has not.

        OpenAI sends such a call, and programs know from its arguments that it is incomplete. As a
        text, agents would take it for the answer.
        """
        found = _BEGUN.match(text)
        if found is None or found["name"] not in self.names:
            return None
        made = self._id({"name": found["name"]}, ids, [])
        self._ids.append(made)
        return _line(found["name"], found["arguments"] or "", made)

    def _id(self, call: dict[str, Any], ids: CallIds, made: list[str]) -> str:
        """Return the model's own id if it fits and is new, or else one of ours."""
        taken = {*self._ids, *made}
        own = call.get("id")
        if ids.fits(own) and own not in taken:
            return str(own)
        number = len(taken)
        while (ours := ids.make(call["name"], number, str(self._seed))) in taken:
            number += 1
        return ours


def _json(arguments: object) -> str:
    if not isinstance(arguments, dict):
        raise ValueError("a call's arguments are a map")
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _line(name: str, arguments: str, call_id: str) -> str:
    whole = {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    line = json.dumps(whole, ensure_ascii=False) + "\n"
    line.encode()  # lone surrogates do not travel
    return line
