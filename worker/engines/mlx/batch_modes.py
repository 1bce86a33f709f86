"""Three ways of running rows through a model; see `protocol.states.Batching`.

Prompts of different lengths share a pass by padding, which some model types ignore; some cannot
compute two rows at all. `TogetherMode` reads prompts in batches, except those with pictures.
`SerialMode` reads each prompt alone over a plain cache, so that nothing is padded, and hands the
row over to the rows that decode: in one batch, or each in its own batch.

mlx-lm's `BatchGenerator` reads all waiting prompts in the same passes, and its constructor wires as
much memory as the machine recommends; only its two batches are used here.

Everything here belongs to the thread that made the stream.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import make_prompt_cache

from mlxsup.protocol.states import Batching

from .adapters import adapters_of
from .batch_keys import with_cheap_masks
from .checkpoints import LEAST_GAIN
from .drafts import DraftingBatch, Drafts, LoneDraftingRow
from .limits import clear_cache
from .logprobs import pass_tokens
from .prefill import PromptRead
from .prompt_batch import KeptCaches, NewRow, PromptBatch, WidthOf
from .sampler import Draw, DrawingBatch, draw_by_share
from .shapes import PassShape


class BatchMode(ABC):
    """A way of running rows; after an exception in `step` it can only be closed.

    Attributes:
        width_of: gives the size that a pass over several prompts is padded to, if the device makes
            a new shape dear.
        clock: seconds, to time passes with.
        waiting: prompts of the rows that do not decode yet, by uid.
        decode: decodes the others.

    Args:
        model: materialised.
        stream: made on this thread.
        decode: without rows.
    """

    def __init__(self, model: Any, *, stream: mx.Stream, decode: Decode) -> None:
        self.width_of: WidthOf | None = None
        self.clock: Callable[[], float] = time.perf_counter
        self.waiting: dict[int, PromptPlace] = {}
        self.decode = decode
        self._model = model
        self._stream = stream
        self._next_uid = 0
        self._reached: KeptCaches = {}  # in the last step
        self._shapes: list[PassShape] = []

    def insert(self, row: NewRow) -> int:
        """Adds a row, and gives its uid."""
        uid = self._next_uid
        self._next_uid += 1
        with mx.stream(self._stream):
            self.waiting[uid] = self._begin(row)
        return uid

    @abstractmethod
    def _begin(self, row: NewRow) -> PromptPlace:
        """Return the place of a prompt of which nothing was read."""

    @abstractmethod
    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """Takes rows out at any stage, in one change; returns the caches of some of them."""

    @abstractmethod
    def copy(self, uid: int) -> tuple[list[Any], list[int]]:
        """Return a copy of a row's cache, and the tokens that it holds."""

    def stop_at(self, uid: int, count: int) -> int:
        """Let a pass over a prompt end after that many tokens, or a few less if one ends there in
        any case; return after how many. A copy of the row's cache is taken there."""
        return self.waiting[uid].stop_at(count)

    def restart(self, uid: int, count: int, cache: list[Any]) -> None:
        """Let a prompt begin after so many tokens, which `cache` holds, with those that begin next;
        what was read of it is forgotten."""
        with mx.stream(self._stream):
            self.waiting[uid] = self._begin(self.waiting[uid].row.after(count, cache))

    def ahead(self, uids: Collection[int]) -> list[Any]:
        """What the next step will return for those of these rows that decode, without that step;
        they have to leave afterwards, and their caches hold all but this token."""
        return self.decode.ahead(uids)

    @abstractmethod
    def step(self, sizes: Mapping[int, int]) -> tuple[list[PromptRead], list[Any]]:
        """One token for each row that decodes; reads that many tokens of these prompts, by uid.

        Returns:
            What was read, and mlx-lm's responses (uid, token, logprobs, finish_reason; for a row
            that has ended also prompt_cache and all_tokens).
        """

    def take_checkpoints(self) -> KeptCaches:
        """The caches of rows that have come to a checkpoint in the last step, and their tokens."""
        reached, self._reached = self._reached, {}
        return reached

    def take_shapes(self) -> list[PassShape]:
        """The shapes of the last step's passes over prompts, if they are padded."""
        shapes, self._shapes = self._shapes, []
        return shapes

    def close(self) -> None:
        """Frees the rows; the process's limits are restored afterwards (E2, E3)."""
        self.waiting.clear()
        self.decode.close()


def make_mode(
    way: Batching,
    model: Any,
    *,
    stream: mx.Stream,
    draw: Draw = draw_by_share,
    drafts: Drafts | None = None,
) -> TogetherMode | SerialMode:
    """Return the passes of one way, drawing that way; with `drafts`, rows guess."""
    if way is Batching.ONE_ROW:
        return SerialMode(model, stream=stream, decode=LoneDecode(model, draw, drafts))
    with mx.stream(stream):
        decode = BatchDecode(model, draw, drafts)
    if way is Batching.TOGETHER:
        return TogetherMode(model, stream=stream, decode=decode, draw=draw)
    return SerialMode(model, stream=stream, decode=decode)


class TogetherMode(BatchMode):
    """Reads prompts in batches, each as long as it takes, and decodes all rows in one.

    Attributes:
        batches: those of the waiting rows that were read with others.

    Args:
        model, stream, decode: see `BatchMode`.
        draw: the way that tokens are drawn.
    """

    decode: BatchDecode

    def __init__(self, model: Any, *, stream: mx.Stream, decode: BatchDecode, draw: Draw) -> None:
        super().__init__(model, stream=stream, decode=decode)
        self._draw = draw
        self.batches: list[PromptBatch] = []

    def _begin(self, row: NewRow) -> PromptPlace:
        kind = LonePrompt if row.pictures else PromptPlace
        return kind(row, self._model)

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """See `BatchMode.remove`."""
        removed: KeptCaches = {}
        with mx.stream(self._stream):
            for batch in self.batches:
                for nth, uid in enumerate(batch.uids):
                    if uid in uids and uid in kept:
                        removed[uid] = (batch.extract_cache(nth), batch.tokens[nth])
                    if uid in uids:
                        del self.waiting[uid]
                batch.take_out(uids)
            self._forget_empty()
            for uid in uids:
                place = self.waiting.pop(uid, None)
                if place is not None and uid in kept:
                    removed[uid] = (place.cache, place.held)
            return removed | self.decode.remove(uids, kept=kept)

    def copy(self, uid: int) -> tuple[list[Any], list[int]]:
        """See `BatchMode.copy`."""
        with mx.stream(self._stream):
            for batch in self.batches:
                if uid in batch.uids:
                    nth = batch.uids.index(uid)
                    return batch.extract_cache(nth), list(batch.tokens[nth])
            if uid in self.waiting:
                return self.waiting[uid].copy()
            return self.decode.copy(uid)

    def restart(self, uid: int, count: int, cache: list[Any]) -> None:
        """See `BatchMode.restart`."""
        with mx.stream(self._stream):
            for batch in self.batches:
                batch.take_out([uid])
            self._forget_empty()
            super().restart(uid, count, cache)

    def step(self, sizes: Mapping[int, int]) -> tuple[list[PromptRead], list[Any]]:
        """See `BatchMode.step`; prompts that begin in the same step share their passes from then,
        unless they have pictures.

        A prompt whose end was read in an earlier step joins those that decode.
        """
        with mx.stream(self._stream):
            if not self.waiting:  # as in most steps
                return [], self.decode.next()
            over = {uid: place for uid, place in self.waiting.items() if place.is_read}
            begin = [batch.leave(over) for batch in self.batches if over.keys() & set(batch.uids)]
            batched = {uid for batch in begin for uid in batch.uids}
            self.waiting = {uid: p for uid, p in self.waiting.items() if uid not in over}
            self._forget_empty()
            reads = [
                PromptRead(uid=uid, done=len(place.row.tokens), is_over=True)
                for uid, place in over.items()
            ]
            turn = {uid: sizes[uid] for uid in self.waiting if sizes.get(uid)}
            # While the device reads prompts, the host builds the pass of the rows that decode.
            waits = self.decode.will_wait()
            if not waits:
                reads += self._read(turn)
            for uid, place in over.items():
                if uid not in batched:  # read alone, or all of it but the last token was known
                    self.decode.insert(uid, place.row, place.cache, place.held)
            tokens = self.decode.next()
            for batch in begin:
                self.decode.join(batch.begin({uid: over[uid].row.tokens[-1] for uid in batch.uids}))
            if waits:
                reads += self._read(turn)
            for batch in self.batches:
                batch.wait()
            return reads, tokens

    def _read(self, sizes: Mapping[int, int]) -> list[PromptRead]:
        """Send passes over that many tokens of these prompts: one for each batch that has any of
        them; and read those that are read alone."""
        batched = {uid for batch in self.batches for uid in batch.uids}
        places = {uid: self.waiting[uid] for uid in sizes}
        alone = {uid: place for uid, place in places.items() if isinstance(place, LonePrompt)}
        new = {uid: place.row for uid, place in places.items() if uid not in batched | alone.keys()}
        if new:
            self.batches.append(PromptBatch(self._model, new, self._draw, width_of=self.width_of))
        reads = []
        for uid, prompt in alone.items():
            prompt.read(sizes[uid])
            if prompt.is_at_checkpoint:
                self._reached[uid] = prompt.copy()
            reads.append(PromptRead(uid=uid, done=prompt.done, is_over=False))
        for batch in self.batches:
            if not any(uid in sizes for uid in batch.uids):
                continue
            batch.prompt([self.waiting[uid].take(sizes.get(uid, 0)) for uid in batch.uids])
            if batch.is_padded:
                self._shapes.append(batch.last_shape)
            for nth, uid in enumerate(batch.uids):
                place = self.waiting[uid]
                if uid in sizes and place.is_at_checkpoint:
                    self._reached[uid] = (batch.extract_cache(nth), list(batch.tokens[nth]))
            reads += [
                PromptRead(uid=uid, done=self.waiting[uid].done, is_over=False)
                for uid in batch.uids
                if uid in sizes
            ]
        return reads

    def _forget_empty(self) -> None:
        self.batches = [batch for batch in self.batches if batch.uids]

    def close(self) -> None:
        """See `BatchMode.close`."""
        self.batches.clear()
        super().close()


class SerialMode(BatchMode):
    """Reads prompts, one per pass; `decode` gets the rows afterwards."""

    waiting: dict[int, LonePrompt]  # type: ignore[assignment]

    def _begin(self, row: NewRow) -> LonePrompt:
        return LonePrompt(row, self._model)

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """See `BatchMode.remove`."""
        waiting = {uid: self.waiting.pop(uid) for uid in uids if uid in self.waiting}
        with mx.stream(self._stream):
            removed = self.decode.remove([uid for uid in uids if uid not in waiting], kept=kept)
            return removed | {
                uid: (prompt.cache, prompt.held) for uid, prompt in waiting.items() if uid in kept
            }

    def copy(self, uid: int) -> tuple[list[Any], list[int]]:
        """See `BatchMode.copy`."""
        with mx.stream(self._stream):
            if uid in self.waiting:
                return self.waiting[uid].copy()
            return self.decode.copy(uid)

    def step(self, sizes: Mapping[int, int]) -> tuple[list[PromptRead], list[Any]]:
        """See `BatchMode.step`; a prompt whose end was read joins those that decode."""
        with mx.stream(self._stream):
            reads = [self._read(uid, size) for uid, size in sizes.items()]
            return reads, self.decode.next()

    def _read(self, uid: int, size: int) -> PromptRead:
        prompt = self.waiting[uid]
        started = self.clock()
        prompt.read(size)
        took_s = self.clock() - started
        is_over = prompt.is_read
        if prompt.is_at_checkpoint:
            self._reached[uid] = prompt.copy()
        if is_over:
            del self.waiting[uid]
            self.decode.insert(uid, prompt.row, prompt.cache, prompt.held)
        done = len(prompt.row.tokens) if is_over else prompt.done
        return PromptRead(uid=uid, done=done, is_over=is_over, took_s=took_s)


class PromptPlace:
    """How far a prompt was read.

    Attributes:
        row: the prompt's row.
        done: how many of its tokens were read.
        cache: holds what was known before.

    Args:
        row: of the prompt.
        model: reads it.
    """

    def __init__(self, row: NewRow, model: Any) -> None:
        self.row = row
        self.done = 0
        self.cache: list[Any] = make_prompt_cache(model) if row.cache is None else row.cache
        if getattr(model, "has_rope_positions", False):
            self.cache[-1].deltas = [0]  # its beginning may be kept from a prompt with pictures
        self._last = len(row.tokens) - 1  # that one is not read here

    @property
    def is_at_checkpoint(self) -> bool:
        """True if the cache is worth a copy now."""
        return len(self.row.known) + self.done in self.row.checkpoints

    @property
    def is_read(self) -> bool:
        """True if only the last token is left, which decode begins with."""
        return self.done >= self._last

    @property
    def held(self) -> list[int]:
        """The tokens that are read or known."""
        return self.row.known + self.row.tokens[: self.done]

    def copy(self) -> tuple[list[Any], list[int]]:
        """Return a copy of the cache, and the tokens that it holds."""
        return copy.deepcopy(self.cache), self.held

    def stop_at(self, count: int) -> int:
        """See `BatchMode.stop_at`."""
        held = len(self.row.known) + self.done
        least = max(count - LEAST_GAIN, held)
        near = [place for place in self.row.checkpoints if least < place <= count]
        if near:
            return max(near)
        self.row = replace(self.row, checkpoints=(*self.row.checkpoints, count))
        return count

    def take(self, size: int) -> list[int]:
        """Return the tokens of the next pass, at most that many, which is as good as over."""
        known = len(self.row.known)
        places = (place - known for place in self.row.checkpoints if place - known > self.done)
        end = min((*places, self._last))
        chunk = self.row.tokens[self.done : min(self.done + size, end)]
        self.done += len(chunk)
        return chunk


class LonePrompt(PromptPlace):
    """A prompt on its way into a plain cache of its own.

    Attributes:
        cache: holds what was known and what was read, until it is handed over.
    """

    def __init__(self, row: NewRow, model: Any) -> None:
        super().__init__(row, model)
        self._model = model
        self._pictures: Any = None
        if row.pictures:
            self._pictures = model.prompt(row.known + row.tokens, row.pictures)
            self._pictures.seat(self.cache)

    def read(self, size: int) -> None:
        """One pass over that many tokens, never over the last one, or one in which the tower sees a
        picture among them; computed when it returns."""
        begin = len(self.row.known) + self.done
        if self._pictures is not None and self._pictures.look(begin, begin + size):
            return
        chunk = self.take(size)
        if not chunk:
            return
        adapters = adapters_of([self.row.draws])
        if self._pictures is not None:
            self._pictures.read(begin, begin + len(chunk), self.cache)
        elif self.row.prompt is None:
            self._model(mx.array([chunk]), cache=self.cache, **adapters)
        else:
            most = pass_tokens(self._model, rows=1)
            for begin in range(0, len(chunk), most):
                tokens = mx.array([chunk[begin : begin + most]])
                self.row.prompt.read(self._model(tokens, cache=self.cache, **adapters)[0])
        mx.eval([layer.state for layer in self.cache])
        clear_cache()


CLEAR_EVERY = 512
"""How many steps until memory for reuse is freed, as mlx-lm does: caches grow in new buffers."""


Begun = tuple[NewRow, list[Any], list[int]]
"""A row whose last token is not read yet, its cache, and the tokens in that."""


class Decode(ABC):
    """Rows that decode.

    Attributes:
        new: those that begin with the next step, by uid.

    Args:
        model: materialised.
        draw: the way that tokens are drawn.
        drafts: lets the rows guess.
    """

    def __init__(
        self, model: Any, draw: Draw = draw_by_share, drafts: Drafts | None = None
    ) -> None:
        self.new: dict[int, Begun] = {}
        self._model = model
        self._draw = draw
        self._drafts = drafts
        self._steps = 0

    def insert(self, uid: int, row: NewRow, cache: list[Any], held: list[int]) -> None:
        """Adds a row; the next `next` begins with its last token, the one after gives its first.

        Args:
            uid: the row's uid.
            row: the row, whose last token is not read yet.
            cache: taken over.
            held: the tokens in the cache.
        """
        self.new[uid] = (row, cache, held)

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """Takes rows out in one change; gives the caches of some of them."""
        new = {uid: self.new.pop(uid) for uid in uids if uid in self.new}
        held = {uid: (cache, tokens) for uid, (_, cache, tokens) in new.items() if uid in kept}
        return held | self._remove(uids, kept)

    def copy(self, uid: int) -> tuple[list[Any], list[int]]:
        """Return a copy of a row's cache, and the tokens that it holds."""
        if uid in self.new:
            _, cache, held = self.new[uid]
            return copy.deepcopy(cache), list(held)
        return self._copy(uid)

    def next(self) -> list[Any]:
        """One token for each row that has begun."""
        responses = self._step()
        if self.new:
            begun, self.new = self.new, {}
            self._begin(begun)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            clear_cache()
        return responses

    def _batch(
        self, kind: type[DrawingBatch], begun: Mapping[int, Begun], caches: list[Any]
    ) -> DrawingBatch:
        """Make a batch of rows that begin."""
        rows = [row for row, _, _ in begun.values()]
        return kind(
            model=self._model,
            uids=list(begun),
            inputs=mx.array([row.tokens[-1] for row in rows]),
            prompt_cache=caches,
            tokens=[held for _, _, held in begun.values()],
            samplers=[row.draws for row in rows],
            fallback_sampler=self._draw,
            logits_processors=[() for _ in rows],
            stop_sequences=[row.stops for row in rows],
            max_tokens=[row.max_tokens for row in rows],
        )

    def will_wait(self) -> bool:
        """True if `next`, which must follow, will wait for the pass that it sends."""
        return False

    @abstractmethod
    def ahead(self, uids: Collection[int]) -> list[Any]:
        """What `next` will return for those of these rows that have begun, without their step."""

    @abstractmethod
    def close(self) -> None:
        """Frees the rows."""

    @abstractmethod
    def _remove(self, uids: Sequence[int], kept: Collection[int]) -> KeptCaches: ...

    @abstractmethod
    def _copy(self, uid: int) -> tuple[list[Any], list[int]]: ...

    @abstractmethod
    def _step(self) -> list[Any]: ...

    @abstractmethod
    def _begin(self, begun: Mapping[int, Begun]) -> None: ...


class BatchDecode(Decode):
    """All rows in one batch.

    Attributes:
        rows: those that have begun.
    """

    def __init__(
        self, model: Any, draw: Draw = draw_by_share, drafts: Drafts | None = None
    ) -> None:
        super().__init__(model, draw, drafts)
        self.rows: Any = DrawingBatch.empty(model, draw)
        if drafts is not None:
            self.rows = DraftingBatch.empty(model, draw).start(drafts)

    def will_wait(self) -> bool:
        """True if rows have guesses, whose tokens the next step gives."""
        return isinstance(self.rows, DraftingBatch) and self.rows.will_guess()

    def join(self, rows: DrawingBatch) -> None:
        """Add rows that have begun."""
        self.rows.extend(rows)

    def ahead(self, uids: Collection[int]) -> list[Any]:
        """See `Decode.ahead`."""
        return computed_ahead(self.rows, uids)

    def close(self) -> None:
        """See `Decode.close`."""
        self.rows.filter([])
        self.new.clear()

    def _remove(self, uids: Sequence[int], kept: Collection[int]) -> KeptCaches:
        places = {uid: place for place, uid in enumerate(self.rows.uids) if uid in uids}
        removed = {
            uid: (self.rows.extract_cache(place), self.rows.tokens[place])
            for uid, place in places.items()
            if uid in kept
        }
        if places:
            # One change for all of them: each costs a copy for every layer.
            self.rows.filter([n for n in range(len(self.rows)) if n not in places.values()])
        return removed

    def _copy(self, uid: int) -> tuple[list[Any], list[int]]:
        place = self.rows.uids.index(uid)
        return self.rows.extract_cache(place), list(self.rows.tokens[place])

    def _step(self) -> list[Any]:
        return list(self.rows.next())

    def _begin(self, begun: Mapping[int, Begun]) -> None:
        caches = zip(*(cache for _, cache, _ in begun.values()), strict=True)
        merged = [layers[0].merge(layers) for layers in caches]
        held = [len(tokens) for _, _, tokens in begun.values()]
        self.join(self._batch(DrawingBatch, begun, with_cheap_masks(merged, held, pads=False)))


class LoneRow(DrawingBatch):
    """A batch of one row, over its plain cache, as mlx-lm generates one answer."""

    def extract_cache(self, idx: int) -> list[Any]:
        """The row's cache; it belongs to this row alone, so nothing needs to be taken apart."""
        return list(self.prompt_cache)


class LoneDecode(Decode):
    """Gives each row its own batch; a step gives each of them a token.

    Attributes:
        rows: the batch of each row that has begun, by uid.
    """

    def __init__(
        self, model: Any, draw: Draw = draw_by_share, drafts: Drafts | None = None
    ) -> None:
        super().__init__(model, draw, drafts)
        self.rows: dict[int, DrawingBatch] = {}

    def ahead(self, uids: Collection[int]) -> list[Any]:
        """See `Decode.ahead`."""
        begun = [uid for uid in uids if uid in self.rows]
        return [response for uid in begun for response in computed_ahead(self.rows[uid], [uid])]

    def close(self) -> None:
        """See `Decode.close`."""
        self.rows.clear()
        self.new.clear()

    def _remove(self, uids: Sequence[int], kept: Collection[int]) -> KeptCaches:
        lone = {uid: self.rows.pop(uid) for uid in uids if uid in self.rows}
        return {
            uid: (row.extract_cache(0), row.tokens[0]) for uid, row in lone.items() if uid in kept
        }

    def _copy(self, uid: int) -> tuple[list[Any], list[int]]:
        row = self.rows[uid]
        return copy.deepcopy(row.extract_cache(0)), list(row.tokens[0])

    def _step(self) -> list[Any]:
        responses = [response for lone in self.rows.values() for response in lone.next()]
        for response in responses:
            if response.finish_reason is not None:
                del self.rows[response.uid]
        return responses

    def _begin(self, begun: Mapping[int, Begun]) -> None:
        kind = LoneRow if self._drafts is None else LoneDraftingRow
        for uid, (row, cache, held) in begun.items():
            lone = self._batch(kind, {uid: (row, cache, held)}, cache)
            if self._drafts is not None and isinstance(lone, LoneDraftingRow):
                lone.start(self._drafts)
            self.rows[uid] = lone


def computed_ahead(batch: GenerationBatch, uids: Collection[int]) -> list[Any]:
    """The responses of `batch.next()` for these rows, which have to leave afterwards.

    mlx-lm draws a token a step before it returns it. The row's cache holds all tokens before that
    one, so it is exactly what an answer needs that continues after it.
    """
    if not any(uid in uids for uid in batch.uids):
        return []
    drawn: Any = batch._next_tokens.tolist()
    responses = []
    for index, uid in enumerate(batch.uids):
        if uid not in uids:
            continue
        finish = None
        if batch._num_tokens[index] + 1 >= batch.max_tokens[index]:
            finish = "length"
        if batch._matchers[index].advance(drawn[index]):
            finish = "stop"
        responses.append(
            batch.Response(
                uid=uid,
                token=drawn[index],
                logprobs=batch._next_logprobs[index],
                finish_reason=finish,
                prompt_cache=None,
                all_tokens=None,
            )
        )
    return responses
