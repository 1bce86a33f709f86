"""Log-probabilities of tokens in the forms of OpenAI and vLLM, and where in the text tokens begin.

A token's own text has a replacement character for each part of a character, and the text that it
adds to the answer may come later: once the character is complete, or once it is clear that no stop
string begins there. So text counts once it has come; until then, its tokens are counted instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxsup.client import Logprobs, TokenLogprob

from ..shape import encode

HALF = "\N{REPLACEMENT CHARACTER}"
"""What a token shows in the place of a part of a character."""

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class LogprobLists:
    """The log-probabilities of a completion, encoded as they come: those of a long prompt would
    hold up the event loop if all were encoded at the end."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {name: [] for name in LISTS}

    def add(self, logprobs: Sequence[Logprobs], offsets: list[int]) -> None:
        """Add those of the next tokens; see `completion_logprobs`."""
        if logprobs:
            for name, values in completion_logprobs(logprobs, offsets).items():
                self._parts[name].append(encode(values)[1:-1])

    def __bool__(self) -> bool:
        return bool(self._parts["tokens"])

    def encoded(self) -> str:
        """Return them as a completion has them."""
        lists = (f'"{name}":[{",".join(parts)}]' for name, parts in self._parts.items())
        return "{" + ",".join(lists) + "}"


class TextOffsets:
    """Counts the characters of one text.

    Attributes:
        shown: of the text so far.
    """

    def __init__(self) -> None:
        self.shown = 0
        self._held = 0  # characters that are held back, as far as tokens tell
        self._starts_with_space: bool | None = None  # the first token
        self._in_half = False  # whether the last token ended within a character

    def take(self, text: str, tokens: Sequence[str] = ()) -> list[int]:
        """Count one more piece.

        Args:
            text: new text, of these tokens or of earlier ones whose text was held back.
            tokens: the text of each new token; empty if the piece has no log-probabilities.

        Returns:
            For each token the number of characters of the text before it.
        """
        offsets = []
        for token in tokens:
            if self._starts_with_space is None:
                self._starts_with_space = token.startswith(" ")
            is_half = HALF in token
            if token and self._in_half and not is_half:
                self._held += 1  # the character before it is whole
            offsets.append(self.shown + self._held)
            self._held += len(token.replace(HALF, ""))
            if token:
                self._in_half = is_half
        if not self.shown and text and self._starts_with_space and not text.startswith(" "):
            self._held -= 1  # the tokenizer drops the space before the first word
        self.shown += len(text)
        self._held = max(self._held - len(text), 0)
        if text and not self._held:
            self._in_half = False
        return offsets


class PromptOffsets:
    """Finds the tokens of a prompt in its text, which is there before them.

    A token that is not in the text, such as the mark at its beginning, begins where the next does.
    """

    def __init__(self) -> None:
        self._text = b""
        self._at = 0  # in bytes
        self._begun = 0  # characters before that place, the last of which may go on
        self._missing = 0  # bytes of the tokens since then that were not found

    def add(self, text: str) -> None:
        """Add more of the text."""
        self._text += text.encode()

    def take(self, tokens: Sequence[bytes]) -> list[int]:
        """Return how many characters of the text are before each of the next tokens.

        Args:
            tokens: the bytes of each; replacement characters if only those are known of it.
        """
        offsets = []
        for token in tokens:
            found, place = token, self._find(token)
            if place < 0:  # a text may lack the space before its first word
                found = token.removeprefix(b" ")
                place = self._find(found)
            # A tokenizer may show a token alone without the space that it begins with.
            if place > self._at + 1:
                self._move(place)
            is_inside = not all(map(_begins, self._text[self._at : self._at + 1]))
            offsets.append(self._begun - is_inside)
            if place < 0:
                self._missing += len(token)
            else:
                self._move(place + len(found))
        return offsets

    def _find(self, token: bytes) -> int:
        end = self._at + self._missing + 1 + len(token)
        return self._text.find(token, self._at, end) if token else -1

    def _move(self, to: int) -> None:
        self._begun += sum(map(_begins, self._text[self._at : to]))
        self._at, self._missing = to, 0


def _begins(byte: int) -> bool:
    """True if a character begins with this byte of UTF-8."""
    return byte & 0xC0 != 0x80


def prompt_logprob(logprobs: Logprobs) -> dict[str, Any] | None:
    """Return a prompt token in vLLM's form: log-probabilities by id; None for the first."""
    if logprobs.chosen.logprob is None:
        return None
    ranks = {one.token: rank for rank, one in enumerate(logprobs.top, start=1)}
    return {
        str(one.token): {
            "logprob": one.logprob, "rank": ranks.get(one.token), "decoded_token": one.text,
        }
        for one in (logprobs.chosen, *logprobs.top)
    }  # fmt: skip


def chat_logprobs(logprobs: Sequence[Logprobs]) -> dict[str, Any]:
    """Return the log-probabilities of tokens, as a chat has them."""
    content = [
        {**_token(one.chosen), "top_logprobs": [_token(other) for other in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: Sequence[Logprobs], offsets: list[int]) -> dict[str, Any]:
    """Return the log-probabilities of tokens, as a completion has them."""
    return {
        "tokens": [_name(one.chosen) for one in logprobs],
        "token_logprobs": [one.chosen.logprob for one in logprobs],
        "top_logprobs": [
            None
            if one.chosen.logprob is None
            else {_name(other): other.logprob for other in one.top}
            for one in logprobs
        ],
        "text_offset": offsets,
    }


def _name(token: TokenLogprob) -> str:
    """Return the text of a token; its bytes if it is no whole text, so that names differ."""
    return f"bytes:{repr(token.raw_bytes)[2:-1]}" if token.raw_bytes else token.text


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.raw_bytes or token.text.encode("utf-8", "replace")),
    }
