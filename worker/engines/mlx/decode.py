"""Decodes rows whose prompts were read one by one: together, or each in its own batch.

Everything here belongs to the thread that made the stream, and runs within it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from .drawing_batch import DrawingBatch
from .draws import Draw, draw_by_share
from .new_row import KeptCaches, NewRow

CLEAR_EVERY = 512
"""How many steps until memory for reuse is freed, as mlx-lm does: caches grow in new buffers."""


class Decode(Protocol):
    """Rows that decode."""

    def insert(self, uid: int, row: NewRow, cache: list[Any], held: list[int]) -> None:
        """Adds a row; the next `next` begins with its last token, the one after gives its first.

        Args:
            uid: the row's uid.
            row: the row, whose last token is not read yet.
            cache: taken over.
            held: the tokens in the cache.
        """

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """Takes rows out in one change; gives the caches of some of them."""

    def copy(self, uid: int) -> tuple[list[Any], list[int]]:
        """Return a copy of a row's cache, and the tokens that it holds."""

    def ahead(self, uids: Collection[int]) -> list[Any]:
        """What `next` will return for those of these rows that have begun, without their step."""

    def next(self) -> list[Any]:
        """One token for each row that has begun."""

    def close(self) -> None:
        """Frees the rows."""


class BatchDecode:
    """All rows in one batch.

    Attributes:
        rows: those that have begun.
        new: those that begin with the next step, by uid.

    Args:
        model: materialised.
        draw: the way that tokens are drawn.
    """

    def __init__(self, model: Any, draw: Draw = draw_by_share) -> None:
        self._model = model
        self._draw = draw
        self._steps = 0
        self.rows: Any = DrawingBatch.empty(model, draw)
        self.new: dict[int, tuple[NewRow, list[Any], list[int]]] = {}

    def insert(self, uid: int, row: NewRow, cache: list[Any], held: list[int]) -> None:
        """See `Decode.insert`."""
        self.new[uid] = (row, cache, held)

    def join(self, rows: DrawingBatch) -> None:
        """Add rows that have begun."""
        self.rows.extend(rows)

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """See `Decode.remove`."""
        removed: KeptCaches = {}
        places = {uid: place for place, uid in enumerate(self.rows.uids) if uid in uids}
        for uid in uids:
            if uid in self.new:
                _, cache, held = self.new.pop(uid)
                removed[uid] = (cache, held)
            elif uid in kept and uid in places:
                place = places[uid]
                removed[uid] = (self.rows.extract_cache(place), self.rows.tokens[place])
        if places:
            # One change for all of them: each costs a copy for every layer.
            self.rows.filter([n for n in range(len(self.rows)) if n not in places.values()])
        return {uid: held for uid, held in removed.items() if uid in kept}

    def copy(self, uid: int) -> tuple[list[Any], list[int]]:
        """See `Decode.copy`."""
        if uid in self.new:
            _, cache, held = self.new[uid]
            return copy.deepcopy(cache), list(held)
        place = self.rows.uids.index(uid)
        return self.rows.extract_cache(place), list(self.rows.tokens[place])

    def ahead(self, uids: Collection[int]) -> list[Any]:
        """See `Decode.ahead`."""
        return computed_ahead(self.rows, uids)

    def next(self) -> list[Any]:
        """See `Decode.next`."""
        responses = self.rows.next()
        if self.new:
            self.join(self._begin())
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        return list(responses)

    def _begin(self) -> DrawingBatch:
        rows, caches, held = zip(*self.new.values(), strict=True)
        uids = list(self.new)
        self.new.clear()
        return DrawingBatch(
            model=self._model,
            uids=uids,
            inputs=mx.array([row.tokens[-1] for row in rows]),
            prompt_cache=[layers[0].merge(layers) for layers in zip(*caches, strict=True)],
            tokens=list(held),
            samplers=[row.draws for row in rows],
            fallback_sampler=self._draw,
            logits_processors=[() for _ in rows],
            stop_sequences=[row.stops for row in rows],
            max_tokens=[row.max_tokens for row in rows],
        )

    def close(self) -> None:
        """See `Decode.close`."""
        self.rows.filter([])
        self.new.clear()


class LoneRow(DrawingBatch):
    """A batch of one row, over its plain cache, as mlx-lm generates one answer."""

    def extract_cache(self, idx: int) -> list[Any]:
        """The row's cache; it belongs to this row alone, so nothing needs to be taken apart."""
        return list(self.prompt_cache)


class LoneDecode:
    """Gives each row its own batch; a step gives each of them a token.

    Args:
        model: materialised.
        draw: the way that tokens are drawn.
    """

    def __init__(self, model: Any, draw: Draw = draw_by_share) -> None:
        self._model = model
        self._draw = draw
        self._steps = 0
        self.new: dict[int, tuple[NewRow, list[Any], list[int]]] = {}
        self.rows: dict[int, LoneRow] = {}

    def insert(self, uid: int, row: NewRow, cache: list[Any], held: list[int]) -> None:
        """See `Decode.insert`."""
        self.new[uid] = (row, cache, held)

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> KeptCaches:
        """See `Decode.remove`."""
        removed: KeptCaches = {}
        for uid in uids:
            if uid in self.rows:
                lone = self.rows.pop(uid)
                removed[uid] = (lone.extract_cache(0), lone.tokens[0])
            elif uid in self.new:
                _, cache, held = self.new.pop(uid)
                removed[uid] = (cache, held)
        return {uid: held for uid, held in removed.items() if uid in kept}

    def copy(self, uid: int) -> tuple[list[Any], list[int]]:
        """See `Decode.copy`."""
        if uid in self.new:
            _, cache, held = self.new[uid]
        else:
            cache, held = self.rows[uid].extract_cache(0), self.rows[uid].tokens[0]
        return copy.deepcopy(cache), list(held)

    def ahead(self, uids: Collection[int]) -> list[Any]:
        """See `Decode.ahead`."""
        begun = [uid for uid in uids if uid in self.rows]
        return [response for uid in begun for response in computed_ahead(self.rows[uid], [uid])]

    def next(self) -> list[Any]:
        """See `Decode.next`."""
        responses = [response for lone in self.rows.values() for response in lone.next()]
        for response in responses:
            if response.finish_reason is not None:
                del self.rows[response.uid]
        for uid, (row, cache, held) in self.new.items():
            self.rows[uid] = self._begin(uid, row, cache, held)
        self.new.clear()
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        return responses

    def _begin(self, uid: int, row: NewRow, cache: list[Any], held: list[int]) -> LoneRow:
        return LoneRow(
            model=self._model,
            uids=[uid],
            inputs=mx.array(row.tokens[-1:]),
            prompt_cache=cache,
            tokens=[held],
            samplers=[row.draws],
            fallback_sampler=self._draw,
            logits_processors=[()],
            stop_sequences=[row.stops],
            max_tokens=[row.max_tokens],
        )

    def close(self) -> None:
        """See `Decode.close`."""
        self.rows.clear()
        self.new.clear()


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
