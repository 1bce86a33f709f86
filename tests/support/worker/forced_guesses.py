"""Rows that guess in every step, and know what to guess: the answers without drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from mlxsup.worker.engines.mlx.drafts import NgramIndex, Pacer

from support.models.tiny_model import VOCABULARY_SIZE


@contextmanager
def guessing(*texts: Sequence[int]) -> Iterator[None]:
    """Let rows whose tokens begin one of these texts guess how it goes on, with an error every few
    places, so that a pass accepts none, some or all of a guess."""

    def guess(self: NgramIndex, tokens: Sequence[int], pending: int, most: int) -> list[int]:
        begin = [*tokens, pending]
        for text in texts:
            if list(text[: len(begin)]) == begin:
                places = range(len(begin), min(len(begin) + max(most, 0), len(text)))
                return [_with_errors(text, place) for place in places]
        return []

    with (
        mock.patch.object(NgramIndex, "has_seen", return_value=True),
        mock.patch.object(NgramIndex, "guess", guess),
        mock.patch.object(Pacer, "choose", lambda self, shares, rows: self.most),
    ):
        yield


def _with_errors(text: Sequence[int], place: int) -> int:
    """Return the token at a place, or another one at every third or fourth, in each text others."""
    is_error = (place * 7 + sum(text[:3])) % 10 in (0, 3, 7)
    return (text[place] + 1) % VOCABULARY_SIZE if is_error else text[place]
