"""Which model a proof is about, and the daemon that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mlxsup.protocol.folders import DEFAULT_LOG_DIR, DEMO_MODEL_FOLDER

from ..connection import unknown_model
from ..exit_status import CliError, ExitStatus
from ..model_catalog import optional_configuration
from ..terminal.output import Output

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig

COMPRESSED = "kv_lora_rank"
"""The key of config.json that models have whose layers keep keys and values compressed."""


class Subject:
    """The model of a proof.

    Args:
        configuration: names it, and nothing else.
        log_dir: where the user's own daemon keeps its logs.

    Attributes:
        name: the model's name.
        source: its folder or repository.
        log_dir: see above.
        is_exact: whether the model's layers keep the keys and values of every token, so that on a
            CPU a resumed answer has the same bits (docs/engine.md).
    """

    def __init__(self, configuration: DaemonConfig, log_dir: Path) -> None:
        (model,) = configuration.models
        self.name = str(model.name)
        self.source = model.repo or model.launch.path
        self.log_dir = log_dir
        self._configuration = configuration
        self.is_exact = model.launch.engine == "fake" or _keeps_every_token(model.launch.path)

    def server(self, folder: Path) -> Callable[..., int]:
        """Runs a daemon with the model and a copy of it.

        Args:
            folder: for its sockets and logs.
        """
        from ..commands.start import serve_two

        return partial(serve_two, _within_reach(self._configuration), folder)


def find_subject(named: str | None, config: Path | None, output: Output) -> Subject:
    """The model that somebody names; the only one that is configured; or that of `mlxsup demo`.

    Args:
        named: a name of the configuration, or with a slash in it a folder or OWNER/NAME; None: no
            model was named.
        config: the file of `--config`.
        output: shows the progress of a download.

    Raises:
        CliError: there is no such model, or it cannot be loaded as it is.
    """
    if named is not None and "/" in named:
        found, log_dir = _of_source(named), Path(DEFAULT_LOG_DIR).expanduser()
    else:
        configuration = optional_configuration(config)
        if configuration is None and named is not None:
            raise CliError(
                f"there is no configuration that could name {named}",
                code="unknown_model",
                hint="name a file with --config, a folder such as ./MODEL, or OWNER/NAME",
            )
        if configuration is None:
            from ..demo_model import fetch

            found = _of_source(str(fetch(Path(DEMO_MODEL_FOLDER).expanduser(), output)))
            log_dir = Path(DEFAULT_LOG_DIR).expanduser()
        else:
            found, log_dir = _of_configuration(named, configuration), configuration.log_dir
    from ..commands.start import refuse_wrong_folders

    refuse_wrong_folders(found)
    return Subject(found, log_dir)


def _of_source(source: str) -> DaemonConfig:
    from ..commands.start import read_models

    configuration, _ = read_models((source,))
    return configuration


def _of_configuration(named: str | None, configuration: DaemonConfig) -> DaemonConfig:
    """The configuration, with one model of it."""
    names = [str(model.name) for model in configuration.models]
    if named is None and len(names) != 1:
        raise CliError(
            f"name a model; configured: {', '.join(names)}",
            code="usage",
            hint=f"for example `mlxsup doctor --prove {names[0]}`",
            status=ExitStatus.USAGE,
        )
    for model in configuration.models:
        if named in (None, str(model.name), *model.aliases):
            plain = replace(model, pinned=False, preload=False, idle_unload_s=0.0)
            return replace(configuration, models=(plain,))
    raise unknown_model(str(named), names)


def _within_reach(configuration: DaemonConfig) -> DaemonConfig:
    """The configuration with a budget of what is available now: a daemon that runs, and other
    programs, keep what they have."""
    from mlxsup.supervisor.memory.backend import find_backend
    from mlxsup.supervisor.memory.machine import find_budget

    backend = find_backend()
    if backend == "cuda":
        return configuration  # its budget leaves out what others hold
    budget = find_budget(configuration.memory_budget, backend)
    available = psutil.virtual_memory().available
    return replace(configuration, memory_budget=min(budget.size_bytes, available))


def _keeps_every_token(path: str) -> bool:
    """By the files of the model; False if they do not say, or are not there yet."""
    from mlxsup.supervisor.memory.folder import FolderError, read_folder
    from mlxsup.supervisor.memory.layout import find_layout

    try:
        files = read_folder(Path(path))
    except FolderError:
        return False
    config = files.text_config
    layout = find_layout(config, files.tensors)
    is_plain = all(not one.row_bytes and one.window is None for one in layout.layers)
    return bool(layout.layers) and is_plain and not layout.remark and not config.get(COMPRESSED)
