"""Where in a completion's text each token begins. Pure.

A token is known by its text alone, in which half a character is a replacement character, and the
text that it makes may come later: when the character is whole, or when it is clear that a stop
string does not begin there. So what has come as text counts as it is, and what is still held back
counts by its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

HALF = "\N{REPLACEMENT CHARACTER}"
"""What a token shows in the place of a part of a character."""


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
        """One more piece.

        Args:
            text: that it adds; tokens before it may be part of that.
            tokens: the text of each of its own; none if they are not known.

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
            self._in_half = is_half if token else self._in_half
        if not self.shown and text and self._starts_with_space and not text.startswith(" "):
            self._held -= 1  # the tokenizer drops the space before the first word
        self.shown += len(text)
        self._held = max(self._held - len(text), 0) if tokens else 0
        if text and not self._held:
            self._in_half = False
        return offsets
