"""One sampler for all rows of a batch: a step calls it once, however many rows there are."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .draws import Draw, draw_by_share
from .picking import Picker
from .places import rows_at
from .sampling import PLAIN, RowDraws
from .shaping import make_shapers


class BatchSampler:
    """Changes a batch's logits and draws its tokens, as each row says.

    Built anew when rows join or leave: what follows from the rows is found out then, and not for
    each token.

    Attributes:
        rows: how each row's tokens are drawn.

    Args:
        rows: of the batch, at least one.
        held: the tokens of each row before the latest, those of the prompt included.
        width: of the logits.
        draw: the way that tokens are drawn.
    """

    def __init__(
        self,
        rows: Sequence[RowDraws],
        held: Sequence[Sequence[int]],
        width: int,
        draw: Draw = draw_by_share,
    ) -> None:
        self.rows = list(rows)
        self._shapers = make_shapers(self.rows, held, width)
        drawn = [place for place, row in enumerate(rows) if not row.is_greedy and not row.forced]
        self._drawn = rows_at(drawn, len(rows))
        self._picker = Picker([rows[place] for place in drawn], width, draw) if drawn else None
        self._forced = [place for place, row in enumerate(rows) if row.forced]
        self._counted = [row for row in rows if row is not PLAIN]

    def shape(self, logits: mx.array, latest: mx.array) -> mx.array:
        """The logits (rows, vocabulary) that a step's probabilities are made of.

        Args:
            logits: of the model, float32; may be written to.
            latest: the token that each row has read last (rows,).
        """
        for shaper in self._shapers:
            logits = shaper(logits, latest)
        return logits

    def draw(self, logprobs: mx.array) -> mx.array:
        """The next token of each row (rows,); called once for each step, after `shape`."""
        tokens = self._pick(logprobs)
        for place in self._forced:
            forced, number = self.rows[place].forced, self.rows[place].number
            tokens[place] = forced[min(number, len(forced) - 1)]
        for row in self._counted:
            row.number += 1
        return tokens

    def _pick(self, logprobs: mx.array) -> mx.array:
        """One argmax if all rows are greedy."""
        if self._picker is not None and self._drawn is None:
            return self._picker.pick(logprobs)
        tokens = mx.argmax(logprobs, axis=-1)
        if self._picker is not None and self._drawn is not None:
            tokens[self._drawn] = self._picker.pick(logprobs[self._drawn])
        return tokens
