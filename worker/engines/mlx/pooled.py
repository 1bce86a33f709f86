"""A model that turns texts into vectors: what runs over their tokens, and what pools them.

Encoders have code of their own (`encoders`). Of a decoder, mlx-lm's own model runs without its
output layer; it needs no mask, because what fills a text up comes after it and no token sees what
comes later. Gemma 3 can be trained to see both sides; then its layers get a mask here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.pooling import Mode, Pooling
from mlxsup.protocol.tasks import NOUNS, Task

from ...engine import BadModelError
from . import encoders
from .caches import measure_layers
from .encoders import ENCODER_CLASSES, Block, Config
from .folder import ModelFolder
from .loader import load_lazily, shorten

PREFIX = "model."

ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "GELU": nn.gelu,
    "ReLU": nn.relu,
}


class PooledModel:
    """A model, and how it pools.

    Attributes:
        inner: the module with the weights.
        answers: tokens whose logits are the score; see `Pooling.answers`.
        dense: layers after the pooling.
        dimensions: of an embedding; 0 for a model that ranks.
        reads_whole: whether a long text is read in one pass; if not, in parts over a cache.

    Args:
        inner: the module.
        config: what config.json holds.
        pooling: how it pools.
        dense: layers after the pooling, each with its activation.
    """

    def __init__(
        self,
        inner: Any,
        config: Mapping[str, Any],
        pooling: Pooling,
        dense: Sequence[tuple[nn.Linear, str]] = (),
    ) -> None:
        self.inner = inner
        self.answers: tuple[int, ...] = ()
        self.dense = [linear for linear, _ in dense]
        self._activations = [ACTIVATIONS[name] for _, name in dense]
        self._pooling = pooling
        self._is_encoder = config["model_type"] in ENCODER_CLASSES
        self._sees_both_sides = bool(config.get("use_bidirectional_attention"))
        self.reads_whole = self._is_encoder or self._sees_both_sides
        width = int(config.get("hidden_size") or config.get("n_embd") or 0)
        if self.dense:
            width = self.dense[-1].weight.shape[0]
        self.dimensions = width if pooling.task is Task.EMBED else 0

    def cache_layers(self) -> tuple[CacheLayers, ...]:
        """Return what is kept of the parts of a long text until it is read."""
        return () if self.reads_whole else measure_layers(self.inner)

    def widen(self) -> None:
        """Compute in 32-bit floats from now on."""
        self.inner.set_dtype(mx.float32)

    @property
    def is_half(self) -> bool:
        """True if some of its numbers have 16 bits, and none is packed."""
        kinds = {array.dtype for _, array in _flat(self.inner)}
        return bool(kinds & {mx.float16, mx.bfloat16}) and mx.uint32 not in kinds

    @property
    def is_packed(self) -> bool:
        """True if its weights are quantised."""
        return any(array.dtype == mx.uint32 for _, array in _flat(self.inner))

    def __call__(self, ids: mx.array, lengths: mx.array, kinds: mx.array | None) -> mx.array:
        """Return a vector for each text, (texts, width), or its score, (texts, 1); 32-bit floats.

        Args:
            ids: of the tokens, (texts, length); texts are filled up at their ends.
            lengths: of the texts.
            kinds: 1 for the tokens of a document, if it comes after its query; otherwise 0.
        """
        if self.reads_whole or ids.shape[1] <= encoders.BLOCK:
            pooled = self._pool(self._run(ids, lengths, kinds), lengths)
        else:
            pooled = self._read_in_chunks(ids, lengths)
        if self._pooling.task is Task.RERANK:
            return mx.sigmoid(self._score(pooled))
        pooled = pooled.astype(mx.float32)
        for linear, activation in zip(self.dense, self._activations, strict=True):
            pooled = activation(linear(pooled))
        return pooled

    def _score(self, pooled: mx.array) -> mx.array:
        if not self._pooling.answers:
            score: mx.array = self.inner.score(pooled).astype(mx.float32)
            return score
        logits = self._output(pooled)[:, list(self.answers)].astype(mx.float32)
        return logits[:, :1] - logits[:, 1:] if len(self.answers) > 1 else logits

    def _output(self, vectors: mx.array) -> mx.array:
        if "lm_head" in self.inner:
            logits: mx.array = self.inner.lm_head(vectors)
        else:
            logits = self.inner.model.embed_tokens.as_linear(vectors)
        return logits

    def answers_differ(self, ids: mx.array) -> bool:
        """True if the model does more with its last vectors than multiply them by its output layer.

        Args:
            ids: of the tokens of a text, (1, length).
        """
        whole = self.inner(ids)[:, -1].astype(mx.float32)
        ours = self._output(self.inner.model(ids)[:, -1]).astype(mx.float32)
        return not mx.allclose(whole, ours, rtol=1e-2, atol=1e-2).item()

    def _read_in_chunks(self, ids: mx.array, lengths: mx.array) -> mx.array:
        """Return the pooled vectors of texts, one of which is long; see `__call__`."""
        cache, pooled = make_prompt_cache(self.inner), mx.array(0.0)
        for begin in range(0, ids.shape[1], encoders.BLOCK):
            vectors = self.inner.model(ids[:, begin : begin + encoders.BLOCK], cache=cache)
            pooled = pooled + self._share(vectors, lengths, begin)
            mx.eval(pooled, [layer.state for layer in cache])
        return pooled if self._pooling.mode is Mode.MEAN else pooled.astype(vectors.dtype)

    def _run(self, ids: mx.array, lengths: mx.array, kinds: mx.array | None) -> mx.array:
        if self._is_encoder:
            vectors: mx.array = self.inner(ids, lengths, kinds)
        elif self._sees_both_sides:
            vectors = _run_gemma(self.inner, ids, lengths)
        else:
            vectors = self.inner.model(ids)
        return vectors

    def _pool(self, vectors: mx.array, lengths: mx.array) -> mx.array:
        match self._pooling.mode:
            case Mode.CLS:
                return vectors[:, 0]
            case Mode.LAST:
                return vectors[mx.arange(lengths.size), lengths - 1]
        return self._share(vectors, lengths, 0)

    def _share(self, vectors: mx.array, lengths: mx.array, begin: int) -> mx.array:
        """Return what the vectors of a chunk add to those of their texts, in 32-bit floats.

        Args:
            vectors: (texts, tokens, width).
            lengths: of the texts.
            begin: the place of the chunk in each of them.
        """
        place, counts = begin + mx.arange(vectors.shape[1])[None, :], lengths[:, None]
        match self._pooling.mode:
            case Mode.CLS:
                is_taken = mx.broadcast_to(place == 0, vectors.shape[:2])
            case Mode.LAST:
                is_taken = place == counts - 1
            case Mode.MEAN:
                is_taken = place < counts
        # Not times zero: what is beyond a text may be no number.
        taken = mx.where(is_taken[..., None], vectors.astype(mx.float32), 0.0).sum(axis=1)
        return taken / counts if self._pooling.mode is Mode.MEAN else taken


def load_pooled(folder: ModelFolder, pooling: Pooling) -> PooledModel:
    """Return the model of a folder; its arrays are still to be read.

    Raises:
        BadModelError: no such model can be made of it; names the file and the cause.
        MemoryError: not enough memory now.
    """
    config = folder.config
    if pooling.problem:
        raise BadModelError(f"{folder.path}: {pooling.problem}")
    if config["model_type"] in ENCODER_CLASSES:
        kind = ENCODER_CLASSES[config["model_type"]]
        classes = partial(_encoder_classes, kind)
        inner, _ = load_lazily(folder, get_model_classes=classes)
    else:
        if pooling.answers:
            inner, _ = load_lazily(folder)
        else:
            classes = partial(_decoder_classes, is_ranking=pooling.task is Task.RERANK)
            inner, _ = load_lazily(
                folder, get_model_classes=classes, model_config={"tie_word_embeddings": True}
            )
        if not hasattr(inner, "model") or not callable(inner.model):
            raise unsuited(folder, pooling)
    return PooledModel(inner, config, pooling, [_dense(folder.path / one) for one in pooling.dense])


def unsuited(folder: ModelFolder, pooling: Pooling) -> BadModelError:
    """Return the error for a type of model that is not built as its task needs it."""
    return BadModelError(
        f"{folder.path / 'config.json'}: a model of type {folder.config['model_type']} cannot be"
        f" used for {NOUNS[pooling.task]}"
    )


def _encoder_classes(kind: type[nn.Module], config: Mapping[str, Any]) -> tuple[Any, Any]:
    return kind, Config


def _decoder_classes(config: dict[str, Any], *, is_ranking: bool) -> tuple[Any, Any]:
    """Return mlx-lm's classes for a decoder, without the output layer.

    Embedding models are saved without the name of the module that the output layer was put on.

    Args:
        config: of the model.
        is_ranking: whether it has a layer that makes a score.
    """
    model_class, arguments_class = _get_classes(config)

    class WithoutOutput(model_class):  # type: ignore[misc, valid-type]
        def __init__(self, arguments: Any) -> None:
            super().__init__(arguments)
            self.pop("lm_head", None)
            if is_ranking:
                self.score = nn.Linear(arguments.hidden_size, 1, bias=False)

        def __call__(self, ids: mx.array, cache: Any = None) -> Any:
            return self.model(ids, cache=cache)

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            if not any(name.startswith((PREFIX, "language_model.")) for name in weights):
                weights = {PREFIX + name: array for name, array in weights.items()}
            head = {name: array for name, array in weights.items() if name.startswith("lm_head")}
            weights = {name: array for name, array in weights.items() if name not in head}
            if hasattr(model_class, "sanitize"):
                # Gemma 3 takes away an output layer that is not in the files.
                if "lm_head" not in self:
                    self.lm_head = nn.Identity()
                weights = super().sanitize(weights)
                self.pop("lm_head", None)
            return {n: array for n, array in weights.items() if not n.startswith("lm_head")}

    return WithoutOutput, arguments_class


class _WholeText:
    """The keys and values of a layer for all tokens, which it reads in blocks; for mlx-lm's layers,
    which take it as their cache.

    Attributes:
        offset: the place of the block.
        seen: what the block's tokens see.
    """

    def __init__(self) -> None:
        self.offset = 0
        self.seen = slice(0)
        self._all: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep those of the whole text, which come first; then return those that a block sees."""
        if self._all is None:
            self._all = keys, values
        keys, values = self._all
        return keys[:, :, self.seen], values[:, :, self.seen]


def _run_gemma(model: Any, ids: mx.array, lengths: mx.array) -> mx.array:
    """Return the vectors of Gemma 3 in which each token sees those after it, too.

    As in transformers, half of the window, and one more, lies on each side, itself included.
    """
    inner = model.model
    hidden = inner.embed_tokens(ids)
    scale = mx.array(inner.args.hidden_size**0.5, mx.bfloat16).astype(hidden.dtype)
    hidden = hidden * scale
    whole = encoders.blocks_of(lengths, ids.shape[1])
    near = encoders.blocks_of(lengths, ids.shape[1], inner.args.sliding_window // 2)
    for number, layer in enumerate(inner.layers):
        is_whole = (number + 1) % inner.sliding_window_pattern == 0
        hidden = _run_layer(layer, hidden, whole if is_whole else near)
    vectors: mx.array = inner.norm(hidden)
    return vectors


def _run_layer(layer: Any, hidden: mx.array, blocks: Sequence[Block]) -> mx.array:
    known = _WholeText()
    layer(hidden, None, known)  # of this pass, which is not computed, only keys and values are

    def read(one: Block) -> mx.array:
        known.offset, known.seen = one.tokens.start, one.seen
        out: mx.array = layer(hidden[:, one.tokens], one.mask, known)
        return out

    return encoders.read_in_blocks(blocks, read, axis=1)


def _dense(folder: Path) -> tuple[nn.Linear, str]:
    """Return a layer of sentence-transformers, and the name of its activation.

    Raises:
        BadModelError: it is missing or of another kind.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        weights: Any = mx.load(str(folder / "model.safetensors"))
        activation = str(config.get("activation_function", "Identity")).rpartition(".")[2]
        if activation not in ACTIVATIONS:
            raise ValueError(f"the activation {activation[:40]} is not supported")
        weight = weights["linear.weight"]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias="linear.bias" in weights)
        linear.load_weights([(n.removeprefix("linear."), w) for n, w in weights.items()])
    except (OSError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise BadModelError(f"{folder}: {shorten(error)}") from error
    linear.set_dtype(mx.float32)
    return linear, activation


def _flat(module: Any) -> list[tuple[str, mx.array]]:
    found: list[tuple[str, mx.array]] = tree_flatten(module.parameters())
    return found
