"""The encoders that mlx-lm does not have: BERT, RoBERTa and XLM-RoBERTa, NomicBERT, ModernBERT.

Own code of 300 lines, because mlx-embeddings is under the GPL and mlx-vlm brings half a gigabyte of
packages for pictures. Parameters are named as in the files, so that quantised conversions of other
tools load as well. Every model takes token ids, (texts, length), the lengths of the texts, and the
kind of each token or None; it returns vectors, (texts, length, width), and what is at and after a
text's length means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Activation = Callable[[mx.array], mx.array]

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
}

BLOCK = 1024
"""Tokens of a text that look at the others at once, and that a decoder reads at once: on a CPU each
pair of tokens has a score for each head, which for a text of 30,000 would be gigabytes."""

_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class Config:
    """The settings of an encoder, as mlx-lm asks for them.

    Attributes:
        values: what config.json holds.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Return those of a config.json."""
        return cls(values)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of the values that is there."""
        given = (self.values[name] for name in names if self.values.get(name) is not None)
        return next(given, default)

    def need(self, *names: str) -> Any:
        """Return the same.

        Raises:
            KeyError: none of them is there.
        """
        value = self.get(*names)
        if value is None:
            raise KeyError(names[0])
        return value

    @property
    def activation(self) -> Activation:
        """Return the activation between the layers of a block.

        Raises:
            ValueError: there is no such activation here.
        """
        name = self.get("hidden_act", "hidden_activation", "activation_function", default="gelu")
        if name not in ACTIVATIONS:
            raise ValueError(f"the activation {str(name)[:40]!r} is not supported")
        return ACTIVATIONS[name]

    @property
    def ranks(self) -> bool:
        """True if there is a layer that gives each pair of texts a score."""
        return str(self.get("architectures", default=[""])[0]).endswith("ForSequenceClassification")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Tokens of texts that look at others at once.

    Attributes:
        tokens: their places.
        seen: the places of all that any of them sees.
        mask: which of these each sees, (texts, 1, tokens, seen); one row if all see the same.
    """

    tokens: slice
    seen: slice
    mask: mx.array


def blocks_of(lengths: mx.array, size: int, window: int | None = None) -> list[Block]:
    """Return the blocks of a pass, in order.

    Args:
        lengths: of the texts.
        size: of the pass.
        window: how far a token sees to each side; None: everything.
    """
    blocks = []
    for begin in range(0, size, BLOCK):
        end, first, last = min(begin + BLOCK, size), 0, size
        if window is not None:
            first, last = max(begin - window, 0), min(end + window, size)
        seen = mx.arange(first, last)
        mask = (seen[None, :] < lengths[:, None])[:, None, None, :]
        if window is not None:
            distance = mx.abs(mx.arange(begin, end)[:, None] - seen[None, :])
            # A token sees itself, even one that only fills up: a row of scores without any would
            # be NaN, and in half precision that reaches texts through the values of the next layer.
            mask = (mask & (distance <= window)) | (distance == 0)
        blocks.append(Block(tokens=slice(begin, end), seen=slice(first, last), mask=mask))
    return blocks


def read_in_blocks(
    blocks: Sequence[Block], read: Callable[[Block], mx.array], axis: int
) -> mx.array:
    """Return what `read` gives for each block, put together along an axis.

    MLX allocates ahead of what it computes, so each of several blocks is computed before the next:
    else the scores of all of them would be there at once.
    """
    if len(blocks) == 1:
        return read(blocks[0])
    parts = []
    for one in blocks:
        parts.append(read(one))
        mx.eval(parts[-1])
    return mx.concatenate(parts, axis=axis)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    heads: int,
    blocks: Sequence[Block],
    rope: Callable[[mx.array], mx.array] | None = None,
) -> mx.array:
    """Return what tokens take from those that they see, (texts, length, width)."""
    texts, length, width = queries.shape

    def split(x: mx.array) -> mx.array:
        return x.reshape(texts, length, heads, -1).transpose(0, 2, 1, 3)

    q, k, v = split(queries), split(keys), split(values)
    if rope is not None:
        q, k = rope(q), rope(k)
    scale = (width // heads) ** -0.5

    def look(one: Block) -> mx.array:
        near = k[:, :, one.seen], v[:, :, one.seen]
        return mx.fast.scaled_dot_product_attention(
            q[:, :, one.tokens], *near, scale=scale, mask=one.mask
        )

    out = read_in_blocks(blocks, look, axis=2)
    return out.transpose(0, 2, 1, 3).reshape(texts, length, width)


def renamed(weights: Mapping[str, mx.array], prefixes: tuple[str, ...]) -> dict[str, mx.array]:
    """Return weights without the prefix of the model that a head was put on, and without tables
    that are computed here."""
    found = {}
    for name, array in weights.items():
        for old, new in _OLD_NORMS.items():
            name = name.replace(old, new)
        name = re.sub(f"^({'|'.join(prefixes)})\\.", "", name)
        if not name.endswith(("position_ids", "inv_freq")):
            found[name] = array
    return found


# ---------------------------------------------------------------- BERT and RoBERTa


class _Bag(nn.Module):  # type: ignore[misc]
    """Modules under names of their own."""

    def __init__(self, /, **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class _BertLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config.need("hidden_size"), config.get("layer_norm_eps", default=1e-12)
        inner = config.need("intermediate_size")
        self._heads = config.need("num_attention_heads")
        self._activation = config.activation
        linears = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
        self.attention = _Bag(
            self=_Bag(**linears),
            output=_Bag(dense=nn.Linear(width, width), LayerNorm=nn.LayerNorm(width, eps)),
        )
        self.intermediate = _Bag(dense=nn.Linear(width, inner))
        self.output = _Bag(dense=nn.Linear(inner, width), LayerNorm=nn.LayerNorm(width, eps))

    def __call__(self, x: mx.array, blocks: Sequence[Block]) -> mx.array:
        own, output = self.attention["self"], self.attention.output
        seen = attend(own.query(x), own.key(x), own.value(x), self._heads, blocks)
        x = output.LayerNorm(output.dense(seen) + x)
        inner = self._activation(self.intermediate.dense(x))
        out: mx.array = self.output.LayerNorm(self.output.dense(inner) + x)
        return out


class Bert(nn.Module):  # type: ignore[misc]
    """BERT, RoBERTa and XLM-RoBERTa, with the head that ranks where there is one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config.need("hidden_size"), config.get("layer_norm_eps", default=1e-12)
        self._is_roberta = config.need("model_type") != "bert"
        if config.get("position_embedding_type", default="absolute") != "absolute":
            raise ValueError("relative positions are not supported")
        # RoBERTa counts positions from the number after that of its padding.
        self._first_place = config.get("pad_token_id", default=1) + 1 if self._is_roberta else 0
        kinds = config.get("type_vocab_size", default=2)
        self.embeddings = _Bag(
            word_embeddings=nn.Embedding(config.need("vocab_size"), width),
            position_embeddings=nn.Embedding(config.need("max_position_embeddings"), width),
            token_type_embeddings=nn.Embedding(kinds, width),
            LayerNorm=nn.LayerNorm(width, eps),
        )
        self._has_kinds = kinds > 1
        self.encoder = _Bag(
            layer=[_BertLayer(config) for _ in range(config.need("num_hidden_layers"))]
        )
        self._ranks = config.ranks
        if self._ranks and self._is_roberta:
            self.classifier = _Bag(dense=nn.Linear(width, width), out_proj=nn.Linear(width, 1))
        elif self._ranks:
            self.pooler = _Bag(dense=nn.Linear(width, width))
            self.classifier = nn.Linear(width, 1)

    def __call__(self, ids: mx.array, lengths: mx.array, kinds: mx.array | None) -> mx.array:
        """Return the vectors of tokens; see the top of this file."""
        parts, size = self.embeddings, ids.shape[1]
        places = mx.arange(self._first_place, self._first_place + size)
        # In passes that are longer than the table only texts' ends are padding: any row will do.
        places = mx.minimum(places, parts.position_embeddings.weight.shape[0] - 1)
        of_kind = kinds if kinds is not None and self._has_kinds else mx.zeros_like(ids)
        words = parts.word_embeddings(ids) + parts.position_embeddings(places)[None]
        x: mx.array = parts.LayerNorm(words + parts.token_type_embeddings(of_kind))
        blocks = blocks_of(lengths, size)
        for layer in self.encoder.layer:
            x = layer(x, blocks)
        return x

    def score(self, vectors: mx.array) -> mx.array:
        """Return a number for each first vector of a pair of texts, (pairs, 1)."""
        if self._is_roberta:
            scores: mx.array = self.classifier.out_proj(mx.tanh(self.classifier.dense(vectors)))
        else:
            scores = self.classifier(mx.tanh(self.pooler.dense(vectors)))
        return scores

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights that this model has, by their names here."""
        found = renamed(weights, ("bert", "roberta", "model", "0.auto_model"))
        dropped = (
            ("lm_head.", "cls.") if self._ranks else ("lm_head.", "cls.", "pooler.", "classifier.")
        )
        if self._ranks and self._is_roberta:
            dropped = (*dropped, "pooler.")
        return {name: array for name, array in found.items() if not name.startswith(dropped)}


# ---------------------------------------------------------------- NomicBERT


class _NomicLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.need("n_embd", "hidden_size")
        inner = config.need("n_inner", "intermediate_size")
        eps = config.get("layer_norm_epsilon", "layer_norm_eps", default=1e-12)
        has_bias = config.get("qkv_proj_bias", default=False)
        has_inner_bias = config.get("mlp_fc1_bias", default=False)
        self._heads = config.need("n_head", "num_attention_heads")
        parameters = config.get("rope_parameters", default={})
        base = config.get("rotary_emb_base", default=parameters.get("rope_theta", 1000.0))
        self._rope = nn.RoPE(width // self._heads, base=base)
        self.attn = _Bag(
            Wqkv=nn.Linear(width, 3 * width, bias=has_bias),
            out_proj=nn.Linear(width, width, bias=has_bias),
        )
        self.mlp = _Bag(
            fc11=nn.Linear(width, inner, bias=has_inner_bias),
            fc12=nn.Linear(width, inner, bias=has_inner_bias),
            fc2=nn.Linear(inner, width, bias=config.get("mlp_fc2_bias", default=False)),
        )
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)

    def __call__(self, x: mx.array, blocks: Sequence[Block]) -> mx.array:
        queries, keys, values = mx.split(self.attn.Wqkv(x), 3, axis=-1)
        seen = attend(queries, keys, values, self._heads, blocks, self._rope)
        x = self.norm1(self.attn.out_proj(seen) + x)
        inner = self.mlp.fc11(x) * nn.silu(self.mlp.fc12(x))
        out: mx.array = self.norm2(self.mlp.fc2(inner) + x)
        return out


class NomicBert(nn.Module):  # type: ignore[misc]
    """nomic-embed-text: BERT with rotary positions and gated layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        is_gated = config.get("activation_function", "hidden_act", default="swiglu")
        unlike = config.get("prenorm") or config.get("num_experts", default=0)
        whole = config.get("rotary_emb_fraction", default=1.0) == 1.0
        if is_gated not in ("swiglu", "silu") or unlike or not whole:
            raise ValueError("this kind of NomicBERT is not supported: only that of nomic-embed v1")
        width = config.need("n_embd", "hidden_size")
        eps = config.get("layer_norm_epsilon", "layer_norm_eps", default=1e-12)
        self.embeddings = _Bag(
            word_embeddings=nn.Embedding(config.need("vocab_size"), width),
            token_type_embeddings=nn.Embedding(config.get("type_vocab_size", default=2), width),
        )
        self.emb_ln = nn.LayerNorm(width, eps)
        count = config.need("n_layer", "num_hidden_layers")
        self.encoder = _Bag(layers=[_NomicLayer(config) for _ in range(count)])

    def __call__(self, ids: mx.array, lengths: mx.array, kinds: mx.array | None) -> mx.array:
        """Return the vectors of tokens; see the top of this file."""
        parts = self.embeddings
        words = parts.word_embeddings(ids) + parts.token_type_embeddings(mx.zeros_like(ids))
        x: mx.array = self.emb_ln(words)
        blocks = blocks_of(lengths, ids.shape[1])
        for layer in self.encoder.layers:
            x = layer(x, blocks)
        return x

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights that this model has, by their names here."""
        found = renamed(weights, ("bert", "model", "nomic_bert"))
        dropped = ("lm_head.", "cls.", "pooler.")
        return {name: array for name, array in found.items() if not name.startswith(dropped)}


# ---------------------------------------------------------------- ModernBERT


class _ModernLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        width, inner = config.need("hidden_size"), config.need("intermediate_size")
        eps, has_norm_bias = config.get("norm_eps", default=1e-5), config.get("norm_bias") or False
        has_bias, has_inner_bias = (
            config.get("attention_bias") or False,
            config.get("mlp_bias") or False,
        )
        self._heads = config.need("num_attention_heads")
        self._activation = config.activation
        types = config.get("layer_types")
        every = config.get("global_attn_every_n_layers", default=3)
        is_global = number % every == 0 if types is None else types[number] == "full_attention"
        self.window = None if is_global else config.get("local_attention", default=128) // 2
        ropes = config.get("rope_parameters", default={})
        kind, name = ("full_attention", "global") if is_global else ("sliding_attention", "local")
        usual = config.get(f"{name}_rope_theta", default=160000.0 if is_global else 10000.0)
        base = ropes.get(kind, {}).get("rope_theta", usual)
        self._rope = nn.RoPE(width // self._heads, base=base)

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(width, eps, bias=has_norm_bias)

        self.attn_norm = norm() if number else nn.Identity()
        self.attn = _Bag(
            Wqkv=nn.Linear(width, 3 * width, bias=has_bias),
            Wo=nn.Linear(width, width, bias=has_bias),
        )
        self.mlp_norm = norm()
        self.mlp = _Bag(
            Wi=nn.Linear(width, 2 * inner, bias=has_inner_bias),
            Wo=nn.Linear(inner, width, bias=has_inner_bias),
        )

    def __call__(self, x: mx.array, blocks: Sequence[Block]) -> mx.array:
        queries, keys, values = mx.split(self.attn.Wqkv(self.attn_norm(x)), 3, axis=-1)
        x = x + self.attn.Wo(attend(queries, keys, values, self._heads, blocks, self._rope))
        inner, gate = mx.split(self.mlp.Wi(self.mlp_norm(x)), 2, axis=-1)
        out: mx.array = x + self.mlp.Wo(self._activation(inner) * gate)
        return out


class ModernBert(nn.Module):  # type: ignore[misc]
    """ModernBERT, with the head that ranks where there is one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config.need("hidden_size"), config.get("norm_eps", default=1e-5)
        has_bias = config.get("norm_bias") or False
        self.embeddings = _Bag(
            tok_embeddings=nn.Embedding(config.need("vocab_size"), width),
            norm=nn.LayerNorm(width, eps, bias=has_bias),
        )
        count = config.need("num_hidden_layers")
        self.layers = [_ModernLayer(config, number) for number in range(count)]
        self.final_norm = nn.LayerNorm(width, eps, bias=has_bias)
        self._activation = ACTIVATIONS[config.get("classifier_activation", default="gelu")]
        self._ranks = config.ranks
        if self._ranks:
            self.head = _Bag(
                dense=nn.Linear(width, width, bias=config.get("classifier_bias") or False),
                norm=nn.LayerNorm(width, eps, bias=has_bias),
            )
            self.classifier = nn.Linear(width, 1)

    def __call__(self, ids: mx.array, lengths: mx.array, kinds: mx.array | None) -> mx.array:
        """Return the vectors of tokens; see the top of this file."""
        x = self.embeddings.norm(self.embeddings.tok_embeddings(ids))
        blocks: dict[int | None, list[Block]] = {}
        for layer in self.layers:
            if layer.window not in blocks:
                blocks[layer.window] = blocks_of(lengths, ids.shape[1], layer.window)
            x = layer(x, blocks[layer.window])
        out: mx.array = self.final_norm(x)
        return out

    def score(self, vectors: mx.array) -> mx.array:
        """Return a number for each vector of a pair of texts, (pairs, 1)."""
        scores: mx.array = self.classifier(
            self.head.norm(self._activation(self.head.dense(vectors)))
        )
        return scores

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights that this model has, by their names here."""
        found = renamed(weights, ("model",))
        dropped = ("decoder.",) if self._ranks else ("decoder.", "head.", "classifier.")
        return {name: array for name, array in found.items() if not name.startswith(dropped)}


ENCODER_CLASSES: Mapping[str, type[nn.Module]] = {
    "bert": Bert,
    "modernbert": ModernBert,
    "nomic_bert": NomicBert,
    "roberta": Bert,
    "xlm-roberta": Bert,
}
