"""The memory that a model of the configuration needs, and what is wrong if it cannot have it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.context_length import limited_context_length
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.tasks import Task
from mlxsup.store.model_folder import FolderProblem

from ..config.load import ConfigError, DaemonConfig
from ..core.budget import Budget, Figure, Need, Source, pins_problem
from ..core.settings import ModelSettings
from .folder import UNASKED, Estimate, Stamp, fingerprint, read_folder
from .machine import NoDeviceMemoryError, command_budget, find_backend
from .measurements import Measured, Measurements

if TYPE_CHECKING:
    from mlxsup.protocol.worker_messages import Ready

MIB = 2**20

FIRST_GUESS_BYTES = {"cpu": 256 * MIB, "metal": 256 * MIB, "cuda": 768 * MIB}
"""Bytes that a process takes besides its arrays, before anything was measured: on a CPU the
interpreter, the libraries and a tokenizer; with CUDA what the driver keeps for it on the device."""

LEAST_TOKENS = 4096
"""Memory is reserved for one row of this many tokens, unless the entry sets `context_length`: the
whole context of a model may take more than its weights, and few requests come near it."""

FAKE_PROCESS_BYTES = 64 * MIB
FAKE_CONTEXT_LENGTH = 4096


def need_of(
    launch: LaunchSettings,
    estimate: Estimate | None,
    measurements: Measurements,
    backend: str,
    draft: Estimate | None = None,
) -> Need:
    """Return what a model needs: measured if a worker has run, or else estimated.

    Args:
        launch: what its worker is started with.
        estimate: what its folder says; None for the fake engine, which has no folder.
        measurements: what is remembered.
        backend: that MLX uses here: `cpu`, `cuda` or `metal`.
        draft: what the folder of its draft model says; None: it has none, or a load will say what
            is wrong with it.
    """
    if estimate is None:
        return _need_of_fake(launch)
    context = limited_context_length(estimate.context_length, launch.context_length)
    place = measured_place(launch)
    measured = measurements.find(place, backend, estimate.fingerprint)
    layers, layers_source, remark = estimate.layers, Source.ESTIMATED, estimate.remark
    estimated_bytes = estimate.weight_bytes + estimate.adapter_bytes
    if hosts := len(launch.hosts):
        # An equal share, also of the caches: of their heads or of the layers. A latent that each
        # host of `tensor` keeps whole is measured at the first load.
        estimated_bytes = -(-estimated_bytes // hosts)
        layers = tuple(replace(one, layers=-(-one.layers // hosts)) for one in layers)
    elif draft is not None:
        estimated_bytes += draft.weight_bytes
        layers += draft.layers
        remark = remark or draft.remark
    weights = Figure(size_bytes=estimated_bytes, source=Source.ESTIMATED)
    task = estimate.task
    if launch.pooling and task is Task.GENERATE:
        task = Task.EMBED
    if measured is not None and measured.weight_bytes is not None:
        weights = Figure(size_bytes=measured.weight_bytes, source=Source.MEASURED)
        if measured.layers:
            layers, layers_source, remark = measured.layers, Source.MEASURED, ""
    own_bytes, own_source = measured.own_bytes if measured else None, Source.MEASURED
    if own_bytes is None:
        own_bytes, own_source = measurements.largest_own_bytes(backend), Source.ESTIMATED
    if own_bytes is None:
        own_bytes = FIRST_GUESS_BYTES[backend]
    return Need(
        weights=weights,
        own=Figure(size_bytes=own_bytes, source=own_source),
        layers=layers,
        layers_source=layers_source,
        remark=remark,
        context_tokens=context,
        least_tokens=context if launch.context_length else min(context, LEAST_TOKENS),
        max_rows=launch.max_concurrency,
        task=task,
        takes_pictures=estimate.takes_pictures and not launch.adapters,
        given_bytes=launch.memory_limit_bytes,
        raised_bytes=measured.raised_bytes if measured is not None else 0,
    )


def _need_of_fake(launch: LaunchSettings) -> Need:
    """Return the need of the fake engine: no weights, and rows as its options say."""
    declared = launch.fake.get("context_length", FAKE_CONTEXT_LENGTH)
    asked = launch.context_length or declared
    context = min(asked, declared) if type(declared) is int else FAKE_CONTEXT_LENGTH
    token_bytes = launch.fake.get("token_bytes", 0)
    is_size = type(token_bytes) is int and token_bytes > 0
    layers = (CacheLayers(layers=1, token_bytes=token_bytes),) if is_size else ()
    task = launch.fake.get("task")
    return Need(
        weights=Figure(size_bytes=0, source=Source.MEASURED),
        own=Figure(size_bytes=FAKE_PROCESS_BYTES, source=Source.GIVEN),
        layers=layers,
        layers_source=Source.MEASURED,
        context_tokens=context,
        least_tokens=context,
        max_rows=launch.max_concurrency,
        task=Task(task) if task in list(Task) else Task.GENERATE,
        takes_pictures=launch.fake.get("takes_pictures") is True,
        given_bytes=launch.memory_limit_bytes,
    )


def measured_place(launch: LaunchSettings) -> str:
    """Return the folder under which measurements of a model are kept, and, for a share of one, how
    it is divided."""
    if launch.draft_folder and not launch.hosts:
        return f"{launch.path} (drafts of {launch.draft_folder})"
    if not launch.hosts:
        return launch.path
    return f"{launch.path} ({launch.parallel} on {len(launch.hosts)} hosts)"


def measured_by(launch: LaunchSettings, ready: Ready, loaded: Stamp | None) -> Measured | None:
    """Return what a worker's READY says about its model; None if that is not worth remembering.

    Args:
        launch: what the worker was started with.
        ready: its message.
        loaded: the files that it has loaded; None: not known, as for the fake engine.
    """
    if loaded is None or ready.active_bytes == 0:
        return None
    return Measured(
        path=measured_place(launch),
        backend=ready.backend,
        fingerprint=fingerprint(loaded),
        weight_bytes=ready.active_bytes,
        own_bytes=ready.own_bytes,
        layers=tuple(ready.cache_layers),
    )


def check_needs(
    config: DaemonConfig, needs: Mapping[ModelName, Need], budget: Budget | None
) -> None:
    """Check that each model can do with its `memory`, and that the pinned ones fit together.

    Args:
        config: with the models.
        needs: of those models whose folders can be read.
        budget: what all of them may take; None: it is not known.

    Raises:
        ConfigError: names everything that is wrong.
    """
    problems = []
    for name, need in needs.items():
        too_little = need.known_problem(is_measured_again=True)
        if too_little:
            problems.append(f"models.{name}.memory is not enough: {too_little}")
    pinned = {
        model.name: needs[model.name].unraised_bytes
        for model in config.models
        if model.pinned and model.name in needs
    }
    pins = pins_problem(pinned, budget.size_bytes) if budget else ""
    if pins:
        problems.append(pins)
    if problems:
        where = f"{config.config_path}: " if config.config_path else ""
        raise ConfigError([where + problem for problem in problems])


def needs_without_daemon(
    models: Sequence[ModelSettings],
    backend: str,
    measurements: Measurements,
    asking: Callable[[int], None] = lambda count: None,
) -> dict[ModelName, Need | FolderProblem]:
    """Return what models need, for a command: it reads their folders itself.

    Args:
        models: of one configuration.
        backend: that MLX uses.
        measurements: what its runtime folder remembers.
        asking: see `estimate_folders`.
    """
    launches = [model.launch for model in models if model.launch.engine != "fake"]
    folders: dict[str, Collection[str]] = {
        one.draft_folder: () for one in launches if one.draft_folder
    }
    folders |= {one.path: one.adapters.values() for one in launches}
    found = estimate_folders(folders, asking)
    needs: dict[ModelName, Need | FolderProblem] = {}
    for model in models:
        estimate = None if model.launch.engine == "fake" else found[model.launch.path]
        draft = found.get(model.launch.draft_folder)
        needs[model.name] = (
            estimate
            if isinstance(estimate, FolderProblem)
            else need_of(
                model.launch,
                estimate,
                measurements,
                backend,
                draft if isinstance(draft, Estimate) else None,
            )
        )
    return needs


def estimate_folders(
    adapters: Mapping[str, Collection[str]], asking: Callable[[int], None] = lambda count: None
) -> dict[str, Estimate | FolderProblem]:
    """Return what is known of folders, for a command: it reads them itself.

    Args:
        adapters: the folders of the adapters of each model folder.
        asking: called with the number of models before mlx-lm is asked, which takes seconds.
    """
    found = {path: read_folder(Path(path), [*own]) for path, own in adapters.items()}
    unasked = {
        path: one
        for path, one in found.items()
        if isinstance(one, Estimate) and one.remark == UNASKED
    }
    if unasked:
        import asyncio  # most commands need not wait for the two

        from .estimates import ask_engine

        asking(len(unasked))
        said = asyncio.run(ask_engine({path: one.key for path, one in unasked.items()}))
        found |= {path: one.as_said(said[path]) for path, one in unasked.items()}
    return found


def check_memory(config: DaemonConfig) -> None:
    """Check the same without a daemon, by what the runtime folder remembers of the models.

    Raises:
        ConfigError: as `check_needs`.
    """
    backend = find_backend()
    found = needs_without_daemon(config.models, backend, Measurements(config.runtime_dir))
    # A load of the others will fail, and say why.
    needs = {name: need for name, need in found.items() if isinstance(need, Need)}
    try:
        budget = command_budget(config.memory_budget, backend, config.runtime_dir)
    except NoDeviceMemoryError:
        budget = None
    check_needs(config, needs, budget)
