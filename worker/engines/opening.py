"""Which engine a launch spec asks for."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.pooling import Pooling, find_pooling
from mlxsup.protocol.regular_file import MIB, read_regular

from ..engine import BadLaunchError, Engine, ModelFiles, NoDeviceError, Rank
from .fake.engine import FakeEngine, Reach, identify_fake

SHOWN_GPUS = "CUDA_VISIBLE_DEVICES"


def open_engine(
    spec: LaunchSpec,
    clock: Callable[[], float],
    *,
    reach: Reach | None = None,
    rank: Rank | None = None,
) -> Engine:
    """Return the engine of a process, not loaded yet.

    Args:
        spec: of the process.
        clock: seconds that it has worked.
        reach: for the faults of the fake engine.
        rank: its place in a group; None: it serves the model alone.

    Raises:
        NoDeviceError: MLX cannot be imported.
        BadLaunchError: the model is not one that ranks can share, or that has adapters.
    """
    if spec.engine == "fake":
        return FakeEngine(spec, reach, rank)
    if rank is not None:
        spec, clock = _alike(spec), lambda: 0.0
    pooling = _find_pooling(spec)
    for name, is_asked in (("adapters", bool(spec.adapters)), ("hosts", rank is not None)):
        if pooling is not None and is_asked:
            raise BadLaunchError(f"{name} need a model that answers with text, not with vectors")
    if rank is not None and spec.adapters:
        raise BadLaunchError("adapters must be left out of a model with hosts")
    try:
        from .mlx.embedding import EmbeddingEngine
        from .mlx.engine import MlxEngine
    except ImportError as error:
        raise NoDeviceError(f"MLX cannot be imported: {error}") from error
    if pooling is not None:
        return EmbeddingEngine(spec, pooling)
    return MlxEngine(spec, clock, rank)


def _find_pooling(spec: LaunchSpec) -> Pooling | None:
    """Return how the model pools, as its folder says; None if it answers with text."""
    folder = Path(spec.path)
    try:
        config = json.loads(read_regular(folder / "config.json", 16 * MIB))
        return find_pooling(folder, config, spec.pooling) if isinstance(config, dict) else None
    except (OSError, ValueError, RecursionError):
        return None  # the load says what is wrong with the folder


def identify(spec: LaunchSpec) -> ModelFiles:
    """Return what must be the same on every host of a group; nothing is imported for it.

    Raises:
        ModelMissingError, BadModelError: the files cannot be used.
        NoDeviceError: a library is missing.
    """
    if spec.engine == "fake":
        return identify_fake(spec)
    from .mlx.ranks import identify_folder

    return identify_folder(Path(spec.path))


def free_address(host: str) -> str:
    """Return an address of this host, `ip:port`, on which nothing listens now.

    Raises:
        BadLaunchError: the host has no such address.
    """
    try:
        with socket.create_server((host, 0)) as listening:
            return f"{host}:{listening.getsockname()[1]}"
    except OSError:  # or a name that is not known there
        raise BadLaunchError(f"address must be one of this host's own, not {host}") from None


def prepare(spec: LaunchSpec, *, gpu: int) -> None:
    """Import what a load needs: connecting the ranks holds the interpreter's lock until all of them
    are there, so none may begin while another one still imports.

    Args:
        spec: of the process.
        gpu: the place of the one that it takes among those that CUDA shows it.

    Raises:
        NoDeviceError: MLX cannot be imported, or CUDA shows too few GPUs.
    """
    if spec.engine == "fake":
        return
    # CUDA looks at it once, when it is first used. Others ignore it.
    shown = [name for name in os.environ.get(SHOWN_GPUS, "").split(",") if name]
    if shown and gpu >= len(shown):
        raise NoDeviceError(
            f"{SHOWN_GPUS} names {len(shown)} of this machine's GPUs, but {gpu + 1} of its"
            " processes serve the model, and each needs one"
        )
    os.environ[SHOWN_GPUS] = shown[gpu] if shown else str(gpu)
    try:
        from .mlx.imports import import_everything

        import_everything()
    except ImportError as error:
        raise NoDeviceError(f"MLX cannot be imported: {error}") from error


def choose_backend(spec: LaunchSpec) -> str:
    """Return how the ranks of a group connect, `ring` or `nccl`; ask after `prepare`."""
    if spec.engine == "fake":
        return "ring"
    from .mlx.ranks import choose_backend as choose

    return choose(spec.parallel)


def try_division(spec: LaunchSpec, size: int) -> None:
    """Divide a model among so many ranks, without its weights.

    Raises:
        ModelMissingError, BadModelError, BadLaunchError, NoDeviceError: as `Engine.load` would.
    """
    if spec.engine == "fake" or size == 1:
        return
    from .mlx.ranks import try_share

    try_share(Path(spec.path), parallel=spec.parallel, size=size)


def _alike(spec: LaunchSpec) -> LaunchSpec:
    """Return the spec of a rank, none of whose decisions may follow from measured times or from the
    memory of its own host: all ranks must decide alike. For the same reason its clock stands
    still."""
    return replace(spec, deterministic=True, prefix_cache_bytes=0, drafts="off")
