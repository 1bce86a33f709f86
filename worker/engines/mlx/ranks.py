"""One model over several ranks: which files and sizes fit, each rank's share, and its tokens.

All ranks run the same passes in the same order; in each of them MLX exchanges what the layers of
one rank need of another's. A collective on a second stream would give silently wrong numbers, so
all of them run where the passes do.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.model_files import is_tokenizer_file

from ...engine import BadLaunchError, BadModelError, NoDeviceError, Rank
from .folder import NESTED, ModelFolder, check_folder

if TYPE_CHECKING:
    import mlx.core as mx

SAMPLED_BLOCKS = 32
BLOCK_BYTES = 4096
"""Of each weight file, so that other weights of the same shape are noticed; all of it would take as
long to read as the load."""

SPLIT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""What `tensor` divides among the ranks."""


def identify_folder(path: Path) -> tuple[str, dict[str, str]]:
    """Return what must be the same on every host: a fingerprint of the files, and the versions of
    the libraries; MLX is not imported.

    Raises:
        ModelMissingError, BadModelError: the files cannot be used.
    """
    folder = check_folder(path, lambda share: None)
    digest = hashlib.sha256()
    for name in sorted(os.listdir(folder.path)):
        if is_tokenizer_file(name) and (folder.path / name).is_file():
            content = hashlib.sha256((folder.path / name).read_bytes()).hexdigest()
            digest.update(f"{name} {content}\n".encode())
    for shard in folder.shards:
        digest.update(f"{shard.name} {shard.stat().st_size}\n".encode())
        _add_samples(digest, shard)
    return digest.hexdigest(), {name: version(name) for name in ("mlx", "mlx-lm")}


def _add_samples(digest: Any, path: Path) -> None:
    """Add the first block of a file, its last one, and some between them."""
    size = path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        for number in range(SAMPLED_BLOCKS):
            file.seek(max(size - BLOCK_BYTES, 0) * number // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))


def check_split(folder: ModelFolder, rank: Rank, parallel: str) -> None:
    """Raise if the sizes of a model cannot be divided among the ranks.

    Raises:
        BadLaunchError: names the file and the size.
    """
    if parallel != "tensor":
        return
    config: Mapping[str, Any] = folder.config
    for place in ("", *NESTED):
        sizes = config.get(place, {}) if place else config
        for name in SPLIT_SIZES if isinstance(sizes, dict) else ():
            size = sizes.get(name)
            if isinstance(size, int) and size % rank.size:
                raise BadLaunchError(
                    f"{folder.path / 'config.json'}: {name} is {size}, which {rank.size} hosts"
                    ' cannot divide; use another number of hosts, or parallel = "pipeline"'
                )


def join(rank: Rank) -> mx.distributed.Group:
    """Connect to the other ranks, and return the group.

    Raises:
        NoDeviceError: this MLX has no ring.
        RuntimeError: another rank is gone, or an address is taken.
    """
    import mlx.core as mx

    if not mx.distributed.is_available("ring"):
        raise NoDeviceError("this build of MLX cannot connect hosts: it has no ring backend")
    with tempfile.TemporaryDirectory(prefix="mlxsup-") as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[address] for address in rank.addresses]))
        os.environ |= {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank.number)}
        return mx.distributed.init(strict=True, backend="ring")


def take_share(model: Any, folder: ModelFolder, group: mx.distributed.Group, parallel: str) -> None:
    """Leave a rank's share of a model whose arrays were not read yet.

    Raises:
        BadModelError: models of its type cannot be shared in this way.
    """
    ways = {
        "tensor": getattr(model, "shard", None),
        "pipeline": getattr(getattr(model, "model", None), "pipeline", None),
    }
    share = ways[parallel]
    if share is None:
        others = [way for way, other in ways.items() if other is not None]
        hint = f'set parallel = "{others[0]}"' if others else "remove hosts from its entry"
        raise BadModelError(
            f"{folder.path / 'config.json'}: models of type {folder.config['model_type']} cannot"
            f" be divided by {parallel}; {hint}"
        )
    share(group)


def first_rank_tokens(tokens: mx.array, group: mx.distributed.Group) -> mx.array:
    """Return the tokens that rank 0 has drawn (rows,): unlike chips may round logits otherwise, and
    only rank 0 knows the grammars."""
    import mlx.core as mx

    own = tokens if group.rank() == 0 else mx.zeros_like(tokens)
    return mx.distributed.all_sum(own, group=group)
