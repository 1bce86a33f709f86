"""Which engine a launch spec asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlxsup.protocol.launch import LaunchSpec

from ..engine import Engine, ModelFiles, NoDeviceError, Rank
from .fake.engine import FakeEngine, Reach, identify_fake


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
        BadLaunchError: the model is not one that ranks can share.
    """
    if spec.engine == "fake":
        return FakeEngine(spec, reach, rank)
    if rank is not None:
        spec, clock = _alike(spec), lambda: 0.0
    try:
        from .mlx.embedding import make_engine

        return make_engine(spec, clock, rank)
    except ImportError as error:
        raise NoDeviceError(f"MLX cannot be imported: {error}") from error


def identify(spec: LaunchSpec) -> ModelFiles:
    """Return what must be the same on every host of a group; nothing is imported for it.

    Raises:
        ModelMissingError, BadModelError: the files cannot be used.
    """
    if spec.engine == "fake":
        return identify_fake(spec)
    from .mlx.ranks import identify_folder

    return identify_folder(Path(spec.path))


def prepare(spec: LaunchSpec) -> None:
    """Import what a load needs: connecting the ranks holds the interpreter's lock until all of them
    are there, so none may begin while another one still imports.

    Raises:
        NoDeviceError: MLX cannot be imported.
    """
    if spec.engine == "fake":
        return
    try:
        from .mlx.imports import import_everything

        import_everything()
    except ImportError as error:
        raise NoDeviceError(f"MLX cannot be imported: {error}") from error


def _alike(spec: LaunchSpec) -> LaunchSpec:
    """Return the spec of a rank, none of whose decisions may follow from measured times or from the
    memory of its own host: all ranks must decide alike. For the same reason its clock stands
    still."""
    return replace(spec, deterministic=True, prefix_cache_bytes=0, drafts="off")
