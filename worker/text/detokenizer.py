"""Token ids to text, one token at a time, never half a character; no MLX here.

mlx-lm's own streaming detokenizers drop a leading space, render the byte 0 as another character
and can raise on vocabulary entries outside the byte alphabet. These return what the tokenizer's
`decode` returns for all tokens together, except for incomplete characters at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

MAX_WAITING_TOKENS = 16
"""After this many tokens without a complete character, the text will not become valid."""


class ByteDetokenizer:
    """For vocabularies whose every entry is a run of bytes: constant work for each token.

    Args:
        token_bytes: the bytes of each id.
        strips_first_space: whether `decode` drops one space at the very start.
    """

    def __init__(self, token_bytes: Sequence[bytes], *, strips_first_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._strips_space = strips_first_space
        self._held = b""  # the beginning of a character

    def add(self, token: int) -> str:
        """Add a token; return the text that became certain with it, which may be empty."""
        if not 0 <= token < len(self._token_bytes):
            return ""
        return self._decode(self._token_bytes[token], is_last=False)

    def finish(self) -> str:
        """Return the text that was still held back, when the answer is over."""
        return self._decode(b"", is_last=True)

    def _decode(self, new: bytes, *, is_last: bool) -> str:
        held = self._held + new
        text, used = codecs.utf_8_decode(held, "replace", is_last)
        self._held = held[used:]
        if self._strips_space and text:
            self._strips_space = False
            return text[1:] if text[0] == " " else text
        return text


class WindowDetokenizer:
    """For any tokenizer: decodes a window of the last tokens with and without the new ones.

    Args:
        decode: ids to text, all at once.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0

    def add(self, token: int) -> str:
        """Add a token; return the text that became certain with it, which may be empty."""
        self._window.append(token)
        return self._advance(is_last=len(self._window) - self._shown > MAX_WAITING_TOKENS)

    def finish(self) -> str:
        """Return the text that was still held back, when the answer is over."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        before = self._decode(self._window[: self._shown])
        text = self._decode(self._window)
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and not is_last):
            return ""
        # The tokens shown last stay in the window: how a token is spaced depends on the one
        # before it.
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text[len(before) :]
