"""Reads the configuration file, checks all of it, and turns it into the parts' settings."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from mlxsup.protocol.download import Repository
from mlxsup.protocol.folders import absolute, default_log_dir
from mlxsup.protocol.gateway import Address, GatewayRules
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.key_file import KeyPlace
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.places import MAX_CONFIG_BYTES, LongKeyError, parse_toml
from mlxsup.protocol.regular_file import read_regular
from mlxsup.protocol.states import Priority

from ..core.settings import ClientSettings, CoreSettings, ModelSettings, RestartSettings
from .check import Check
from .client_table import ClientTable
from .file_table import FileTable
from .gateway_sites import rules_of
from .lines import LineIndex
from .sources import look_up, model_path, own_source
from .tables import ModelTable
from .values import count_or_auto, size_or_auto

EXIT_CODE = 78

MAX_MODELS = 1000
"""More than any machine serves; a daemon keeps books of each, whether it runs or not."""

MAX_DEPTH = 100
"""Tables and arrays of a useful configuration are nested less deeply; so whatever reads them later
may descend into them."""

_SYNTAX_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class ConfigError(Exception):
    """The configuration cannot be used (exit 78).

    Attributes:
        problems: everything that is wrong with it, each with file, line, key and what was
            expected; in the order of the file.
    """

    exit_code = EXIT_CODE

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """What a daemon runs with; every path is absolute.

    Attributes:
        config_path: the file; None if the command line named the models.
        runtime_dir: where the sockets and the lock are.
        keys: where the API keys of the gateway are.
        log_dir: where the logs are.
        log_level: `debug`, `info`, `warning` or `error`.
        log_format: `text` or `json`.
        prevent_sleep: `off` or `busy`.
        memory_budget: what all models may take together, in bytes; None: automatic.
        core: the limits.
        models: the entries, in the order of the file.
        gateway: where the gateway listens; None without a table `[gateway]`.
        gateway_rules: what it says about requests.
        http: as `gateway`, as the command line gives it; it takes precedence.
    """

    config_path: Path | None
    runtime_dir: Path
    keys: KeyPlace
    log_dir: Path
    log_level: str
    memory_budget: int | None
    core: CoreSettings
    models: tuple[ModelSettings, ...]
    gateway: Address | None = None
    gateway_rules: GatewayRules = field(default_factory=GatewayRules)
    http: Address | None = None
    log_format: str = "text"
    prevent_sleep: str = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigText:
    """A configuration file as it was read.

    Attributes:
        text: its content.
        folder: what relative paths are relative to: that of the file, where links lead to now.
    """

    text: str
    folder: Path


def load_config(path: Path, *, has_sockets: bool = False) -> DaemonConfig:
    """Read a configuration file, and look up the repositories of its models in the cache.

    Args:
        path: the file.
        has_sockets: see `read_config`.

    Raises:
        ConfigError: it cannot be read, or anything in it is wrong.
    """
    return looked_up(read_config(path, has_sockets=has_sockets))


def read_config(path: Path, *, has_sockets: bool = False) -> DaemonConfig:
    """Read a configuration file, and none of its models' folders.

    Args:
        path: the file.
        has_sockets: whether sockets must fit into its runtime folder; a daemon that uses the
            folder finds out by itself (exit 73).

    Raises:
        ConfigError: it cannot be read, or anything in it is wrong.
    """
    read = read_text(path)
    # Not where a link leads now: a reload follows it anew.
    named = Path(os.path.abspath(path))
    return parse_config(
        read.text, path=path, config_path=named, folder=read.folder, has_sockets=has_sockets
    )


def looked_up(config: DaemonConfig) -> DaemonConfig:
    """Return a configuration with the folders that the cache has for its repositories."""
    return replace(config, models=tuple(map(look_up, config.models)))


def read_text(path: Path) -> ConfigText:
    """Read a configuration file without looking at what it says.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is too large.
    """
    try:
        text = read_regular(path, MAX_CONFIG_BYTES).decode()
        folder = path.resolve().parent
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text (byte {error.start})"]) from None
    return ConfigText(text=text.replace("\r\n", "\n").replace("\r", "\n"), folder=folder)


def parse_config(
    text: str, *, path: Path, config_path: Path | None, folder: Path, has_sockets: bool = False
) -> DaemonConfig:
    """Check the text of a configuration and turn it into settings; no model folder is looked at.

    Args:
        text: the configuration, in TOML.
        path: what errors call the text.
        config_path: the file, if there is one.
        folder: what relative paths are relative to.
        has_sockets: see `read_config`.

    Raises:
        ConfigError: anything in it is wrong.
    """
    values = _parse_toml(text, path)
    models = values.get("models")
    if isinstance(models, dict) and len(models) > MAX_MODELS:
        raise ConfigError(
            [f"{path}: has {len(models)} models: a daemon takes {MAX_MODELS}, so leave some out"]
        )
    check = Check(path=path, lines=LineIndex(text), values=values)
    check.integers()
    _raise_if_wrong(check)
    table = check.tables()
    effective = {name: _with_defaults(table, entry) for name, entry in table.models.items()}
    for name, entry in effective.items():
        check.effective(name, entry)
    check.memory_budget(table.supervisor.memory_budget)
    check.names(effective, table.gateway)
    check.pins(effective, table.supervisor.memory_budget)
    runtime_dir = absolute(table.supervisor.runtime_dir, folder)
    keys = KeyPlace.beside(config_path, runtime_dir)
    check.gateway(table.gateway, keys)
    if has_sockets:
        check.runtime_dir(runtime_dir)
    _raise_if_wrong(check)
    return DaemonConfig(
        config_path=config_path,
        runtime_dir=runtime_dir,
        keys=keys,
        log_dir=_log_dir(table, runtime_dir, folder),
        log_level=table.supervisor.log_level,
        log_format=table.supervisor.log_format,
        prevent_sleep=table.supervisor.prevent_sleep,
        memory_budget=size_or_auto(table.supervisor.memory_budget),
        core=_core_settings(table),
        models=tuple(_model_settings(name, entry, folder) for name, entry in effective.items()),
        gateway=Address.parse(table.gateway.listen) if table.gateway is not None else None,
        gateway_rules=GatewayRules() if table.gateway is None else rules_of(table.gateway),
    )


def _log_dir(file: FileTable, runtime_dir: Path, folder: Path) -> Path:
    if "log_dir" in file.supervisor.model_fields_set:
        return absolute(file.supervisor.log_dir, folder)
    return default_log_dir(runtime_dir)


def _raise_if_wrong(check: Check) -> None:
    if check.problems:
        raise ConfigError(check.problems)


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    too_deep = f"{path}: is nested too deeply to be a configuration"
    try:
        values = parse_toml(text)
    except RecursionError:
        raise ConfigError([too_deep]) from None
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _SYNTAX_PLACE.search(message)
        line = int(place.group(1)) if place and place.group(1) else text.count("\n") + 1
        what = _SYNTAX_PLACE.sub("", message)
        column = f", column {place.group(2)}" if place and place.group(2) else ""
        raise ConfigError([f"{path}:{line}: is not TOML: {what}{column}"]) from None
    except LongKeyError as error:
        raise ConfigError([f"{path}: {error}"]) from None
    except ValueError:  # Python reads no integers of more than 4300 digits
        raise ConfigError([f"{path}: contains an integer of more than 64 bits"]) from None
    if _is_deeper_than(MAX_DEPTH, values):  # dotted keys nest as deeply as they are long
        raise ConfigError([too_deep])
    return values


def _is_deeper_than(depth: int, values: dict[str, Any]) -> bool:
    """Whether tables and arrays are nested more than that deeply in one another."""
    level: list[object] = [values]
    for _ in range(depth):
        below: list[object] = []
        for value in level:
            below += value.values() if isinstance(value, dict) else cast(list[object], value)
        level = [value for value in below if isinstance(value, dict | list)]
    return bool(level)


def _with_defaults(file: FileTable, entry: ModelTable) -> ModelTable:
    """The entry, with the keys it leaves out taken from `[defaults]`."""
    restart = file.defaults.restart.model_copy(update=entry.restart.model_dump(exclude_unset=True))
    sampling = file.defaults.sampling.model_copy(
        update=entry.sampling.model_dump(exclude_unset=True)
    )
    given = {name: getattr(entry, name) for name in entry.model_fields_set}
    defaults = file.defaults.model_copy(update=own_source(entry))
    return defaults.model_copy(update={**given, "restart": restart, "sampling": sampling})


def _core_settings(file: FileTable) -> CoreSettings:
    table = file.supervisor
    return CoreSettings(
        max_queue=table.max_queue,
        max_queue_per_client=table.max_queue_per_client,
        max_queue_bytes=table.max_queue_bytes,
        drain_timeout_s=table.drain_timeout_s,
        queue_timeout_s=table.queue_timeout_s,
        first_token_timeout_s=table.first_token_timeout_s,
        aging_s=table.aging_s,
        min_run_s=table.min_run_s,
        max_parallel_prefills=count_or_auto(table.max_parallel_prefills),
        parallel_loads=table.parallel_loads,
        spare_workers=table.spare_workers,
        min_residency_s=table.min_residency_s,
        swap=table.swap,
        swap_after_s=table.swap_after_s,
        clients={name: _client_settings(entry) for name, entry in file.clients.items()},
    )


def _client_settings(entry: ClientTable) -> ClientSettings:
    return ClientSettings(
        weight=entry.weight,
        priority=Priority(entry.priority),
        max_priority=Priority(entry.max_priority),
        max_queue=entry.max_queue,
        max_running=entry.max_running,
    )


SIZES = {
    "memory_limit_bytes": "memory",
    "cache_limit_bytes": "cache_limit",
    "wired_limit_bytes": "wired",
    "prefix_cache_bytes": "prefix_cache",
}
"""The keys of sizes, which have shorter names in the file; every other key has the same name."""


def _launch_settings(entry: ModelTable, folder: Path) -> LaunchSettings:
    values: dict[str, Any] = {}
    for setting in fields(LaunchSettings):
        value = getattr(entry, SIZES.get(setting.name, setting.name))
        values[setting.name] = size_or_auto(value) if setting.name in SIZES else value
    path = absolute(entry.path, folder) if entry.path is not None else None
    values["path"] = model_path(path, entry.repo)
    values["sampling"] = entry.sampling.model_dump()
    return LaunchSettings(**values)


def _model_settings(name: str, entry: ModelTable, folder: Path) -> ModelSettings:
    return ModelSettings(
        name=ModelName(name),
        launch=_launch_settings(entry, folder),
        repo=entry.repo or "",
        revision=entry.revision if entry.repo else "",
        download=Repository(entry.repo, entry.revision) if entry.repo else None,
        aliases=tuple(entry.aliases),
        presets={
            preset: table.model_dump(exclude_unset=True, exclude_none=True)
            for preset, table in entry.presets.items()
        },
        preload=entry.preload,
        pinned=entry.pinned,
        idle_unload_s=entry.idle_unload_s,
        load_stall_timeout_s=entry.load_stall_timeout_s,
        restart=RestartSettings(**entry.restart.model_dump()),
    )
