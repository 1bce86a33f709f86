"""A row of the fake engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...engine import Row
from .text import BIG_TOKEN_BASE, Directives, answer_token


@dataclass(slots=True, kw_only=True)
class FakeRow:
    """A row, and how far it has come.

    Attributes:
        row: what was asked for.
        directives: what its prompt asks of the engine.
        digest: of its prompt and the model.
        said: the tokens that it must answer with; empty: any.
        known: how many of those were known before it came.
        prefilled: how many tokens of the prompt, and of what was delivered, have been read.
        generated: how many tokens the answer has.
        answered: the numbers of the texts that have a vector.
    """

    row: Row
    directives: Directives
    digest: bytes
    said: list[int]
    known: int = 0
    prefilled: int = 0
    generated: int = 0
    answered: list[int] = field(default_factory=list)

    @property
    def to_prefill(self) -> int:
        """Return the number of tokens that are read before the next one of the answer."""
        return len(self.row.tokens) + len(self.row.delivered)

    @property
    def computed(self) -> int:
        """Return the number of tokens of prompt and answer that have been read or generated."""
        return self.prefilled + self.generated - len(self.row.delivered)

    @property
    def is_decoding(self) -> bool:
        """True if everything has been read."""
        return self.prefilled == self.to_prefill

    @property
    def is_read(self) -> bool:
        """True if at most the last token is left, which gives the first one of the answer."""
        return self.prefilled >= self.to_prefill - 1

    @property
    def seed(self) -> int | None:
        """Return the seed that its tokens are drawn with; None for a greedy answer."""
        return self.row.seed if self.row.sampling.temperature > 0 else None

    def draw(self, index: int) -> int:
        """Return the token of this number, from 0."""
        if self.directives.big:
            return BIG_TOKEN_BASE + self.directives.big
        if index < len(self.said):
            return self.said[index]
        return answer_token(self.digest, index, self.seed)
