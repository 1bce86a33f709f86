"""A draft model: a smaller model with the same tokenizer says what rows may draw next.

It never decides a token, see `drafts.py`. So what it has read of a row may be lost, or may begin in
the middle of its text: then it only guesses worse.

Everything here belongs to the thread that made the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ...engine import BadLaunchError, BadModelError, ModelMissingError
from .batch_keys import with_cheap_masks
from .caches import cut_back, layers_of
from .folder import ModelFolder, check_folder
from .loader import blaming_the_model, load_lazily
from .sampler import BatchSampler, Draw, RowDraws, normalise
from .tokenizer import load_tokenizer, tokenizer_error

CONTEXT = 512
"""Tokens before the next one that it reads of a row to begin with: what stands before them seldom
changes a guess."""

CHUNK = 128
"""Tokens that it reads in a step of rows that it begins with: the others wait for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A draft model.

    Attributes:
        folder: that it was loaded from.
        model: its arrays may be still to be read.
        width: how many ids it knows.
    """

    folder: ModelFolder
    model: Any
    width: int

    def read(self, ids: list[list[int]] | mx.array, cache: list[Any]) -> mx.array:
        """Read tokens (rows, tokens) into a cache; return logits (rows, tokens, ids).

        Instead of ids that it does not know, such as parts of pictures, it reads others.
        """
        tokens = mx.clip(mx.array(ids, mx.int32), 0, self.width - 1)
        logits: mx.array = self.model(tokens, cache=cache)
        return logits


def open_draft_model(path: Path, target: ModelFolder, vocabulary: Mapping[str, int]) -> DraftModel:
    """Return the draft model in a folder, whose arrays are still to be read.

    Args:
        path: the folder.
        target: the model whose tokens it should guess.
        vocabulary: of that, by text.

    Raises:
        ModelMissingError, BadModelError: the folder cannot be used; says that it is the draft's.
        BadLaunchError: it is no draft for this model.
    """
    try:
        folder = check_folder(path, lambda share: None)
        model, config = load_lazily(folder)
        if not _has_same_tokenizer(folder, target, vocabulary, config.get("eos_token_id")):
            raise BadLaunchError(
                f"drafts must name a model with the tokenizer of {target.path}, not {path}, whose "
                "tokens have other ids"
            )
        if any(type(layer) is not KVCache for layer in layers_of(make_prompt_cache(model))):
            raise BadLaunchError(
                "drafts must name a model whose layers all keep every token, not "
                f"{folder.config['model_type']} ({path})"
            )
        with blaming_the_model(str(path)):
            width = model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]
    except (BadModelError, ModelMissingError) as error:
        raise type(error)(f"draft model: {error}") from error
    return DraftModel(folder=folder, model=model, width=width)


def _has_same_tokenizer(
    folder: ModelFolder, target: ModelFolder, vocabulary: Mapping[str, int], eos_token_ids: Any
) -> bool:
    files = [place.path / "tokenizer.json" for place in (folder, target)]
    if all(file.exists() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return True  # to load one of 150,000 tokens takes half a second
    try:
        own: dict[str, int] = load_tokenizer(folder.path, eos_token_ids).get_vocab()
    except BadModelError:
        raise
    except Exception as error:  # what the files provoke in the tokenizer's library
        raise tokenizer_error(folder.path, error) from error
    return own == vocabulary


class DraftRow(NamedTuple):
    """A row that may guess: its tokens, the pending one behind them, and how they are drawn."""

    tokens: Sequence[int]
    pending: int
    draws: RowDraws

    def after(self, count: int) -> list[int]:
        """Return all of its tokens but so many."""
        return [*self.tokens[count:], self.pending]


class DraftRows:
    """What a draft model has read of the rows of one batch.

    Args:
        model: reads them.
        width: how many ids rows may draw.
        draw: the way that tokens are drawn.
        pads: whether passes are padded to few shapes.
    """

    def __init__(self, model: DraftModel, width: int, draw: Draw, *, pads: bool) -> None:
        self._model = model
        self._width = width
        self._draw = draw
        self._pads = pads
        self._cache: list[Any] = []
        self._read: dict[int, int] = {}  # by uid, in the order of `_cache`: where it has come to
        self._guessed: dict[int, list[int]] = {}  # what `_cache` holds behind that, if not cut off
        self._ahead = 0  # how many tokens that are of each row
        self._begun: dict[int, tuple[list[Any], int]] = {}  # by uid: its own cache, and where it is

    def keep(self, uids: Sequence[int]) -> None:
        """Forget all rows but these."""
        self._begun = {uid: begun for uid, begun in self._begun.items() if uid in uids}
        self._keep_in_batch(uids)

    def _keep_in_batch(self, uids: Sequence[int]) -> None:
        places = [place for place, uid in enumerate(self._read) if uid in uids]
        if len(places) == len(self._read):
            return
        self._read = {uid: end for uid, end in self._read.items() if uid in uids}
        for layer in self._cache if places else ():
            layer.filter(places)
        if not places:
            self._cache, self._ahead = [], 0

    def guess(self, rows: Mapping[int, DraftRow], most: int) -> dict[int, list[int]]:
        """Read what is new of rows, and say what each of them may draw next.

        Args:
            rows: by uid; others that were there before have no guess, or have left.
            most: how many guesses each of them gets.

        Returns:
            The guesses by uid, of those that were read to their end.
        """
        self._cut_off(rows)
        self._set_aside(rows)
        self._begin(rows)
        if not self._read:
            return {}
        unread = [rows[uid].after(end) for uid, end in self._read.items()]
        width = max(map(len, unread))
        if self._pads:
            width = max(width, most + 1)
        short = [width - len(tokens) for tokens in unread]
        ids = [[*tokens, *[0] * left] for tokens, left in zip(unread, short, strict=True)]
        held = [self._cache[0].size() - empty for empty in self._cache[0].padding]
        logits = self._model.read(ids, self._cache)
        longest = max(map(sum, zip(held, map(len, unread), strict=True)))
        cut_back(self._cache, short, longest)
        last = [width - 1 - left for left in short]
        guess = self._pick(logits[mx.arange(len(last)), mx.array(last)], rows, 0)
        guesses = [guess]
        while len(guesses) < most:
            logits = self._model.read(guess[:, None], self._cache)
            guess = self._pick(logits[:, -1], rows, len(guesses))
            guesses.append(guess)
        each: Any = mx.stack(guesses, axis=1).tolist()
        self._read = {uid: len(rows[uid].tokens) + 1 for uid in self._read}
        self._guessed, self._ahead = dict(zip(self._read, each, strict=True)), most - 1
        return dict(self._guessed)

    def _cut_off(self, rows: Mapping[int, DraftRow]) -> None:
        """Cut off the guesses that the rows have not drawn, of all of them as many."""
        if not self._ahead:
            return
        kept = self._ahead
        for uid, end in self._read.items():
            if uid in rows:
                kept = min(kept, _drawn(self._guessed[uid], rows[uid].tokens[end:]))
        for layer in self._cache:
            layer.trim(self._ahead - kept)
        self._read = {uid: end + kept for uid, end in self._read.items()}
        self._ahead = 0

    def _set_aside(self, rows: Mapping[int, DraftRow]) -> None:
        """Take rows out of the batch of which much is to be read, and those that do not guess."""
        for place, (uid, end) in enumerate(self._read.items()):
            if uid in rows and len(rows[uid].tokens) - end > CHUNK:
                self._begun[uid] = ([layer.extract(place) for layer in self._cache], end)
        self._keep_in_batch([uid for uid in rows if uid not in self._begun])

    def _begin(self, rows: Mapping[int, DraftRow]) -> None:
        """Read on in rows that are not in the batch yet; those that are read to their end join."""
        left = CHUNK
        for uid in [uid for uid in rows if uid not in self._read]:
            known = rows[uid].tokens
            cache, end = self._begun.pop(uid, ([], 0))
            if not cache or len(known) - end > CONTEXT:
                cache, end = make_prompt_cache(self._model.model), max(len(known) - CONTEXT, 0)
            if tokens := known[end : end + left]:
                self._model.read([list(tokens)], cache)
                mx.eval([layer.state for layer in cache])
                left, end = left - len(tokens), end + len(tokens)
            if end < len(known) or cache[0].empty():
                self._begun[uid] = (cache, end)
                continue
            held = cache[0].offset
            merged = [layer.merge([layer]) for layer in cache]
            joining = with_cheap_masks(merged, [held], pads=self._pads)
            for layer, other in zip(self._cache, joining, strict=bool(self._cache)):
                layer.extend(other)
            self._cache = self._cache or joining
            self._read[uid] = end

    def _pick(self, logits: mx.array, rows: Mapping[int, DraftRow], nth: int) -> mx.array:
        """Draw a guess for each row of the batch (rows,), as the row itself will: with the same
        numbers, so that both models draw the same token as often as can be.

        Args:
            logits: (rows, ids) of the draft model.
            rows: by uid.
            nth: how many guesses they have already.
        """
        logits = logits[:, : self._width].astype(mx.float32)
        if (lacking := self._width - logits.shape[-1]) > 0:
            logits = mx.pad(logits, [(0, 0), (0, lacking)], constant_values=-mx.inf)
        draws = [rows[uid].draws.later(nth) for uid in self._read]
        sampler = BatchSampler(draws, [[]] * len(draws), self._width, self._draw)
        latest = mx.zeros(len(draws), mx.uint32)  # only penalties ask for it
        return sampler.draw(normalise(sampler.shape(logits, latest)))


def _drawn(guesses: Sequence[int], text: Sequence[int]) -> int:
    """Return how many of the guesses are what a row has drawn."""
    count = 0
    while count < min(len(guesses), len(text)) and guesses[count] == text[count]:
        count += 1
    return count
