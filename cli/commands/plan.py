"""`mlxsup plan`: what fits into the memory of this machine, without a daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.folders import DEFAULT_RUNTIME_DIR, absolute
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import rank_name

from ..arguments import complete_model_or_repository
from ..connection import config_option, output_options
from ..exit_status import CliError
from ..terminal.output import Line, Output, width_of
from ..terminal.tables import Column, table, text_lines
from ..terminal.text import INDENT, format_bytes, wrapped

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig
    from mlxsup.supervisor.core.budget import Budget, Figure, Need
    from mlxsup.supervisor.core.settings import ModelSettings
    from mlxsup.supervisor.memory.measurements import Measurements
    from mlxsup.supervisor.memory.placement import Candidate, Placement


@click.command()
@click.argument("model", required=False, shell_complete=complete_model_or_repository)
@config_option
@output_options
def plan(model: str | None, config_path: Path | None, output: Output) -> None:
    """Example: mlxsup plan --config mlxsup.toml

    Shows how much memory each configured model needs, which models fit together and with how much
    context, and what to change so that all of them fit. With MODEL, shows the same of one alone: a
    configured name, OWNER/NAME or a folder. No daemon is needed.
    """
    from ..configuration import find_configuration, optional_configuration, read_configuration

    if model is not None:
        from ..catalogue import find_row

        configuration = optional_configuration(config_path)
        row = find_row(model, configuration)
        value = plan_of_row(row, configuration, output)
        output.result(value, plan_lines(value, width_of(sys.stdout)))
        return
    path = find_configuration(config_path)
    # Reading and checking it takes longer than a command may be silent.
    if os.path.exists(path) and not output.is_json:
        lines = wrapped(f"configuration: {path}", width_of(sys.stdout))
        output.data("\n".join([*lines, ""]))
    value = plan_of(read_configuration(path), output)
    if output.is_json:
        output.object(value)
    else:
        output.show(plan_lines(value, width_of(sys.stdout)))


def plan_of(configuration: DaemonConfig, output: Output | None = None) -> dict[str, Any]:
    """Return the plan as `--json` prints it; refuse if the size of the memory is unknown."""
    budget, swap = configuration.memory_budget, configuration.core.swap
    return _plan_of(configuration.models, configuration.runtime_dir, budget, swap, output)


def plan_of_row(
    row: Mapping[str, Any], configuration: DaemonConfig | None, output: Output | None = None
) -> dict[str, Any]:
    """Return the plan of one model alone, as `mlxsup models` lists it."""
    if configuration is not None and row["name"]:
        alone = tuple(one for one in configuration.models if one.name == row["name"])
        return plan_of(replace(configuration, models=alone), output)
    return plan_of_folders({row["title"]: Path(row["path"])}, output)


def plan_of_folders(folders: Mapping[str, Path], output: Output | None = None) -> dict[str, Any]:
    """Return the plan of folders by name, as for a file that says nothing else.

    No such file is made and checked: that takes longer than a command may take to begin.
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
    return _plan_of(models, runtime_dir, None, CoreSettings().swap, output)


def _plan_of(
    models: Sequence[ModelSettings],
    runtime_dir: Path,
    memory_budget: int | None,
    swap: bool,
    output: Output | None,
) -> dict[str, Any]:
    from mlxsup.supervisor.core.budget import bounded
    from mlxsup.supervisor.memory.machine import find_backend
    from mlxsup.supervisor.memory.measurements import Measurements
    from mlxsup.supervisor.memory.placement import Candidate, fit

    backend = find_backend()
    budget = _find_budget(memory_budget, backend, runtime_dir)
    measurements = Measurements(runtime_dir)
    appraised, problems = _needs_of(models, backend, measurements, output)
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
    made = fit(candidates, budget)
    ranks = _ranks(models, bounds)
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
        "fits": made.is_complete
        and not problems
        and all(one["fits"] for found in ranks.values() for one in found),
        "swap": swap,
        "change": None if made.is_complete else advice(candidates, budget),
        "measurements": measurements.problem or None,
        "models": [
            {"name": model.name, "preload": model.preload, "problem": problems[model.name]}
            if model.name in problems
            else {
                **_row(needs[model.name].need, placements[model.name], is_resident=model.preload),
                "hosts": ranks.get(model.name, []),
            }
            for model in models
        ],
    }


def _ranks(
    models: Sequence[ModelSettings], needs: Mapping[ModelName, Need]
) -> dict[str, list[dict[str, Any]]]:
    """Return, for each model that several hosts serve, which of the others have memory for a share
    as large as the one here; files that are missing there are another problem. This host is among
    them if it could not take part, or if they cannot divide the model."""
    groups = [(str(one.name), one.launch) for one in models if one.launch.hosts]
    found: dict[str, list[dict[str, Any]]] = {}
    if not groups:
        return found
    from ..host_checks import look_at

    for one in look_at(groups):
        need = needs.get(ModelName(one["model"]))
        if (one["rank"] or one["problem"]) and need is not None:
            free = one["available_bytes"] if one["rank"] else None
            fits = free is not None and need.needed_bytes <= free
            kept = {key: one[key] for key in ("rank", "host", "address", "problem")}
            found.setdefault(one["model"], []).append(
                {**kept, "available_bytes": free, "fits": fits}
            )
    return found


def advice(candidates: Sequence[Candidate], budget: Budget) -> str:
    """Return what to change in a configuration whose models do not fit, and after a colon why."""
    from mlxsup.supervisor.memory.placement import required_bytes

    required = required_bytes(candidates)
    if budget.automatic_bytes is not None and required <= budget.automatic_bytes:
        return f'set memory_budget to at least "{format_bytes(required)}"'
    largest = max(candidates, key=lambda one: one.need.needed_bytes)
    name, need = largest.model, largest.need
    needed, whole = format_bytes(need.needed_bytes), format_bytes(budget.size_bytes)
    less = f"set a smaller context_length for {name}, or "
    if need.given_bytes is not None:
        is_too_much = replace(need, given_bytes=None).needed_bytes < need.given_bytes
        less = f'set memory = "auto" for {name}, or ' if is_too_much else ""
    if need.needed_bytes > budget.size_bytes:
        less = "" if need.fixed_bytes > budget.size_bytes else less
        return f"{less}remove {name}: it alone needs {needed}, but the budget is {whole}"
    pinned = " and pinned = false" if any(one.is_pinned for one in candidates) else ""
    return (
        f"{less}set preload = false{pinned} for some, which then take turns: they need "
        f"{format_bytes(required)}, but the budget is {whole}; {name} is the largest with {needed}"
    )


def _needs_of(
    models: Sequence[ModelSettings],
    backend: str,
    measurements: Measurements,
    output: Output | None,
) -> tuple[dict[ModelName, Need], dict[ModelName, str]]:
    """Return the needs of the models, and the problems of those that have none."""
    from mlxsup.store.model_folder import FolderProblem
    from mlxsup.supervisor.memory.needs import needs_without_daemon

    def asking(count: int) -> None:
        """Say why the next seconds are silent; they come once for each model."""
        if output is not None and sys.stderr.isatty():
            models = "1 model" if count == 1 else f"{count} models"
            output.note(f"estimating the memory of {models}")

    needs: dict[ModelName, Need] = {}
    problems: dict[ModelName, str] = {}
    for name, need in needs_without_daemon(models, backend, measurements, asking).items():
        if isinstance(need, FolderProblem):
            problems[name] = need.text
        elif too_little := need.known_problem():
            problems[name] = too_little
        else:
            needs[name] = need
    return needs, problems


def _find_budget(memory_budget: int | None, backend: str, runtime_dir: Path) -> Budget:
    from mlxsup.supervisor.memory.machine import NoDeviceMemoryError, command_budget

    try:
        return command_budget(memory_budget, backend, runtime_dir)
    except NoDeviceMemoryError as error:
        hint = 'set memory_budget = "…GiB" in [supervisor]'
        raise CliError(str(error), code="no_budget", hint=hint) from None


def _row(need: Need, place: Placement, *, is_resident: bool) -> dict[str, Any]:
    return {
        "name": place.model,
        "preload": is_resident,
        "problem": None,
        "needed": {"bytes": need.needed_bytes, "source": _source(need)},
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


COLUMNS = (
    Column("MODEL", least=8),
    Column("NEEDS AT LEAST", is_right=True),
    Column("MAY GROW TO", is_right=True, given_up=6),
    Column("WEIGHTS", is_right=True, given_up=3),
    Column("PROCESS", is_right=True, given_up=2),
    Column("CACHE", is_right=True, given_up=1),
    Column("CONTEXT", is_right=True, given_up=5),
    Column("REQUESTS", is_right=True, given_up=4),
    Column("FITS"),
)

ESTIMATED = "~"
"""Before a figure that no load has measured."""


def plan_lines(value: Mapping[str, Any], width: int | None) -> Iterator[Line]:
    """Yield the lines of the plan.

    Args:
        value: as `--json` prints it.
        width: columns of the terminal; None to cut nothing.
    """
    budget = value["budget"]
    yield from text_lines(f"budget: {format_bytes(budget['bytes'])} ({budget['reason']})", width)
    yield []
    header, *rows = table(COLUMNS, [_cells(model) for model in value["models"]], width)
    yield header
    for model, row in zip(value["models"], rows, strict=True):
        yield row
        for remark in _remarks(model, value):
            yield from text_lines(remark, width, style="dim", indent=INDENT)
    yield []
    if any(ESTIMATED in text for row in rows for text, _ in row):
        yield from text_lines(f"{ESTIMATED} marks an estimate; the first load measures it", width)
    if value["measurements"]:
        yield from text_lines(value["measurements"], width)
    yield from text_lines(_conclusion(value), width)


def _conclusion(value: Mapping[str, Any]) -> str:
    loaded = [model["name"] for model in value["models"] if model.get("is_loaded")]
    if not value["models"]:
        return "no model is configured; `mlxsup add MODEL` adds one"
    if value["change"] is not None:
        return f"not all models fit: {value['change']}"
    if not value["fits"]:
        wrong = ", ".join(
            model["name"]
            for model in value["models"]
            if model["problem"] or not all(one["fits"] for one in model["hosts"])
        )
        return f"the other models fit; these cannot be loaded: {wrong}"
    if len(value["models"]) == 1:
        return "it fits into memory"
    if not loaded:
        return "each model fits on its own and is loaded on request"
    return f"all of these fit together: {', '.join(loaded)} ({format_bytes(value['needed_bytes'])})"


def _cells(model: Mapping[str, Any]) -> list[str]:
    if model["problem"]:
        return [model["name"], *["-"] * 7, "?"]
    tokens, length = model["context_tokens"], model["context_length"]
    return [
        model["name"],
        _size(model["needed"]),
        format_bytes(model["memory_bytes"]) if model["memory_bytes"] else "-",
        _size(model["weights"]),
        _size(model["process"]),
        _size(model["cache"]),
        str(tokens) if tokens == length else f"{tokens}/{length}",
        f"{model['rows']}/{model['max_concurrency']}",
        _fits(model),
    ]


def _fits(model: Mapping[str, Any]) -> str:
    if model["missing_bytes"] or not all(one["fits"] for one in model["hosts"]):
        return "no"
    return "instead" if model["goes"] else "yes"


def _remarks(model: Mapping[str, Any], value: Mapping[str, Any]) -> list[str]:
    """Return what belongs to a row and has no place in it."""
    if model["problem"]:
        return [model["problem"]]
    remarks = [model["remark"]] if model["remark"] else []
    if model["raised_bytes"]:
        more = format_bytes(model["raised_bytes"])
        remarks.append(f"needs {more} more than estimated, because it ran out of memory before")
    if model["missing_bytes"]:
        remarks.append(f"{format_bytes(model['missing_bytes'])} too large")
    elif model["goes"]:
        how = "taking turns if they are busy" if value["swap"] else "once they are idle"
        remarks.append(f"loaded in place of {', '.join(model['goes'])}, {how}")
    elif not model["is_loaded"]:
        next_to = (
            ", next to the others" if any(one.get("is_loaded") for one in value["models"]) else ""
        )
        remarks.append(f"loaded on request{next_to}")
    needed = format_bytes(model["needed"]["bytes"])
    for one in model["hosts"]:
        free = one["available_bytes"]
        said = "" if free is None else f"needs {needed} there, {format_bytes(free)} free"
        name = rank_name(one["rank"], one["host"], one["address"])
        remarks.append(f"{name}: {'; '.join(filter(None, [said, one['problem']]))}")
    if not model["context_tokens"] and not model["missing_bytes"]:
        remarks.append("its memory limit leaves no room for a request")
    return remarks


def _size(figure: Mapping[str, Any]) -> str:
    mark = ESTIMATED if figure["source"] == "estimated" else ""
    return f"{mark}{format_bytes(figure['bytes'])}"
