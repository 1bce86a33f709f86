"""What is wrong with a configuration, as far as what its models need says it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from mlxsup.protocol.ids import ModelName

from ..config.load import ConfigError, DaemonConfig
from ..core.memory.budget import Budget
from ..core.memory.given import known_problem
from ..core.memory.need import Need
from ..core.memory.pins import pins_problem
from .appraiser import Appraiser
from .backend import find_backend
from .command_budget import command_budget
from .estimator import estimate_launch
from .folder import FolderError
from .machine import NoDeviceMemoryError
from .measurements import Measurements


def check_needs(
    config: DaemonConfig, needs: Mapping[ModelName, Need], budget: Budget | None
) -> None:
    """Checks that each model can do with its `memory`, and that the pinned ones fit together.

    Args:
        config: with the models.
        needs: of those models whose folders can be read.
        budget: what all of them may take; None: it is not known.

    Raises:
        ConfigError: names everything that is wrong.
    """
    problems = []
    for name, need in needs.items():
        too_little = known_problem(need, is_measured_again=True)
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


def check_memory(config: DaemonConfig) -> None:
    """The same without a daemon, by what the runtime folder remembers of the models.

    Raises:
        ConfigError: as `check_needs`.
    """
    backend = find_backend()
    appraiser = Appraiser(backend, Measurements(config.runtime_dir))
    needs = {}
    for model in config.models:
        with suppress(FolderError):  # its load will fail, and say why
            needs[model.name] = appraiser.appraise(model.launch, estimate_launch(model.launch))
    try:
        budget = command_budget(config.memory_budget, backend, config.runtime_dir)
    except NoDeviceMemoryError:
        budget = None
    check_needs(config, needs, budget)
