"""Prompts that are read in the same passes: mlx-lm's batch of prompts, in few shapes.

With CUDA, attention is planned anew for each shape of a pass: 40 to 65 ms for a count of rows,
tokens and keys that this process has not seen, beside a pass of 10 ms for an 8B model on an H200.
So the tokens and the keys of a pass are padded to a few sizes. The tokens that pad it are read, and
cut off again; the keys are masked.

mlx-lm takes the rows that begin to answer out of the batch of prompts by index, which copies the
cache of each of them, layer by layer, in one graph with the first token's pass. Of a prompt that is
read alone that is the whole cache, once more, for nothing: 16 GiB of a 7B model with 32,768 tokens.
So caches are handed over if all rows of the batch begin to answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch, StopSequences
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from ...engine import Picture
from .adapters import adapters_of
from .batch_keys import BatchKeys, with_cheap_masks
from .caches import RopePositions
from .limits import clear_cache
from .logprobs import PromptLogprobs, pass_tokens
from .prefill import LARGEST_CHUNK
from .sampler import Draw, DrawingBatch, RowDraws
from .shapes import pass_shape

KeptCaches = dict[int, tuple[list[Any], list[int]]]
"""By uid: a row's cache, and the tokens that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """What the passes need to know about a row.

    Attributes:
        tokens: tokens still to be read; at least one.
        known: the tokens before them, which `cache` holds.
        cache: belongs to the row from now on; None: nothing is known.
        max_tokens: at least 1.
        draws: how its tokens are drawn.
        stops: what ends its answer.
        checkpoints: numbers of tokens in its cache at which a pass ends and a copy is taken.
        prompt: collects how likely the tokens are, if that is asked for.
        pictures: see `Prompt.pictures`; their places count from the first of `known`.
    """

    tokens: list[int]
    known: list[int]
    cache: list[Any] | None
    max_tokens: int
    draws: RowDraws
    stops: StopSequences
    checkpoints: tuple[int, ...] = ()
    prompt: PromptLogprobs | None = None
    pictures: tuple[Picture, ...] = ()

    def after(self, count: int, cache: list[Any]) -> NewRow:
        """Return the same row, that many first tokens of which `cache` holds."""
        tokens = self.known + self.tokens
        return replace(self, tokens=tokens[count:], known=tokens[:count], cache=cache)


WidthOf = Callable[[int, int, int, bool], int]
"""Returns the tokens of a pass for its rows, the tokens of the longest, the keys before it, and
whether no row is padded on the left."""


class PromptBatch(PromptProcessingBatch):  # type: ignore[misc]
    """Prompts in one batch, from their first pass until the first tokens of their answers.

    Attributes:
        uids: of the rows.
        last_shape: of the last pass.

    Args:
        model: materialised.
        rows: by uid.
        draw: the way that the tokens of the answers are drawn.
        width_of: gives the size that a pass is padded to; None: the device makes no shape dear.
    """

    uids: list[int]
    tokens: list[list[int]]
    prompt_cache: list[Any]

    def __init__(
        self, model: Any, rows: Mapping[int, NewRow], draw: Draw, *, width_of: WidthOf | None
    ) -> None:
        super().__init__(
            model,
            list(rows),
            [make_prompt_cache(model) if row.cache is None else row.cache for row in rows.values()],
            tokens=[list(row.known) for row in rows.values()],
            samplers=[row.draws for row in rows.values()],
            fallback_sampler=draw,
            logits_processors=[() for _ in rows],
            stop_sequences=[row.stops for row in rows.values()],
            max_tokens=[row.max_tokens for row in rows.values()],
        )
        self._logprobs = {uid: row.prompt for uid, row in rows.items() if row.prompt is not None}
        self.last_shape = pass_shape(0, 0, 0, is_even=False)
        self._sent: list[Any] = []  # what the pass under way computes
        can_pad = all(type(one) in (BatchKVCache, RopePositions) for one in self.prompt_cache)
        self._width_of = width_of if can_pad else None
        held = [len(row.known) for row in rows.values()]
        self.prompt_cache = with_cheap_masks(self.prompt_cache, held, pads=self.is_padded)

    def prompt(self, tokens: list[list[int]]) -> None:
        """Send the pass over the next tokens of each row, which is over after `wait`; in shorter
        passes, if logits are needed of any.

        Args:
            tokens: at least one of one row.
        """
        lengths = [len(chunk) for chunk in tokens]
        longest = max(lengths)
        width = longest
        if self._width_of is not None:
            width = self._width_of(len(lengths), longest, self._held, self._is_even)
        padding = [longest - length for length in lengths]
        if any(padding):
            for layer in self.prompt_cache:
                layer.prepare(lengths=lengths, right_padding=padding)
        for held, chunk in zip(self.tokens, tokens, strict=True):
            held += chunk
        ids = mx.array([chunk + [0] * (width - len(chunk)) for chunk in tokens])
        self._read(ids, lengths)
        if width > longest:
            for layer in self.prompt_cache:
                layer.trim(width - longest)
        if any(padding):
            for layer in self.prompt_cache:
                layer.finalize()
            self._send()

    def _send(self) -> None:
        self._sent = [layer.state for layer in self.prompt_cache]
        mx.async_eval(self._sent)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the pass that was sent, if one was, and free what it has left for reuse, unless
        passes of this shape will come again."""
        if not self._sent:
            return
        mx.eval(self._sent)
        self._sent = []
        if not self.is_padded:
            clear_cache()

    def _read(self, ids: mx.array, lengths: Sequence[int]) -> None:
        wanted = {
            nth: self._logprobs[uid] for nth, uid in enumerate(self.uids) if uid in self._logprobs
        }
        most = pass_tokens(self.model, rows=len(lengths)) if wanted else LARGEST_CHUNK
        done = 0
        while done < ids.shape[1]:
            # mlx-lm takes one token for a decoding row, and a window refuses that in padded rows.
            is_all_but_one = ids.shape[1] - done == most + 1
            chunk = ids[:, done : done + most + is_all_but_one]
            rows, width = chunk.shape
            self.last_shape = pass_shape(rows, width, self._held, is_even=self._is_even)
            logits = self.model(chunk, cache=self.prompt_cache, **adapters_of(self.samplers))
            for nth, prompt in wanted.items():
                if done < lengths[nth]:
                    prompt.read(logits[nth, : lengths[nth] - done])  # the rest is padding
            self._send()
            done += width

    @property
    def is_padded(self) -> bool:
        """True if its passes are padded to few shapes."""
        return self._width_of is not None

    @property
    def _is_even(self) -> bool:
        """Return whether no row of its padded caches is padded on the left."""
        return self.is_padded and self.prompt_cache[0].is_even

    @property
    def _held(self) -> int:
        """Return the number of keys that its padded caches have for each row."""
        return self.prompt_cache[0].size() if self.is_padded else 0

    def begin(self, last_tokens: Mapping[int, int]) -> DrawingBatch:
        """Let its rows decode, all of whose prompts but the last token was read.

        Args:
            last_tokens: that token of each, by uid.
        """
        return DrawingBatch(
            model=self.model,
            uids=self.uids,
            inputs=mx.array([last_tokens[uid] for uid in self.uids]),
            prompt_cache=self.prompt_cache,
            tokens=self.tokens,
            samplers=self.samplers,
            fallback_sampler=self.fallback_sampler,
            logits_processors=self.logits_processors,
            stop_sequences=self.stop_sequences,
            max_tokens=self.max_tokens,
        )

    def take_out(self, uids: Sequence[int]) -> None:
        """Remove rows, if they are here."""
        keep = [nth for nth, uid in enumerate(self.uids) if uid not in uids]
        if len(keep) < len(self.uids):
            self.filter(keep)

    def leave(self, uids: Collection[int]) -> PromptBatch:
        """Take rows out, into their own batch."""
        indices = [nth for nth, uid in enumerate(self.uids) if uid in uids]
        if len(indices) < len(self.uids):
            some: PromptBatch = self.split(indices)
            return some
        caches: list[Any] = self.prompt_cache
        self.prompt_cache = []
        leaving: PromptBatch = self._copy()
        leaving.prompt_cache = caches
        for layer in caches:
            if not _is_whole(layer):
                layer.filter(indices)
        self.filter([])
        return leaving


def _is_whole(layer: Any) -> bool:
    """True if taking all rows of a layer's cache leaves it as it is: no padding can go."""
    return isinstance(layer, BatchKeys) and min(layer.padding) == 0
