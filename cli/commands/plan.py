"""`mlxsup plan`: what fits into the memory of this machine, without a daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.folders import DEFAULT_RUNTIME_DIR, absolute
from mlxsup.protocol.ids import ModelName

from ..connection import config_option, output_options
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output, width_of

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig
    from mlxsup.supervisor.core.memory.budget import Budget
    from mlxsup.supervisor.core.memory.change import Change
    from mlxsup.supervisor.core.memory.need import Figure, Need
    from mlxsup.supervisor.core.memory.plan import Candidate, Placement
    from mlxsup.supervisor.core.settings import ModelSettings
    from mlxsup.supervisor.memory.estimator import MemoryEstimator


@click.command()
@config_option
@output_options
def plan(config_path: Path | None, output: Output) -> None:
    """Example: mlxsup plan --config mlxsup.toml

    Shows what each model of the configuration needs, which of them fit into memory together and
    with how much context, and the change that makes all of them fit. Needs no daemon.
    """
    from ..terminal.plan_table import head_lines, plan_lines
    from .start import find_configuration, read_configuration

    path = find_configuration(config_path)
    # Reading and checking it takes longer than a command may be silent.
    if os.path.exists(path) and not output.is_json:
        output.data("\n".join(head_lines(path)))
    value = plan_of(read_configuration(path), output)
    if output.is_json:
        output.object(value)
    else:
        output.show(*plan_lines(value, width_of(sys.stdout)))


def plan_of(configuration: DaemonConfig, output: Output | None = None) -> dict[str, Any]:
    """The plan as `--json` prints it.

    Raises:
        CliError: nobody says how much memory there is.
    """
    return _plan_of(
        configuration.models,
        runtime_dir=configuration.runtime_dir,
        memory_budget=configuration.memory_budget,
        swap=configuration.core.swap,
        output=output,
    )


def plan_of_folders(folders: Mapping[str, Path], output: Output | None = None) -> dict[str, Any]:
    """The plan of folders by name, as for a file that says nothing else.

    No such file is made and checked: that takes longer than a command may take to begin.

    Raises:
        CliError: nobody says how much memory there is.
    """
    from mlxsup.protocol.launch import LaunchSettings
    from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

    here = Path.cwd()
    models = [
        ModelSettings(
            name=ModelName(name), launch=LaunchSettings(path=str(absolute(str(folder), here)))
        )
        for name, folder in folders.items()
    ]
    runtime_dir = absolute(DEFAULT_RUNTIME_DIR, here)
    swap = CoreSettings().swap
    return _plan_of(models, runtime_dir=runtime_dir, memory_budget=None, swap=swap, output=output)


def _plan_of(
    models: Sequence[ModelSettings],
    *,
    runtime_dir: Path,
    memory_budget: int | None,
    swap: bool,
    output: Output | None,
) -> dict[str, Any]:
    from mlxsup.supervisor.core.memory.plan import Candidate, make_plan
    from mlxsup.supervisor.core.memory.raising import bounded
    from mlxsup.supervisor.memory.estimator import MemoryEstimator
    from mlxsup.supervisor.memory.machine import find_backend
    from mlxsup.supervisor.memory.measurements import Measurements

    backend = find_backend()
    budget = _find_budget(memory_budget, backend, runtime_dir)
    measurements = Measurements(runtime_dir)
    appraised, problems = _needs_of(models, MemoryEstimator(backend, measurements), output)
    pinned = [model.name for model in models if model.pinned]
    bounds = bounded(appraised, pinned, budget.size_bytes)
    candidates = [
        Candidate(
            model=model.name,
            need=bounds[model.name],
            is_resident=model.preload,
            is_pinned=model.pinned,
        )
        for model in models
        if model.name in bounds
    ]
    made = make_plan(candidates, budget.size_bytes)
    change = None if made.fits else _find_change(candidates, budget)
    placements = {place.model: place for place in made.placements}
    needs = {one.model: one for one in candidates}
    return {
        "backend": backend,
        "budget": {
            "bytes": budget.size_bytes,
            "machine_bytes": budget.machine_bytes,
            "reason": budget.reason,
        },
        "needed_bytes": made.reserved_bytes,
        "fits": made.fits and not problems,
        "swap": swap,
        "change": None if change is None else str(change),
        "measurements": measurements.problem or None,
        "models": [
            {"name": model.name, "preload": model.preload, "problem": problems[model.name]}
            if model.name in problems
            else _row(needs[model.name].need, placements[model.name], is_resident=model.preload)
            for model in models
        ],
    }


def _find_change(candidates: Sequence[Candidate], budget: Budget) -> Change | None:
    from mlxsup.supervisor.core.memory.change import find_change

    return find_change(candidates, budget)


def _needs_of(
    models: Sequence[ModelSettings], estimator: MemoryEstimator, output: Output | None
) -> tuple[dict[ModelName, Need], dict[ModelName, str]]:
    """Return the needs of the models, and the problems of those that have none."""
    from mlxsup.supervisor.core.memory.given import known_problem
    from mlxsup.supervisor.memory.estimates import estimate_folders
    from mlxsup.supervisor.memory.folder import FolderError

    def asking(count: int) -> None:
        """Say why the next seconds are silent; they come once for each model."""
        if output is not None and sys.stderr.isatty():
            output.note(f"asking mlx-lm how much memory {count} models take")

    paths = [model.launch.path for model in models if model.launch.engine != "fake"]
    found = estimate_folders(paths, asking)
    needs: dict[ModelName, Need] = {}
    problems: dict[ModelName, str] = {}
    for model in models:
        estimate = None if model.launch.engine == "fake" else found[model.launch.path]
        if isinstance(estimate, FolderError):
            problems[model.name] = str(estimate)
            continue
        need = estimator.need_of(model.launch, estimate)
        too_little = known_problem(need)
        if too_little:
            problems[model.name] = too_little
        else:
            needs[model.name] = need
    return needs, problems


def _find_budget(memory_budget: int | None, backend: str, runtime_dir: Path) -> Budget:
    from mlxsup.supervisor.memory.machine import NoDeviceMemoryError, command_budget

    try:
        return command_budget(memory_budget, backend, runtime_dir)
    except NoDeviceMemoryError as error:
        raise CliError(
            str(error),
            code="no_budget",
            hint='set memory_budget = "…GiB" in [supervisor]',
            status=ExitStatus.FAILED,
        ) from None


def _row(need: Need, place: Placement, *, is_resident: bool) -> dict[str, Any]:
    return {
        "name": place.model,
        "preload": is_resident,
        "problem": None,
        "needed": {
            "bytes": need.needed_bytes,
            "source": _source(need),
        },
        "weights": _figure(need.weights),
        "process": _figure(need.own),
        "cache": {
            "bytes": max(0, need.unraised_bytes - need.fixed_bytes),
            "tokens": need.least_tokens,
            "source": str(need.layers_source),
        },
        "raised_bytes": need.raise_for(0),
        "wanted_bytes": need.wanted_bytes,
        "is_loaded": place.is_placed,
        "goes": list(place.goes),
        "missing_bytes": place.missing_bytes,
        "memory_bytes": place.memory_bytes,
        "context_tokens": place.context_tokens,
        "context_length": need.context_tokens,
        "rows": place.rows,
        "max_concurrency": need.max_rows,
        "remark": need.remark or None,
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {"bytes": figure.size_bytes, "source": str(figure.source)}


def _source(need: Need) -> str:
    if need.given_bytes is not None:
        return "given"
    return "measured" if need.is_measured else "estimated"
