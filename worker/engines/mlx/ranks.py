"""One model over several ranks: which files and sizes fit, each rank's share, and its tokens.

All ranks run the same passes in the same order; in each of them MLX exchanges what the layers of
one rank need of another's. A collective on a second stream would give silently wrong numbers, so
all of them run where the passes do.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mlxsup.protocol.group import LOAD_LIMIT_S
from mlxsup.protocol.model_files import is_tokenizer_file
from mlxsup.protocol.version import VERSION

from ...engine import BadLaunchError, BadModelError, ModelFiles, NoDeviceError, Rank
from .folder import NESTED, ModelFolder, check_folder
from .imports import naming_what_is_missing

if TYPE_CHECKING:
    import mlx.core as mx

SAMPLED_BLOCKS = 32
BLOCK_BYTES = 4096
"""Of each weight file, so that other weights of the same shape are noticed; all of it would take as
long to read as the load."""

SPLIT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""What `tensor` divides among the ranks."""


def identify_folder(path: Path) -> ModelFiles:
    """Return what must be the same on every host; MLX is not imported.

    Raises:
        ModelMissingError, BadModelError: the files cannot be used.
        NoDeviceError: a library is missing.
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
    try:
        libraries = {name: version(name) for name in ("mlx", "mlx-lm")}
    except PackageNotFoundError as error:
        raise NoDeviceError(
            f"{sys.executable} has no {error.name}; install the same on every host"
        ) from None
    return ModelFiles(
        fingerprint=digest.hexdigest(),
        versions={"mlxsup": VERSION, **libraries},
        weight_bytes=sum(shard.stat().st_size for shard in folder.shards),
    )


def _add_samples(digest: Any, path: Path) -> None:
    """Add the first block of a file, its last one, and some between them."""
    size = path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        for number in range(SAMPLED_BLOCKS):
            file.seek(max(size - BLOCK_BYTES, 0) * number // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))


def choose_backend(parallel: str) -> str:
    """Return how the ranks connect: through NCCL, if this MLX has it (its build for CUDA), and
    unless they are a pipeline, because MLX's NCCL hands nothing from one rank to the next."""
    import mlx.core as mx

    has_nccl = parallel != "pipeline" and mx.distributed.is_available("nccl")
    return "nccl" if has_nccl else "ring"


def join(rank: Rank) -> mx.distributed.Group:
    """Connect to the other ranks, and return the group; end the process if that takes too long.

    Raises:
        NoDeviceError: this MLX lacks the backend.
        RuntimeError: another rank is gone, or an address is taken.
    """
    import mlx.core as mx

    if rank.size == 1:
        return mx.distributed.init()  # the ring refuses a single rank
    if not mx.distributed.is_available(rank.backend):
        raise NoDeviceError(
            f"this build of MLX has no {rank.backend}, with which it should connect to the first"
            " host; install the same build on all of them"
        )
    # MLX waits for ever for a rank that is lost meanwhile, and holds the interpreter's lock, so
    # that no thread here runs that would notice.
    faulthandler.dump_traceback_later(LOAD_LIMIT_S, exit=True)
    try:
        return _join_nccl(rank) if rank.backend == "nccl" else _join_ring(rank)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _join_ring(rank: Rank) -> mx.distributed.Group:
    import mlx.core as mx

    # MLX asks for a file. A pipe needs no disk, and a rank that is killed here leaves none behind.
    hosts, written = os.pipe()
    with open(hosts), open(written, "w") as file:
        json.dump([[address] for address in rank.addresses], file)
        file.close()
        os.environ |= {"MLX_HOSTFILE": f"/dev/fd/{hosts}", "MLX_RANK": str(rank.number)}
        return mx.distributed.init(strict=True, backend="ring")


def _join_nccl(rank: Rank) -> mx.distributed.Group:
    import mlx.core as mx

    meeting, _, port = rank.addresses[0].rpartition(":")
    os.environ |= {
        "MLX_RANK": str(rank.number),
        "MLX_WORLD_SIZE": str(rank.size),
        "NCCL_HOST_IP": meeting,
        "NCCL_PORT": port,
    }
    # MLX makes a graph of its own for each sum, which costs more than graphs save. Without them two
    # H200 answer 16 streams 1.3 times as fast, and read a long prompt in a third of the time.
    os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
    own, _, _ = rank.addresses[rank.number].rpartition(":")
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses):
            # Unasked, NCCL never takes the loopback, nor the private link before others.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    return mx.distributed.init(strict=True, backend="nccl")


def take_share(
    model: Any, folder: ModelFolder, group: mx.distributed.Group, *, parallel: str, backend: str
) -> str:
    """Leave a rank's share of a model whose arrays were not read yet; return how it is divided.

    Args:
        model: whole.
        folder: named in errors.
        group: the ranks.
        parallel: `tensor`, `pipeline`, or `auto` for the first of `pipeline` and `tensor` that the
            type of the model can do: pipelines hand on less, so less can go wrong.
        backend: of the group; through `nccl` only `tensor` is possible.

    Raises:
        BadModelError: models of its type cannot be shared in this way.
        BadLaunchError: so many ranks cannot divide its sizes.
    """
    ways = {
        "pipeline": getattr(getattr(model, "model", None), "pipeline", None),
        "tensor": getattr(model, "shard", None),
    }
    possible = {way: share for way, share in ways.items() if share is not None}
    config = folder.path / "config.json"
    model_type = folder.config["model_type"]
    if not possible:
        raise BadModelError(
            f"{config}: models of type {model_type} cannot be divided; remove hosts from its entry"
        )
    first = next(iter(possible))
    way = parallel
    if parallel == "auto":
        way = "tensor" if backend == "nccl" else first
    if way not in possible:
        raise BadModelError(
            f"{config}: models of type {model_type} cannot be divided by {way}; set"
            f' parallel = "{first}"'
        )
    if way == "tensor":
        other = ', or parallel = "pipeline"' if "pipeline" in possible else ""
        for name, size in _split_sizes(folder.config):
            if size % group.size():
                raise BadLaunchError(
                    f"{config}: {name} is {size}, which {group.size()} hosts cannot divide;"
                    f" use another number of hosts{other}"
                )
    try:
        possible[way](group)
    except ValueError as error:
        raise BadLaunchError(f"{config}: {error}; use another number of hosts") from error
    return way


@dataclass(frozen=True)
class _Played:
    """The group of one rank, with what models ask of it when they are divided."""

    ranks: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.ranks


def try_share(path: Path, *, parallel: str, size: int) -> None:
    """Raise what `take_share` would for the model in a folder; no weight is read.

    Args:
        path: of the folder.
        parallel: see `take_share`.
        size: how many ranks there are.
    """
    with naming_what_is_missing():
        import mlx.core as mx
    from .loader import load_lazily

    if not mx.metal.is_available():
        mx.set_default_device(mx.cpu)  # a context of CUDA takes half a GiB of the GPU
    folder = check_folder(path, lambda share: None)
    model, _ = load_lazily(folder)
    group: Any = _Played(size)
    take_share(model, folder, group, parallel=parallel, backend=choose_backend(parallel))


def _split_sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the name and value of each size that `tensor` divides."""
    for place in ("", *NESTED):
        sizes = config.get(place, {}) if place else config
        for name in SPLIT_SIZES if isinstance(sizes, dict) else ():
            if isinstance(size := sizes.get(name), int):
                yield name, size


def first_rank_tokens(tokens: mx.array, group: mx.distributed.Group) -> mx.array:
    """Return the tokens that rank 0 has drawn (rows,): unlike chips may round logits otherwise, and
    only rank 0 knows the grammars."""
    import mlx.core as mx

    own = tokens if group.rank() == 0 else mx.zeros_like(tokens)
    return mx.distributed.all_sum(own, group=group)
