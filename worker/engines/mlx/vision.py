"""Models that take pictures: mlx-vlm's model classes, over mlx-lm's caches.

The tower sees each picture once, by itself, in a pass of its own. What it makes of it stands in the
prompt where the picture's tokens are, so that a prompt is read in chunks as any other, and rows
decode as those of text do. Where a family counts positions in pictures in three directions
(M-RoPE), a row's next position is not its number of tokens: `RopePositions` goes with each row's
cache and says how far the two are apart.

Everything here belongs to the thread that made the stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.utils import load_config
from mlx_vlm.models.cache import ArraysCache as VlmArraysCache
from mlx_vlm.utils import load_model

from ...engine import Picture
from .caches import RopePositions

KEPT_BYTES = 128 * 1024 * 1024
"""How much of what the tower has made of pictures is kept for other prompts that have them."""


def load_vision(path: Path, *, lazy: bool) -> tuple[Any, dict[str, Any]]:
    """Return mlx-vlm's model of a folder, and the configuration, as mlx-lm's `load_model` does."""
    return load_model(path, lazy=lazy), load_config(path)


class StateCache(VlmArraysCache, ArraysCache):  # type: ignore[misc]
    """A state as mlx-vlm's layers keep it, known as one to all that knows mlx-lm's."""


def _own_cache(layer: Any) -> Any:
    """Return mlx-lm's cache for one of mlx-vlm's, fresh.

    Raises:
        TypeError: it has none.
    """
    match type(layer).__name__:
        case "KVCache":
            return KVCache()
        case "RotatingKVCache":
            return RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
        case "ArraysCache":
            return StateCache(len(layer.cache))
    raise TypeError(f"no cache of mlx-lm does what {type(layer).__name__} does")


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a tower has made of a picture.

    Attributes:
        embeddings: of its tokens (tokens, width).
        is_seen: which of its tokens show a part of it (tokens,); the others mark its edges.
        deep: what is added to the first layers at the tokens that show a part, (parts, width) each.
    """

    embeddings: mx.array
    is_seen: np.ndarray[Any, Any]
    deep: list[mx.array]

    @property
    def size(self) -> int:
        """Return the bytes of its arrays."""
        return sum(int(array.nbytes) for array in (self.embeddings, *self.deep))


class VisionModel:
    """mlx-vlm's model, called as one of mlx-lm's; everything else of it is the model's own.

    Attributes:
        has_rope_positions: whether positions in pictures have three directions.

    Args:
        model: of mlx-vlm.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._language = model.language_model
        self.has_rope_positions = hasattr(self._language, "get_rope_index")
        self._kept: OrderedDict[bytes, Features] = OrderedDict()

    def __call__(self, tokens: mx.array, cache: list[Any], **named: Any) -> mx.array:
        """Return the logits (rows, tokens, vocabulary) of these tokens (rows, tokens)."""
        layers = cache
        if self.has_rope_positions:
            layers, positions = cache[:-1], cache[-1].advance(tokens.shape[1])
            named.setdefault("position_ids", positions)
        logits: mx.array = self._language(tokens, cache=layers, **named).logits
        cache[: len(layers)] = layers  # qwen3_5 puts others into the list for a batch of one row
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def make_cache(self) -> list[Any]:
        """Return the cache of a row."""
        if hasattr(self._language, "make_cache"):
            cache = [_own_cache(layer) for layer in self._language.make_cache()]
        else:
            cache = [KVCache() for _ in self._language.layers]
        return [*cache, RopePositions()] if self.has_rope_positions else cache

    def look(self, picture: Picture) -> Features:
        """Return what the tower makes of a picture, computed when it returns."""
        known = self._kept.get(picture.digest)
        if known is not None:
            self._kept.move_to_end(picture.digest)
            return known
        tokens = mx.array([picture.tokens])
        arrays = {
            name: mx.array(value) if isinstance(value, np.ndarray) else value
            for name, value in picture.arrays.items()
        }
        found = self._model.get_input_embeddings(tokens, mask=mx.ones_like(tokens), **arrays)
        deep, is_seen = found.deepstack_visual_embeds, found.visual_pos_masks
        features = Features(
            embeddings=found.inputs_embeds[0],
            is_seen=np.zeros(0, dtype=bool) if is_seen is None else np.array(is_seen[0]),
            deep=[] if deep is None else list(deep),
        )
        mx.eval(features.embeddings, features.deep)
        self._kept[picture.digest] = features
        while len(self._kept) > 1 and self.held_bytes > KEPT_BYTES:
            self._kept.popitem(last=False)
        return features

    @property
    def held_bytes(self) -> int:
        """Return the memory of what is kept of pictures for other prompts."""
        return sum(one.size for one in self._kept.values())

    def has_seen(self, picture: Picture) -> bool:
        """True if `look` would compute nothing."""
        return picture.digest in self._kept

    def forget(self) -> None:
        """Free what the tower has made of pictures; rows keep what they need."""
        self._kept.clear()

    def embed(self, tokens: Sequence[int]) -> mx.array:
        """Return the embeddings of text (tokens, width), as the language model takes them."""
        found = self._model.get_input_embeddings(mx.array([tokens]), None)
        embeddings: mx.array = found.inputs_embeds[0]
        return embeddings

    def positions(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> tuple[mx.array, int]:
        """Return the positions (3, 1, tokens) of a prompt's tokens, and how much further than their
        number the next token stands.

        Only what stands before the end of the last picture is given to the model, which looks for
        pictures by ids that an answer may have, too.
        """
        end = pictures[-1].end
        grids = [np.asarray(one.arrays["image_grid_thw"]).reshape(-1, 3) for one in pictures]
        inside, deltas = self._language.get_rope_index(
            mx.array([tokens[:end]]), image_grid_thw=mx.array(np.concatenate(grids))
        )
        delta = int(deltas.item())
        behind = mx.broadcast_to(mx.arange(end, len(tokens)) + delta, (3, 1, len(tokens) - end))
        return mx.concatenate([inside, behind.astype(inside.dtype)], axis=-1), delta

    def prompt(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> PicturePrompt:
        """Return a prompt with pictures, of which nothing was read."""
        return PicturePrompt(self, tokens, pictures)


class PicturePrompt:
    """A prompt with pictures, on its way into a cache.

    Args:
        model: reads it.
        tokens: all of its ids; those of pictures may be any.
        pictures: in order.
    """

    def __init__(
        self, model: VisionModel, tokens: Sequence[int], pictures: Sequence[Picture]
    ) -> None:
        self._model = model
        self._pictures = pictures
        self._features: dict[int, Features] = {}  # by the place of the picture
        self._tokens = list(tokens)
        for picture in pictures:
            self._tokens[picture.begin : picture.end] = picture.tokens
        self._positions: mx.array | None = None
        self._delta = 0
        if model.has_rope_positions:
            self._positions, self._delta = model.positions(self._tokens, pictures)

    def look(self, begin: int, end: int) -> bool:
        """Let the tower see the first picture among these tokens that it has not seen; return
        whether there was one."""
        for picture in self._among(begin, end):
            if picture.begin not in self._features:
                is_known = self._model.has_seen(picture)
                self._features[picture.begin] = self._model.look(picture)
                if not is_known:
                    return True
        return False

    def seat(self, cache: list[Any]) -> None:
        """Tell a cache, which may hold the beginning of another prompt, where this one stands."""
        if self._model.has_rope_positions:
            cache[-1].deltas = [self._delta]

    def read(self, begin: int, end: int, cache: list[Any]) -> None:
        """One pass over these tokens, of whose pictures `look` has seen all."""
        embeddings, deep, is_seen = [], [], np.zeros(end - begin, dtype=bool)
        done = begin
        for picture in self._among(begin, end):
            first, last = max(picture.begin, begin), min(picture.end, end)
            if done < first:
                embeddings.append(self._model.embed(self._tokens[done:first]))
            features = self._features[picture.begin]
            inside = slice(first - picture.begin, last - picture.begin)
            embeddings.append(features.embeddings[inside])
            if features.deep:
                seen = features.is_seen
                parts = slice(int(seen[: inside.start].sum()), int(seen[: inside.stop].sum()))
                is_seen[first - begin : last - begin] = seen[inside]
                deep.append([layer[parts] for layer in features.deep])
            if picture.end <= end:
                del self._features[picture.begin]
            done = last
        named: dict[str, Any] = {}
        if embeddings:
            if done < end:
                embeddings.append(self._model.embed(self._tokens[done:end]))
            named["inputs_embeds"] = mx.concatenate(embeddings)[None]
        if is_seen.any():
            named["visual_pos_masks"] = mx.array(is_seen[None])
            layers = map(list, zip(*deep, strict=True))
            named["deepstack_visual_embeds"] = [mx.concatenate(layer) for layer in layers]
        if self._positions is not None:
            named["position_ids"] = self._positions[..., begin:end]
        self._model(mx.array([self._tokens[begin:end]]), cache=cache, **named)

    def _among(self, begin: int, end: int) -> list[Picture]:
        return [one for one in self._pictures if one.begin < end and one.end > begin]
