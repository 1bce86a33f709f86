"""How one row's tokens are drawn: what it asks for, and the numbers that it draws with (A6).

mlx-lm's own samplers draw from the global random state, so a row's draws would depend on which
other rows are in the batch. Here token n of an answer depends on (seed, n) and its logits alone.
`batch_sampler` draws for all rows of a batch at once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlxsup.protocol.parameters import Sampling

from ...engine import Row
from .grammar import GrammarProcessor

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


PLAIN = RowDraws()
"""Takes the likeliest token of unchanged logits: shared by all rows that ask for nothing else."""


def make_draws(row: Row, *, ending: Sequence[int] = (), spared: Sequence[int] = ()) -> RowDraws:
    """How a row's tokens are drawn; never raises for parameters that a request body accepts.

    Args:
        row: its parameters, and how many of its tokens were drawn in an earlier life.
        ending: the ids that end its answer.
        spared: ids that XTC never leaves out, besides the row's own stop tokens.
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
    )
    changes_logits = draws.logit_bias or draws.has_penalties or draws.ending or draws.processors
    return draws if changes_logits or not draws.is_greedy else PLAIN


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
