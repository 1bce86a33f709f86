"""Converts a GGUF file into a folder that mlx-lm loads.

For llama models with a byte-level BPE vocabulary, quantised so that MLX reads them as they are
(F16, Q4_0, Q4_1, Q8_0). Everything else is refused by name.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from mlxsup.protocol.text import size_text

from ...engine import BadModelError
from .gguf_header import check_gguf, shown
from .loader import raise_if_memory, shorten

GROUP_SIZE = 32
"""Weights that share a scale, in every format that MLX reads out of GGUF."""

_CONTROL_TOKEN = 3
_USER_TOKEN = 4

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_REALS = (mx.float16, mx.bfloat16, mx.float32)
_DIGITS = {"type": "Digits", "individual_digits": True}
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [_DIGITS, _BYTE_LEVEL | {"use_regex": True}],
    "gpt-2": [_BYTE_LEVEL | {"use_regex": True}],
}

Say = Callable[[str], None]


class Metadata:
    """A GGUF file's key-value pairs, by type; a missing one is named.

    Args:
        source: the file, for messages.
        values: as MLX reads them.
    """

    def __init__(self, source: Path, values: Mapping[str, Any]) -> None:
        self._source = source
        self._values = values

    def has(self, name: str) -> bool:
        """True if there is such a key."""
        return name in self._values

    def integer(self, name: str, default: int | None = None, *, below: int = 2**31) -> int:
        """Return a whole number from 0 that is less than `below`."""
        value = self._number(name, default)
        if not (0 <= value < below and value == int(value)):
            raise BadModelError(
                f"{self._source}: {name} is {value}, no number from 0 to {below - 1}"
            )
        return int(value)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 1."""
        value = self.integer(name, default)
        if value == 0:
            raise BadModelError(f"{self._source}: {name} is 0")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a number with its shortest decimal form; the file keeps 32 bits of it."""
        value = self._number(name, default)
        if not math.isfinite(value):
            raise BadModelError(f"{self._source}: {name} is {value}, no number to compute with")
        return float(f"{value:.7g}")

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise BadModelError(f"{self._source}: the metadata has no text {name}")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of strings."""
        value = self._values.get(name)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise BadModelError(f"{self._source}: the metadata has no list {name}")
        return value

    def integers(self, name: str) -> list[int]:
        """Return a list of whole numbers."""
        value = self._values.get(name)
        if not isinstance(value, mx.array) or value.ndim != 1 or value.dtype in _REALS:
            raise BadModelError(f"{self._source}: the metadata has no list {name}")
        items: Any = value.tolist()
        return [int(item) for item in items]

    def _number(self, name: str, default: float | None) -> float:
        value = self._values.get(name, default)
        if isinstance(value, mx.array) and value.size == 1:
            value = value.item()
        if not isinstance(value, int | float):
            raise BadModelError(f"{self._source}: the metadata has no number {name}")
        return value


def convert(source: Path, target: Path, say: Say) -> None:
    """Writes the folder `target` from the file `source`.

    Args:
        source: a GGUF file.
        target: must not exist.
        say: called with one line for each stage.

    Raises:
        ModelMissingError: there is no such file.
        BadModelError: the file is not one that can be converted.
        MemoryError: it does not fit into memory.
        FileExistsError: the folder exists.
        OSError: the folder cannot be written.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    weights, metadata = _read(source, say)
    config = _config(metadata, weights, source)
    say("renaming arrays")
    arrays = _arrays(weights, config, source)
    config["quantization"] = quantization(arrays)
    if not config["quantization"]:
        del config["quantization"]
    with appearing_whole(target) as partial:
        partial.mkdir()
        say("writing the tokenizer")
        _write_tokenizer(partial, metadata, source)
        _write_json(partial / "config.json", config)
        say("writing the weights")
        try:
            mx.save_safetensors(str(partial / "model.safetensors"), arrays, {"format": "mlx"})
        except RuntimeError as error:
            # So MLX says that the disk is full.
            raise OSError(f"{target.parent} cannot be written to: {error}") from error
    say(f"wrote {target}")


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """Let a folder appear complete or not at all: provide a path next to its place, at which the
    block makes it.

    Raises:
        OSError: it cannot be renamed.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read(source: Path, say: Say) -> tuple[dict[str, mx.array], Metadata]:
    check_gguf(source)
    say(f"reading {source.name}, {size_text(source.stat().st_size)}")
    loaded: Any
    try:
        loaded = mx.load(str(source), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise_if_memory(error)
        raise BadModelError(f"{source} is not a GGUF file that MLX reads: {error}") from error
    weights, values = loaded
    metadata = Metadata(source, values)
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise BadModelError(
            f"{source} is a {shown(architecture)} model; only llama models can be converted"
        )
    return weights, metadata


def _config(metadata: Metadata, weights: Mapping[str, mx.array], source: Path) -> dict[str, Any]:
    heads = metadata.size("llama.attention.head_count")
    hidden = metadata.size("llama.embedding_length")
    head_size = metadata.size("llama.attention.key_length", hidden // heads)
    tokens = len(metadata.texts("tokenizer.ggml.tokens"))
    if metadata.integer("llama.rope.dimension_count", head_size) != head_size:
        raise BadModelError(f"{source} rotates a part of each head only; that is not supported")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": metadata.size("llama.feed_forward_length"),
        "num_hidden_layers": metadata.size("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("llama.attention.head_count_kv", heads),
        "head_dim": head_size,
        "rms_norm_eps": metadata.real("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": tokens,
        "rope_theta": metadata.real("llama.rope.freq_base", 10000.0),
        "max_position_embeddings": metadata.size("llama.context_length"),
        "tie_word_embeddings": "output.weight" not in weights,
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id", below=tokens),
    }
    if metadata.has("tokenizer.ggml.bos_token_id"):
        config["bos_token_id"] = metadata.integer("tokenizer.ggml.bos_token_id", below=tokens)
    return config


def _arrays(
    weights: Mapping[str, mx.array], config: Mapping[str, Any], source: Path
) -> dict[str, mx.array]:
    heads_of = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    arrays = {}
    for name, array in weights.items():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|scales|biases)", name)
        layer, kind, part = match.groups() if match else (None, "", "")
        names = _TOP_NAMES if layer is None else _LAYER_NAMES
        if kind not in names:
            raise BadModelError(
                f"{source} holds {shown(name)}, which is not known of a llama model"
            )
        if kind in heads_of:
            if array.ndim != 2 or array.shape[0] % (2 * heads_of[kind]):
                raise BadModelError(
                    f"{source}: {name} has the shape {list(array.shape)}, which does not fit"
                    f" {heads_of[kind]} heads"
                )
            array = undo_interleave(array, heads_of[kind])
        prefix = "" if layer is None else f"model.layers.{layer}."
        arrays[f"{prefix}{names[kind]}.{part}"] = array
    return arrays


def undo_interleave(array: mx.array, heads: int) -> mx.array:
    """Puts the rows of a query or key projection back into halves.

    GGUF keeps the two rows that one rotation turns side by side; mlx-lm rotates row i with row
    i + half. Scales and biases have the same rows.

    Args:
        array: (heads × head size, columns).
        heads: of this projection.
    """
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def quantization(arrays: Mapping[str, mx.array]) -> dict[str, Any]:
    """Return the `quantization` entry of config.json: the usual width, and each layer that
    differs."""
    bits_of = {}
    for name, scales in arrays.items():
        module, _, part = name.rpartition(".")
        if part == "scales":
            bits_of[module] = arrays[f"{module}.weight"].shape[-1] // scales.shape[-1]
    if not bits_of:
        return {}
    widths = list(bits_of.values())
    usual = max(set(widths), key=widths.count)
    entry: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": usual}
    for module, bits in sorted(bits_of.items()):
        if bits != usual:
            entry[module] = {"group_size": GROUP_SIZE, "bits": bits}
    return entry


def _write_tokenizer(folder: Path, metadata: Metadata, source: Path) -> None:
    kind = metadata.text("tokenizer.ggml.model")
    pre = metadata.text("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise BadModelError(
            f"{source} has a {shown(kind)} tokenizer of the kind {shown(pre)};"
            f" gpt2 of {known} can be converted"
        )
    tokens = metadata.texts("tokenizer.ggml.tokens")
    kinds = metadata.integers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise BadModelError(f"{source} has {len(tokens)} tokens and {len(kinds)} types of them")
    content = _tokenizer(
        tokens, metadata.texts("tokenizer.ggml.merges"), kinds, _PRE_TOKENIZERS[pre]
    )
    try:
        # Parsed once by the library that will read it, so that a bad vocabulary shows here.
        Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises nothing more special
        raise BadModelError(f"{source} has a vocabulary that is none: {shorten(error)}") from error
    _write_json(folder / "tokenizer.json", content)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.size("llama.context_length"),
    }
    for name in ("bos", "eos", "unknown", "padding"):
        if metadata.has(key := f"tokenizer.ggml.{name}_token_id"):
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            config[f"{short}_token"] = tokens[metadata.integer(key, below=len(tokens))]
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    templates = [
        {"name": name, "template": metadata.text(key)}
        for name, key in keys.items()
        if metadata.has(key)
    ]
    if templates:
        config["chat_template"] = templates if templates[1:] else templates[0]["template"]
    _write_json(folder / "tokenizer_config.json", config)


def _tokenizer(
    tokens: Sequence[str],
    merges: Sequence[str],
    kinds: Sequence[int],
    pre_tokenizers: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL_TOKEN,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL_TOKEN, _USER_TOKEN)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre_tokenizers)},
        "post_processor": None,
        "decoder": _BYTE_LEVEL | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
