"""Hugging Face caches and model folders for tests, made as huggingface_hub makes them."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "mlx-community/SmolLM2-135M-Instruct-4bit"


def safetensors(arrays: Mapping[str, int | tuple[int, ...]]) -> bytes:
    """A weight file of zeros: for each name an array of so many bytes, or of BF16 in a shape."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in arrays.items():
        dtype, dimensions, number_bytes = (
            ("U8", (shape,), 1) if isinstance(shape, int) else ("BF16", shape, 2)
        )
        begin, end = end, end + number_bytes * math.prod(dimensions)
        header[name] = {"dtype": dtype, "shape": dimensions, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 8, "tie_word_embeddings": True,
}  # fmt: skip
_LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
_NORMS = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
ARRAYS: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (8, 8),
    **{f"model.layers.0.{name}.weight": (8, 8) for name in _LAYER},
    **{f"model.{name}.weight": (8,) for name in _NORMS},
}

MODEL: Mapping[str, bytes] = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "model.safetensors": safetensors(ARRAYS),
}
"""No tokenizer reads it, so it cannot be served; mlx-lm is asked once how large its rows are."""


def index_of(*shards: str) -> bytes:
    """An index that has one array in each shard."""
    return json.dumps({"weight_map": {f"a{i}": name for i, name in enumerate(shards)}}).encode()


def write_folder(folder: Path, files: Mapping[str, bytes] = MODEL) -> Path:
    """A folder with these files."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_repository(
    cache: Path,
    repo: str = REPO,
    files: Mapping[str, bytes] = MODEL,
    *,
    commit: str = COMMIT,
    revision: str | None = "main",
) -> Path:
    """A repository in a cache; returns the folder of its snapshot.

    Args:
        cache: the folder of the cache.
        repo: OWNER/NAME.
        files: content by name.
        commit: of the snapshot.
        revision: the branch or tag that means this commit; None: none does.
    """
    folder = cache / f"models--{repo.replace('/', '--')}"
    blobs, snapshot = folder / "blobs", folder / "snapshots" / commit
    blobs.mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", blob.name))
    if revision is not None:
        reference = folder / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    return snapshot
