"""A tiny llama with random weights: real MLX at about a thousand tokens per second, no download.

Its vocabulary is byte-level BPE over syllables, so any text can go in and readable text comes out.
It ends no answer by itself: ids that are not printable, and the end-of-text one where asked for,
have logits far below the others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY_SIZE = 2048
CONTEXT_LENGTH = 4096
_LAYERS = 2
_HIDDEN = 64
_HEADS = 4
_INTERMEDIATE = 128
BYTES_PER_TOKEN = 2 * _LAYERS * _HIDDEN * 4
"""Of a prompt in the cache: keys and values of each layer, in float32."""
_CONSTANT_FEATURE = 4.0
"""The first feature of every embedding; no layer writes to it, so that the output layer can use
it as a bias, which llama does not have."""
_NEVER = -40.0

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    eos_token_id: int | None = None,
    has_chat_template: bool = True,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a model folder that mlx-lm loads; return it.

    Args:
        folder: created, with its parents.
        seed: of the weights; other seeds give other answers to the same prompt.
        eos_token_id: named as end-of-text in config.json; such an id may be generated.
        has_chat_template: whether messages can be rendered.
        config: entries that replace or extend config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    if eos_token_id is not None:
        settings["eos_token_id"] = eos_token_id
    _write_json(folder / "config.json", settings | (config or {}))
    write_tokenizer(folder, has_chat_template=has_chat_template)
    save_file(
        _weights(seed, eos_token_id),
        folder / "model.safetensors",
        metadata={"format": "mlx"},
    )
    return folder


def write_tokenizer(folder: Path, *, has_chat_template: bool = True) -> None:
    """Write the tokenizer's files alone, for a model of the same vocabulary."""
    vocabulary, merges = _vocabulary()
    _write_json(folder / "tokenizer.json", _tokenizer(vocabulary, merges))
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
    }
    if has_chat_template:
        tokenizer_config["chat_template"] = _CHAT_TEMPLATE
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def as_bfloat16(folder: Path) -> Path:
    """Make the weights of a model folder bfloat16; return the folder."""
    import mlx.core as mx

    path = str(folder / "model.safetensors")
    weights: Any = mx.load(path)
    halves = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.eval(halves)
    mx.save_safetensors(path, halves, {"format": "mlx"})
    return folder


def as_4_bit(folder: Path) -> Path:
    """Quantise a model folder to 4 bits in groups of 64; return the folder."""
    import mlx.core as mx

    path = str(folder / "model.safetensors")
    weights: Any = mx.load(path)
    packed: dict[str, Any] = {}
    for name, array in weights.items():
        if array.ndim != 2:
            packed[name] = array
            continue
        parts = mx.quantize(array, group_size=64, bits=4)
        names = ("weight", "scales", "biases")
        packed |= {name.replace("weight", part): a for part, a in zip(names, parts, strict=True)}
    mx.eval(packed)
    mx.save_safetensors(path, packed, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4}
    _write_json(folder / "config.json", config)
    return folder


def add_tokens(folder: Path, names: Sequence[str], *, is_special: bool) -> None:
    """Give the tokenizer of a tiny model its own tokens, in the place of its last entries.

    Args:
        folder: of the model.
        names: the last of them gets the last id.
        is_special: whether they are none of the text.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    first = VOCABULARY_SIZE - len(names)
    gone = {token for token, number in model["vocab"].items() if number >= first}
    model["vocab"] = {t: n for t, n in model["vocab"].items() if t not in gone}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in gone]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [
        {"id": first + place, "content": name, "special": is_special} | flags
        for place, name in enumerate(names)
    ]
    path.write_text(json.dumps(tokenizer))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each of the 256 bytes in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


@functools.cache
def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    tokens = _byte_alphabet()
    merges: list[list[str]] = []

    def merge(left: str, right: str) -> None:
        merges.append([left, right])
        tokens.append(left + right)

    space = tokens[ord(" ")]
    syllables = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
    for syllable in syllables:
        merge(syllable[0], syllable[1])
    for syllable in syllables:
        merge(space, syllable)
    pairs = [(left, right) for left in syllables for right in syllables]
    # A stride that shares no factor with the number of pairs visits them evenly.
    step = 1601
    index = 0
    while len(tokens) < VOCABULARY_SIZE:
        left, right = pairs[index]
        merge((space if len(tokens) % 2 else "") + left, right)
        index = (index + step) % len(pairs)
    return {token: number for number, token in enumerate(tokens)}, merges


def _tokenizer(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


# A process of tests makes a hundred of these models, most of them with the same weights.
@functools.lru_cache(maxsize=4)
def _weights(seed: int, eos_token_id: int | None) -> dict[str, np.ndarray[Any, Any]]:
    vocabulary, _ = _vocabulary()
    random = np.random.default_rng(seed)

    def normal(rows: int, columns: int, scale: float) -> np.ndarray[Any, Any]:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    embedding = normal(VOCABULARY_SIZE, _HIDDEN, 1.0)
    embedding[:, 0] = _CONSTANT_FEATURE
    head = normal(VOCABULARY_SIZE, _HIDDEN, 0.3)
    never = _unprintable()
    is_never = [token in never for token in vocabulary]
    head[:, 0] = np.where(is_never, _NEVER, 0.0)
    if eos_token_id is not None:
        head[eos_token_id, 0] = 0.0
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = normal(_HIDDEN, _HIDDEN, 0.15)
        weights[f"{prefix}mlp.gate_proj.weight"] = normal(_INTERMEDIATE, _HIDDEN, 0.12)
        weights[f"{prefix}mlp.up_proj.weight"] = normal(_INTERMEDIATE, _HIDDEN, 0.12)
        weights[f"{prefix}mlp.down_proj.weight"] = normal(_HIDDEN, _INTERMEDIATE, 0.12)
        weights[f"{prefix}self_attn.o_proj.weight"][0, :] = 0.0
        weights[f"{prefix}mlp.down_proj.weight"][0, :] = 0.0
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = np.ones(_HIDDEN, np.float32)
    return weights


def _unprintable() -> set[str]:
    """The single bytes that no answer may hold: all but space and small letters."""
    letters = {ord(" "), *range(ord("a"), ord("z") + 1)}
    return {token for byte, token in enumerate(_byte_alphabet()) if byte not in letters}
