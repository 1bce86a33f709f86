"""Three ways of running rows through a model; see `protocol.states.Batching`.

mlx-lm's `BatchGenerator` reads prompts of different lengths in one pass by padding them. Some model
types ignore the padding, and some cannot compute two rows at all. `TogetherPasses` is the generator
as it is. `SerialPasses` reads each prompt alone over a plain cache, so that nothing is padded, and
hands the row over to the rows that decode: in one batch, or each in its own batch.

Everything here belongs to the thread that made the stream.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxsup.protocol.states import Batching

from .checkpoints import split_at
from .decode import BatchDecode, Decode, LoneDecode, computed_ahead, take_out
from .drawing_batch import make_generator
from .draws import Draw, draw_by_share
from .logprobs import PromptLogprobs, pass_tokens
from .new_row import KeptCaches, NewRow
from .prompt_turns import PromptRead


class Passes(Protocol):
    """A way of running rows; after an exception in `step` it can only be closed."""

    def insert(self, row: NewRow) -> int:
        """Adds a row, and gives its uid."""

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """Takes rows out at any stage, in one change; returns the caches of some of them."""

    def ahead(self, uids: Collection[int]) -> list[Any]:
        """What the next step will return for those of these rows that decode, without that step;
        they have to leave afterwards, and their caches hold all but this token."""

    def step(self, sizes: Mapping[int, int]) -> tuple[list[PromptRead], list[Any]]:
        """One token for each row that decodes; reads that many tokens of these prompts, by uid.

        Returns:
            What was read, and mlx-lm's responses (uid, token, logprobs, finish_reason; for a row
            that has ended also prompt_cache and all_tokens).
        """

    def take_checkpoints(self) -> list[tuple[list[Any], list[int]]]:
        """The caches of rows that have come to a checkpoint in the last step, and their tokens."""

    def close(self) -> None:
        """Frees the rows; the process's limits are restored afterwards (E2, E3)."""


def make_passes(
    way: Batching,
    model: Any,
    *,
    stream: mx.Stream,
    max_concurrency: int,
    draw: Draw = draw_by_share,
) -> TogetherPasses | SerialPasses:
    """The passes of one way, drawing that way; the constructor of a generator sets the process's
    wired limit."""
    if way is Batching.TOGETHER:
        return TogetherPasses(model, stream=stream, max_concurrency=max_concurrency, draw=draw)
    decode: Decode = (
        LoneDecode(model, draw)
        if way is Batching.ONE_ROW
        else BatchDecode(model, stream=stream, max_concurrency=max_concurrency, draw=draw)
    )
    return SerialPasses(model, stream=stream, decode=decode)


class TogetherPasses:
    """mlx-lm's generator reads the prompts and decodes.

    Args:
        model: materialised.
        stream: made on this thread.
        max_concurrency: rows at most.
        draw: the way that tokens are drawn.
    """

    def __init__(
        self, model: Any, *, stream: mx.Stream, max_concurrency: int, draw: Draw = draw_by_share
    ) -> None:
        self._stream = stream
        self._checkpoints: dict[int, tuple[int, ...]] = {}
        self._reached: list[int] = []  # in the last step, by uid
        # The constructor wires as much memory as the machine recommends, each worker for itself;
        # several workers together would wire more than there is. `MemoryLimits` sets it back.
        with mx.stream(stream):
            self.generator = make_generator(
                model, stream=stream, max_concurrency=max_concurrency, draw=draw
            )
        self._prompts: dict[int, PromptLogprobs] = self.generator._prompt_batch.logprobs

    def insert(self, row: NewRow) -> int:
        """See `Passes.insert`."""
        with mx.stream(self._stream):
            uid: int = self.generator.insert_segments(
                [split_at(row.known + row.tokens, len(row.known), row.checkpoints)],
                max_tokens=[row.max_tokens],
                caches=[row.cache],
                all_tokens=[row.known],
                samplers=[row.draws],
                stop_sequences=[row.stops],
            )[0]
        if row.prompt is not None:
            self._prompts[uid] = row.prompt
        if row.checkpoints:
            self._checkpoints[uid] = tuple(place - len(row.known) for place in row.checkpoints)
        return uid

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """See `Passes.remove`."""
        with mx.stream(self._stream):
            for uid in uids:
                self._checkpoints.pop(uid, None)
                self._prompts.pop(uid, None)
            return take_out(self.generator, uids, kept=kept)

    def ahead(self, uids: Collection[int]) -> list[Any]:
        """See `Passes.ahead`."""
        return computed_ahead(self.generator._generation_batch, uids)

    def step(self, sizes: Mapping[int, int]) -> tuple[list[PromptRead], list[Any]]:
        """See `Passes.step`; mlx-lm reads the same number of every prompt: the most asked."""
        if sizes:
            self.generator.prefill_step_size = max(sizes.values())
        prompts, tokens = self.generator.next()
        reads = [
            PromptRead(uid=read.uid, done=read.progress[0], is_over=read.end_of_prompt)
            for read in prompts
        ]
        # A step that reads nothing of a prompt leaves it as it was, and no segment ends.
        self._reached = [
            read.uid
            for read in prompts
            if read.end_of_segment and read.progress[0] in self._checkpoints.get(read.uid, ())
        ]
        for read in reads:
            if read.is_over:
                self._checkpoints.pop(read.uid, None)
                self._prompts.pop(read.uid, None)
        return reads, tokens

    def take_checkpoints(self) -> list[tuple[list[Any], list[int]]]:
        """See `Passes.take_checkpoints`."""
        reached, self._reached = self._reached, []
        if not reached:
            return []
        with mx.stream(self._stream):
            return list(self.generator.extract_cache(reached).values())

    def close(self) -> None:
        """See `Passes.close`."""
        self.generator.close()


class SerialPasses:
    """Reads prompts, one per pass; `decode` gets the rows afterwards.

    Args:
        model: materialised.
        stream: made on this thread.
        decode: decodes the rows whose prompt was read.
    """

    def __init__(self, model: Any, *, stream: mx.Stream, decode: Decode) -> None:
        self._model = model
        self._stream = stream
        self._next_uid = 0
        self._reached: list[tuple[list[Any], list[int]]] = []  # in the last step
        self.waiting: dict[int, WaitingPrompt] = {}
        self.decode = decode

    def insert(self, row: NewRow) -> int:
        """See `Passes.insert`."""
        uid = self._next_uid
        self._next_uid += 1
        with mx.stream(self._stream):
            cache = make_prompt_cache(self._model) if row.cache is None else row.cache
            self.waiting[uid] = WaitingPrompt(row, cache)
        return uid

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """See `Passes.remove`."""
        waiting = {uid: self.waiting.pop(uid) for uid in uids if uid in self.waiting}
        with mx.stream(self._stream):
            removed = self.decode.remove([uid for uid in uids if uid not in waiting], kept=kept)
            return removed | {
                uid: (prompt.cache, prompt.held) for uid, prompt in waiting.items() if uid in kept
            }

    def ahead(self, uids: Collection[int]) -> list[Any]:
        """See `Passes.ahead`."""
        return self.decode.ahead(uids)

    def step(self, sizes: Mapping[int, int]) -> tuple[list[PromptRead], list[Any]]:
        """See `Passes.step`; a prompt whose end was read joins those that decode."""
        with mx.stream(self._stream):
            reads = [self._read(uid, size) for uid, size in sizes.items()]
            return reads, self.decode.next()

    def _read(self, uid: int, size: int) -> PromptRead:
        prompt = self.waiting[uid]
        started = time.perf_counter()
        prompt.read(self._model, size)
        took_s = time.perf_counter() - started
        is_over = prompt.is_read
        if prompt.is_at_checkpoint:
            self._reached.append((copy.deepcopy(prompt.cache), prompt.held))
        if is_over:
            del self.waiting[uid]
            self.decode.insert(uid, prompt.row, prompt.cache, prompt.held)
        done = len(prompt.row.tokens) if is_over else prompt.done
        return PromptRead(uid=uid, done=done, is_over=is_over, took_s=took_s)

    def take_checkpoints(self) -> list[tuple[list[Any], list[int]]]:
        """See `Passes.take_checkpoints`."""
        reached, self._reached = self._reached, []
        return reached

    def close(self) -> None:
        """See `Passes.close`."""
        self.waiting.clear()
        self.decode.close()


class WaitingPrompt:
    """A prompt on its way into a plain cache.

    Attributes:
        row: the prompt's row.
        cache: holds what was known and what was read, until it is handed over.
        done: how many tokens were read.

    Args:
        row: of the prompt.
        cache: holds what is known of the prompt.
    """

    def __init__(self, row: NewRow, cache: list[Any]) -> None:
        self.row = row
        self.cache = cache
        self.done = 0
        # Where a pass must end, in tokens that were read; the last one is not read here.
        self._ends = [place - len(row.known) for place in row.checkpoints]
        self._last = len(row.tokens) - 1

    @property
    def is_at_checkpoint(self) -> bool:
        """Whether the cache is worth a copy now."""
        return self.done in self._ends

    @property
    def is_read(self) -> bool:
        """Whether only the last token is left, which decode begins with."""
        return self.done >= self._last

    @property
    def held(self) -> list[int]:
        """The tokens in the cache."""
        return self.row.known + self.row.tokens[: self.done]

    def read(self, model: Any, size: int) -> None:
        """One pass over that many tokens, never over the last one; computed when it returns."""
        end = min(end for end in (*self._ends, self._last) if end > self.done or end == self._last)
        chunk = self.row.tokens[self.done : min(self.done + size, end)]
        if not chunk:
            return
        if self.row.prompt is None:
            model(mx.array([chunk]), cache=self.cache)
        else:
            most = pass_tokens(model, rows=1)
            for begin in range(0, len(chunk), most):
                tokens = mx.array([chunk[begin : begin + most]])
                self.row.prompt.read(model(tokens, cache=self.cache)[0])
        mx.eval([layer.state for layer in self.cache])
        mx.clear_cache()
        self.done += len(chunk)
