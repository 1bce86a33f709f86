"""Where in a completion's text each token begins. Pure.

A token's own text has a replacement character for each part of a character, and the text that it
adds to the answer may come later: once the character is complete, or once it is clear that no stop
string begins there. So text counts once it has come; until then, its tokens are counted instead.
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
