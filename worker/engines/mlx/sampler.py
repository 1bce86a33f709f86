"""How tokens are drawn from a batch's logits: one sampler for all rows, each as it asks (A6).

mlx-lm's own samplers draw from the global random state, so a row's draws would depend on which
other rows are in the batch. Here token n of an answer depends on (seed, n) and its logits alone.

There are two ways of drawing a token from the weights of a row's tokens with the row's own key.
By share: numbers of the key are looked up in running sums of the weights. That costs two numbers
for a row, but a rounding of one weight moves the borders of every token behind it. By noise: each
token gets separate noise, and the largest sum of noise and logarithm of the weight is drawn. A
rounding only changes the draw if it swaps the two largest, which is several times as rare. On the
CPU a row's logits have equal bits in any company, so what a draw costs is what counts. On a GPU
they are rounded otherwise in every batch and after a resume.

Filters are computed row by row along the vocabulary, and one that a row does not ask for leaves
that row as it is, bit by bit. A filter that no row asks for is not computed.

`DrawingBatch` is mlx-lm's batch of rows that decode with this sampler: its own calls one for each
row, which on a GPU costs the thread that steps 0.18 ms for each row with a temperature. mlx-lm's
batch keeps what belongs to a row in lists with an entry for each; of these, `samplers` has our
`RowDraws`, and what mlx-lm would call for rows without a sampler is the way that tokens are drawn.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch

from mlxsup.protocol.parameters import Sampling

from ...engine import Row
from .adapters import adapters_of
from .logits_processors import GrammarProcessor, column, entries_at, make_shapers, rows_at
from .ranks import first_rank_tokens

Processor = Callable[[mx.array, int], mx.array]
"""Changes one row's logits (1, vocabulary), given the token before them; called once for each
token, in order. What it leaves as they are it returns itself."""

COLDEST = 1e-5
"""Below this temperature the likeliest token is taken: dividing by it would overflow."""


@dataclass(slots=True, kw_only=True, eq=False)
class RowDraws:
    """How one row's tokens are drawn, and how many were; belongs to one row, but for `PLAIN`.

    Attributes:
        sampling: how its tokens are picked.
        seed: of its draws.
        number: of the token that is drawn next, those of an earlier life counted.
        spared: ids that XTC never leaves out: an answer must be able to end.
        logit_bias: added to its logits, by id.
        ending: the ids that end its answer, as long as `min_tokens` forbids any.
        min_tokens: the request's.
        processors: change its logits behind the penalties.
        forced: its tokens, whatever its logits are; the last one again and again after the others.
            Empty: they are drawn.
        adapter: the slot of the row's adapter; 0: it has none.
    """

    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    number: int = 0
    spared: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ending: Sequence[int] = ()
    min_tokens: int = 0
    processors: Sequence[Processor] = ()
    forced: Sequence[int] = ()
    adapter: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, and no number is needed."""
        return self.sampling.temperature < COLDEST

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change its logits."""
        sampling = self.sampling
        return (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )

    @property
    def is_early(self) -> bool:
        """Whether no token that ends the answer may be drawn yet."""
        return bool(self.ending) and self.number < self.min_tokens

    def later(self, tokens: int) -> RowDraws:
        """Return how the row's token is drawn, so many tokens later."""
        return self if self is PLAIN else replace(self, number=self.number + tokens)


PLAIN = RowDraws()
"""Takes the likeliest token of unchanged logits: shared by all rows that ask for nothing else."""


def make_draws(
    row: Row, *, ending: Sequence[int] = (), spared: Sequence[int] = (), adapter: int = 0
) -> RowDraws:
    """How a row's tokens are drawn; never raises for parameters that a request body accepts.

    Args:
        row: its parameters, and how many of its tokens were drawn in an earlier life.
        ending: the ids that end its answer.
        spared: ids that XTC never leaves out, besides the row's own stop tokens.
        adapter: the slot of the row's adapter.
    """
    draws = RowDraws(
        sampling=row.sampling,
        seed=row.seed,
        number=len(row.delivered),
        spared=(*spared, *row.stop_token_ids),
        logit_bias=row.logit_bias,
        ending=tuple(ending) if row.min_tokens > len(row.delivered) else (),
        min_tokens=row.min_tokens,
        processors=() if row.grammar is None else (GrammarProcessor(row.grammar),),
        adapter=adapter,
    )
    changes_logits = draws.logit_bias or draws.has_penalties or draws.ending or draws.processors
    return draws if changes_logits or adapter or not draws.is_greedy else PLAIN


def normalise(logits: mx.array) -> mx.array:
    """Return the log-probabilities that these logits stand for."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def derive_key(seed: int, number: int) -> int:
    """A 64-bit key for token `number` of the answer that has this seed."""
    return _derive(seed, number, b"")


def derive_share(seed: int, number: int) -> float:
    """A number from 0 up to 1, as random as the key and independent of it."""
    return (_derive(seed, number, b"xtc") >> 11) / 2**53


def _derive(seed: int, number: int, purpose: bytes) -> int:
    packed = struct.pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, number)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


Draw = Callable[[mx.array, Sequence[int]], mx.array]
"""Draws a token for each row (rows,), a token without weight never.

Args: the weights (rows, vocabulary), none negative, and each row's key of 64 bits.
"""

BLOCK = 128
"""How many neighbouring ids form a block: a draw by share picks a block, and then a token of it."""

LEAST_SHARE = 2.0**-33
"""Instead of the number 0, for which the noise would be infinite; the least above it is 2**-32."""


def draw_by_share(weights: mx.array, keys: Sequence[int]) -> mx.array:
    """See `Draw`; each row's two numbers have 24 bits of its key each."""
    first, second = ([key >> 40 for key in keys], [key >> 16 & 0xFFFFFF for key in keys])
    return pick_tokens(weights, _fractions(first), _fractions(second))


def draw_by_noise(weights: mx.array, keys: Sequence[int]) -> mx.array:
    """See `Draw`; the likelihood of the largest sum is that of its weight (Gumbel's noise)."""
    return mx.argmax(mx.log(weights) + make_noise(keys, weights.shape[-1]), axis=-1)


SAMPLER_VERSIONS: dict[Draw, str] = {draw_by_share: "2", draw_by_noise: "3"}
"""Changes when the same seed may draw other tokens; a part of every model's fingerprint, so that
nothing is continued the other way. No number is used twice."""


def choose_draw(backend: str) -> Draw:
    """The way that suits a backend (`cpu`, `cuda` or `metal`), once for each load."""
    return draw_by_share if backend == "cpu" else draw_by_noise


def make_noise(keys: Sequence[int], width: int) -> mx.array:
    """Gumbel's noise for each token of each row (rows, width), from -2.82 to 22.88.

    A row's noise follows from its key, whatever other rows there are, and is made for all of them
    at once. It is finite: a row may have one token with a weight, which must win in any case.
    """
    halves = np.array([[key >> 32, key & 0xFFFFFFFF] for key in keys], dtype=np.uint32)
    uniform = mx.vmap(lambda half: mx.random.uniform(shape=(width,), key=half))
    shares = mx.maximum(uniform(mx.array(halves)), LEAST_SHARE)
    # Small shares have the finest steps, so they give the large noise: unlikely tokens need it.
    return -mx.log(-mx.log1p(-shares))


def _fractions(numbers: list[int]) -> mx.array:
    """Of 2**24 (rows, 1): exact, because float32 has as many bits."""
    return mx.array((np.array(numbers) / 2**24).astype(np.float32)[:, None])


def pick_tokens(weights: mx.array, first: mx.array, second: mx.array) -> mx.array:
    """The token at which a share of each row's weights is reached.

    The first number picks a block, the second one a token of it. One sum over a whole vocabulary
    in float32 would lose the many unlikely tokens behind the likely ones.

    Args:
        weights: (rows, vocabulary), none negative; a token without any is never picked.
        first: from 0 up to 1 (rows, 1).
        second: likewise.
    """
    rows, width = weights.shape
    if rest := -width % BLOCK:
        weights = mx.pad(weights, [(0, 0), (0, rest)])
    blocks = weights.reshape(rows, -1, BLOCK)
    block = _pick(mx.sum(blocks, axis=-1), first)
    within = mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    return (block * BLOCK + _pick(within, second))[:, 0]


def _pick(masses: mx.array, share: mx.array) -> mx.array:
    """The first place (rows, 1) where the sum so far is above that share of the whole.

    Never a place without mass, however sums are rounded: in parallel they need not ascend, and the
    share of a tiny whole may be rounded up to it. Then it is the last place with mass.
    """
    ends = mx.where(masses > 0, mx.cumsum(masses, axis=-1), 0.0)
    whole = mx.max(ends, axis=-1, keepdims=True)
    is_beyond = ends > share * whole
    # Of those beyond the one that ends first, because its distance from 2 * whole is the largest.
    return mx.argmax(mx.where(is_beyond, 2 * whole - ends, ends), axis=-1, keepdims=True)


MOST_CUT = 1024
"""Up to this `top_k` only the likeliest tokens are sorted, not the whole vocabulary."""

NEVER = 2.0
"""A share that no probability reaches."""


class Picker:
    """Draws the tokens of rows that have a temperature.

    Temperature comes first, then `top_k`, `top_p`, `min_p` and XTC, each looking at what the one
    before has left.

    Args:
        rows: at least one.
        width: of their logits.
        draw: the way that tokens are drawn.
    """

    def __init__(self, rows: Sequence[RowDraws], width: int, draw: Draw = draw_by_share) -> None:
        self._rows = rows
        self._draw = draw
        self._inverse = column(1.0 / row.sampling.temperature for row in rows)
        self._filters = Filters(rows, width)
        self._xtc = Xtc(rows, width) if any(row.sampling.xtc_probability for row in rows) else None

    def pick(self, logprobs: mx.array) -> mx.array:
        """One token for each row (rows,), from its log-probabilities (rows, vocabulary)."""
        keys = [derive_key(row.seed, row.number) for row in self._rows]
        return self._draw(self.weigh(logprobs), keys)

    def weigh(self, logprobs: mx.array) -> mx.array:
        """How often each token should be drawn, next to the likeliest of its row; 0: never."""
        scaled = logprobs * self._inverse
        peak = mx.max(scaled, axis=-1, keepdims=True)
        weights = mx.exp(scaled - peak)
        least = self._filters.find_least(scaled, peak)
        if least is not None:
            weights = mx.where(scaled < least, 0.0, weights)
        return weights if self._xtc is None else self._xtc.exclude(weights)


class Filters:
    """`top_k`, `top_p` and `min_p`, each of which is a least value that a token needs.

    Args:
        rows: at least one.
        width: of their logits.
    """

    def __init__(self, rows: Sequence[RowDraws], width: int) -> None:
        cut: list[int] = []
        whole: list[int] = []
        for place, row in enumerate(rows):
            top_k, top_p = row.sampling.top_k, row.sampling.top_p
            if 0 < top_k < width and top_k <= MOST_CUT:
                cut.append(place)
            elif top_p < 1.0 or 0 < top_k < width:
                whole.append(place)
        self._likeliest = [Likeliest(places, rows, width) for places in (cut, whole) if places]
        # Where a row finds its value in those of the sorted rows; the others share the last one.
        found = {place: number for number, place in enumerate([*cut, *whole])}
        order = [found.get(place, len(found)) for place in range(len(rows))]
        self._order = mx.array(order, dtype=mx.int32)
        self._min_p = None
        if any(row.sampling.min_p for row in rows):
            self._min_p = column(_log(row.sampling.min_p) for row in rows)

    def find_least(self, scaled: mx.array, peak: mx.array) -> mx.array | None:
        """What a token needs at least (rows, 1); None if none of them is asked for.

        Args:
            scaled: log-probabilities by temperature (rows, vocabulary).
            peak: the largest of each row (rows, 1).
        """
        least: mx.array | None = None
        if self._likeliest:
            each = [likeliest.find_least(scaled, peak) for likeliest in self._likeliest]
            least = mx.concatenate([*each, mx.array([[-mx.inf]])])[self._order]
        if self._min_p is not None:
            share = peak + self._min_p
            least = share if least is None else mx.maximum(least, share)
        return least


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


class Likeliest:
    """`top_k` and `top_p` of some rows, which need their likeliest tokens in order.

    Tokens as likely as the last one kept are kept, too. `top_p` is a share of the `top_k` tokens.

    Args:
        places: of these rows.
        rows: of the batch.
        width: of their logits.
    """

    def __init__(self, places: Sequence[int], rows: Sequence[RowDraws], width: int) -> None:
        asked = [rows[place].sampling for place in places]
        kept = [one.top_k if 0 < one.top_k < width else width for one in asked]
        self._count = max(kept)
        self._places = rows_at(places, len(rows))
        self._first = mx.array([[self._count - number] for number in kept], dtype=mx.int32)
        self._top_p = None
        if any(one.top_p < 1.0 for one in asked):
            self._top_p = column(one.top_p if one.top_p < 1.0 else NEVER for one in asked)
            self._order = mx.arange(self._count)

    def find_least(self, scaled: mx.array, peak: mx.array) -> mx.array:
        """See `Filters.find_least`; of these rows alone."""
        if self._places is not None:
            scaled, peak = scaled[self._places], peak[self._places]
        if self._count < scaled.shape[-1]:
            scaled = mx.topk(scaled, self._count, axis=-1)
        ascending = mx.sort(scaled, axis=-1)
        least = mx.take_along_axis(ascending, self._first, axis=-1)
        if self._top_p is None:
            return least
        # However many others were sorted besides, the sums begin at the likeliest: equal bits.
        weights = mx.where(self._order < self._first, 0.0, mx.exp(ascending - peak))
        above = mx.cumsum(weights, axis=-1, reverse=True, inclusive=False)
        whole = above[:, :1] + weights[:, :1]
        # The likeliest token has nothing above it, and is kept even if `top_p` rounds to 0.
        is_in = (above < self._top_p * whole) | (above == 0)
        nucleus = mx.min(mx.where(is_in, ascending, mx.inf), axis=-1, keepdims=True)
        return mx.maximum(least, nucleus)


class Xtc:
    """Leaves out all but the least likely of the tokens above a threshold, as the dice say.

    Args:
        rows: at least one.
        width: of their logits.
    """

    def __init__(self, rows: Sequence[RowDraws], width: int) -> None:
        self._rows = rows
        asking = [row.spared if row.sampling.xtc_probability else () for row in rows]
        self._spared = entries_at(asking, width)

    def exclude(self, weights: mx.array) -> mx.array:
        """The weights without those tokens (rows, vocabulary)."""
        thresholds = [
            row.sampling.xtc_threshold if self._is_due(row) else NEVER for row in self._rows
        ]
        if min(thresholds) == NEVER:
            return weights
        shares = weights / mx.sum(weights, axis=-1, keepdims=True)
        likely = mx.where(shares > column(thresholds), shares, mx.inf)
        is_out = shares > mx.min(likely, axis=-1, keepdims=True)
        if self._spared is not None:
            is_out[self._spared] = False
        return mx.where(is_out, 0.0, weights)

    @staticmethod
    def _is_due(row: RowDraws) -> bool:
        probability = row.sampling.xtc_probability
        return probability > 0 and derive_share(row.seed, row.number) < probability


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


TableRow = tuple[mx.array, int]
"""A row of an array, by its place: it is cut out when it is asked for, which it seldom is."""


class DrawnToken:
    """What a step says of one row, in the words of mlx-lm's `GenerationBatch.Response`.

    Attributes:
        uid: of the row.
        token: its id.
        finish_reason: `stop` or `length`; None: the answer continues.
        prompt_cache: of a row that has ended.
        all_tokens: in that cache.

    Args:
        logprobs: of all ids at this token.
    """

    __slots__ = ("_logprobs", "all_tokens", "finish_reason", "prompt_cache", "token", "uid")

    def __init__(
        self,
        *,
        uid: int,
        token: int,
        logprobs: TableRow,
        finish_reason: str | None,
        prompt_cache: list[Any] | None,
        all_tokens: list[int] | None,
    ) -> None:
        self.uid, self.token, self.finish_reason = uid, token, finish_reason
        self.prompt_cache, self.all_tokens = prompt_cache, all_tokens
        self._logprobs = logprobs

    @property
    def logprobs(self) -> mx.array:
        """Of all ids (vocabulary,), float32; cut out on the stream of the caller."""
        table, place = self._logprobs
        return table[place]


class DrawingBatch(GenerationBatch):  # type: ignore[misc]
    """Rows that decode."""

    Response = DrawnToken
    _next_tokens: Any
    _next_logprobs: Any
    _sampler: BatchSampler | None = None

    def _step(self) -> tuple[list[int], list[TableRow]]:
        """Computes each row's next token, and returns the one before with its log-probabilities.

        The next one is under way when this returns. What is returned is not kept, as mlx-lm would
        (`_current_tokens`, `_current_logprobs`), which never looks at it again.
        """
        latest, logprobs = self._next_tokens, self._next_logprobs
        adapters = adapters_of(self.samplers)
        logits = self.model(latest[:, None], cache=self.prompt_cache, **adapters)[:, -1, :]
        sampler = self._sampler_for(logits.shape[-1])
        logits = sampler.shape(logits.astype(mx.float32), latest)
        coming = normalise(logits)
        self._next_tokens = sampler.draw(coming)
        if (group := getattr(self.model, "group", None)) is not None:
            self._next_tokens = first_rank_tokens(self._next_tokens, group)
        self._next_logprobs = [(coming, place) for place in range(len(self.uids))]
        mx.async_eval(self._next_tokens, coming)  # type: ignore[no-untyped-call]
        mx.eval(latest)
        tokens: Any = latest.tolist()
        for held, token in zip(self.tokens, tokens, strict=True):
            held.append(token)
        return tokens, logprobs

    def filter(self, keep: list[int]) -> None:
        """Keeps only these rows; without any, nothing that was made for rows is left."""
        super().filter(keep)
        if not keep:
            self._sampler = None

    def _sampler_for(self, width: int) -> BatchSampler:
        """The sampler of these rows, made anew if any has joined or left."""
        if self._sampler is None or self._sampler.rows != self.samplers:
            self._sampler = BatchSampler(self.samplers, self.tokens, width, self.fallback_sampler)
        return self._sampler
