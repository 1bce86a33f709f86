"""What changes logits before they become probabilities: for all rows of a batch that ask for it.

Each kind is one computation for its rows, whatever their number, and leaves all other rows as they
are, bit by bit. The order is that of docs/http-api.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import numpy as np

from ...text.grammar import RowGrammar

if TYPE_CHECKING:
    from .sampler import RowDraws


def column(values: Iterable[float]) -> mx.array:
    """A number for each row (rows, 1), float32."""
    return mx.array([[value] for value in values], dtype=mx.float32)


def rows_at(places: Sequence[int], count: int) -> mx.array | None:
    """Those rows of `count` (some,); None if it is all of them, in their order."""
    if list(places) == list(range(count)):
        return None
    return mx.array(list(places), dtype=mx.int32)


def entries_at(ids: Sequence[Sequence[int]], width: int) -> tuple[mx.array, mx.array] | None:
    """The entries of each row that ids stand for, as rows and columns; None if there is none.

    Args:
        ids: of each row.
        width: of the logits: a tokenizer may know more ids than the model has a place for.
    """
    found = [(row, token) for row, own in enumerate(ids) for token in own if 0 <= token < width]
    if not found:
        return None
    rows, columns = zip(*found, strict=True)
    return mx.array(rows, dtype=mx.int32), mx.array(columns, dtype=mx.int32)


class GrammarProcessor:
    """Forbids the tokens that the grammar does not allow next.

    llguidance has its own kernel for Metal; plain array operations work everywhere.

    Args:
        grammar: its state after what was delivered in an earlier life.
    """

    def __init__(self, grammar: RowGrammar) -> None:
        self._grammar = grammar
        self._is_first = True

    def __call__(self, logits: mx.array, latest: int) -> mx.array:
        """See `Processor`; called once more after the last token (then it changes nothing)."""
        if not self._is_first:  # the one before the first is the prompt's, or was delivered
            self._grammar.accept(latest)
        self._is_first = False
        if self._grammar.lead is not None:
            return self._lead_on(logits, *self._grammar.lead)
        mask = self._grammar.mask()
        if mask is None:
            return logits
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        width = logits.shape[-1]
        allowed = np.zeros(width, dtype=bool)
        count = min(width, len(bits))
        allowed[:count] = bits[:count]
        return mx.where(mx.array(allowed), logits, -mx.inf)

    @staticmethod
    def _lead_on(logits: mx.array, early_ends: Sequence[int], on: int) -> mx.array:
        """Let a model that would end its answer in the reasoning end the reasoning instead: the
        answer is still owed."""
        ends = [token for token in early_ends if token < logits.shape[-1]]
        if not ends:
            return logits
        wanted = mx.max(logits[..., [*ends, on]], axis=-1)
        logits = logits + 0
        logits[..., ends] = -mx.inf
        logits[..., on] = wanted
        return logits


ALL_TOKENS = 2**31 - 1
"""A window that no context fills."""

LEAST_ROOM = 64
"""How many more tokens a window without an end has room for, before it is made larger."""


class Shaper(Protocol):
    """Changes the logits of some rows."""

    def __call__(self, logits: mx.array, latest: mx.array) -> mx.array:
        """The changed logits; called once for each step.

        Args:
            logits: (rows, vocabulary), float32; may be written to.
            latest: the token that each row has read last (rows,).
        """


def make_shapers(
    rows: Sequence[RowDraws], held: Sequence[Sequence[int]], width: int
) -> list[Shaper]:
    """What changes a batch's logits, in order; empty for most batches.

    Args:
        rows: of the batch.
        held: the tokens of each row before the latest, those of the prompt included.
        width: of the logits.
    """
    shapers: list[Shaper] = []
    biased = [row.logit_bias for row in rows]
    if (places := entries_at([list(bias) for bias in biased], width)) is not None:
        values = [v for bias in biased for token, v in bias.items() if 0 <= token < width]
        shapers.append(Bias(*places, mx.array(values, dtype=mx.float32)))
    if penalised := [place for place, row in enumerate(rows) if row.has_penalties]:
        shapers.append(Penalties(penalised, rows, held))
    if any(row.processors for row in rows):
        shapers.append(Processors(rows))
    if any(row.is_early for row in rows):
        # Behind the grammars, which are not asked again: they may leave nothing but an end.
        shapers.append(NoEndYet(rows, width))
    return shapers


class Bias:
    """Adds `logit_bias`.

    Args:
        rows: of the entries.
        columns: of the entries.
        values: to be added to them.
    """

    def __init__(self, rows: mx.array, columns: mx.array, values: mx.array) -> None:
        self._rows, self._columns, self._values = rows, columns, values

    def __call__(self, logits: mx.array, latest: mx.array) -> mx.array:
        """See `Shaper`."""
        return logits.at[self._rows, self._columns].add(self._values)


class Penalties:
    """Repetition, presence and frequency penalties over the latest tokens of each row.

    The tokens in sight stay on the device, a ring for each row: a step's tokens are not known here
    when the next one is computed. Their order does not matter.

    Args:
        places: of the rows that have any.
        rows: of the batch.
        held: see `make_shapers`.
    """

    def __init__(
        self, places: Sequence[int], rows: Sequence[RowDraws], held: Sequence[Sequence[int]]
    ) -> None:
        asked = [rows[place].sampling for place in places]
        windows = [sampling.penalty_window or ALL_TOKENS for sampling in asked]
        recent = [held[place][-window:] for place, window in zip(places, windows, strict=True)]
        self._all = mx.array([[place] for place in places], dtype=mx.int32)
        self._some = rows_at(places, len(rows))
        self._windows = np.array(windows, dtype=np.int64)
        self._seen = np.array([len(tokens) for tokens in recent], dtype=np.int64)
        self._room = max(
            min(window, _round_up(len(tokens) + LEAST_ROOM))
            for window, tokens in zip(windows, recent, strict=True)
        )
        ring = np.zeros((len(places), self._room), dtype=np.int32)
        for own, tokens in zip(ring, recent, strict=True):
            own[: len(tokens)] = tokens
        self._ring = mx.array(ring)
        self._slots = mx.arange(self._room)
        self._repetition: mx.array | None = None
        self._presence: mx.array | None = None
        self._frequency: mx.array | None = None
        if any(one.repetition_penalty != 1.0 for one in asked):
            self._repetition = column(one.repetition_penalty for one in asked)
        if any(one.presence_penalty for one in asked):
            self._presence = column(one.presence_penalty for one in asked)
        if any(one.frequency_penalty for one in asked):
            self._frequency = column(-one.frequency_penalty for one in asked)

    def __call__(self, logits: mx.array, latest: mx.array) -> mx.array:
        """See `Shaper`."""
        own = (latest if self._some is None else latest[self._some]).astype(mx.int32)[:, None]
        is_seen = self._take(own)
        # What is not seen yet stands for the latest token, which changes that one no further.
        tokens = mx.where(is_seen, self._ring, own)
        if self._repetition is not None or self._presence is not None:
            changed = logits[self._all, tokens]
            if self._repetition is not None:
                changed = mx.where(
                    changed < 0, changed * self._repetition, changed / self._repetition
                )
            if self._presence is not None:
                changed = changed - self._presence
            logits[self._all, tokens] = changed
        if self._frequency is not None:
            each = mx.where(is_seen, self._frequency, 0.0)
            logits = logits.at[self._all, tokens].add(each)
        return logits

    def _take(self, latest: mx.array) -> mx.array:
        """Puts each row's latest token in the place of its oldest; which places hold any."""
        at = self._seen % self._windows
        if at.max() >= self._room:
            self._ring = mx.pad(self._ring, [(0, 0), (0, self._room)])
            self._room *= 2
            self._slots = mx.arange(self._room)
        where = mx.array(at[:, None].astype(np.int32))
        self._ring = mx.put_along_axis(self._ring, where, latest, axis=1)
        self._seen += 1
        filled = np.minimum(self._seen, self._windows).astype(np.int32)
        return self._slots < mx.array(filled[:, None])


def _round_up(count: int) -> int:
    """The next power of two: few sizes, and so few shapes."""
    return 1 << max(count - 1, 0).bit_length()


class Processors:
    """Calls the rows' own processors, each for its row.

    They have to know each token, so that the thread waits for it before the next one can be drawn;
    meanwhile the device computes the logits that they change.

    Args:
        rows: of the batch.
    """

    def __init__(self, rows: Sequence[RowDraws]) -> None:
        self._own = [(place, row.processors) for place, row in enumerate(rows) if row.processors]

    def __call__(self, logits: mx.array, latest: mx.array) -> mx.array:
        """See `Shaper`."""
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        tokens: Any = latest.tolist()
        changed = []
        for place, processors in self._own:
            given = row = logits[place : place + 1]
            for processor in processors:
                row = processor(row, tokens[place])
            if row is not given:
                changed.append((place, row))
        if changed:
            places = mx.array([place for place, _ in changed], dtype=mx.int32)
            logits[places] = mx.concatenate([row for _, row in changed], axis=0)
        return logits


class NoEndYet:
    """Forbids the tokens that end an answer until it has `min_tokens`.

    If nothing else is left (a grammar that can only end), they stay allowed: some token must be
    drawn. It counts the tokens, and reads none.

    Args:
        rows: of the batch.
        width: of the logits.
    """

    def __init__(self, rows: Sequence[RowDraws], width: int) -> None:
        self._rows = rows
        self._width = width
        self._look()

    def _look(self) -> None:
        """Finds the rows that this is still for."""
        places = [place for place, row in enumerate(self._rows) if row.is_early]
        self._early = [self._rows[place] for place in places]
        self._places = mx.array(places, dtype=mx.int32)
        self._ends = entries_at([row.ending for row in self._early], self._width)

    def __call__(self, logits: mx.array, latest: mx.array) -> mx.array:
        """See `Shaper`."""
        if not all(row.is_early for row in self._early):
            self._look()
        if self._ends is None:
            return logits
        everything = logits[self._places]
        others = everything + 0
        others[self._ends] = -mx.inf
        is_left = mx.max(others, axis=-1, keepdims=True) > -mx.inf
        logits[self._places] = mx.where(is_left, others, everything)
        return logits
