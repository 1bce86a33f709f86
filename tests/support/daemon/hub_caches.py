"""Hugging Face caches and model folders for tests, made as huggingface_hub makes them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "mlx-community/SmolLM2-135M-Instruct-4bit"


def safetensors(sizes: Mapping[str, int]) -> bytes:
    """A weight file with one array of bytes for each name."""
    header: dict[str, object] = {}
    end = 0
    for name, size in sizes.items():
        offsets = [end, end + size]
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}

MODEL: Mapping[str, bytes] = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": safetensors({"model.embed_tokens.weight": 64}),
}


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
