"""Reads the configuration file, has it checked, and turns it into the settings of the parts."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from mlxsup.protocol.discovery import MAX_CONFIG_BYTES, LongKeyError, normal_lines, parse_toml
from mlxsup.protocol.download import Repository
from mlxsup.protocol.folders import absolute, default_log_dir
from mlxsup.protocol.gateway import Address, GatewayRules
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.key_file import KeyPlace
from mlxsup.protocol.launch import GroupHost, LaunchSettings
from mlxsup.protocol.regular_file import read_regular
from mlxsup.protocol.states import Priority
from mlxsup.store.hub_cache import (
    find_cache,
    find_snapshot,
    is_owned_repository,
    repository_folder,
)

from ..core.settings import ClientSettings, CoreSettings, ModelSettings, RestartSettings
from .check import Check, rules_of
from .lines import MODEL_NAME, LineIndex, source_line, table_key
from .tables import ClientTable, ModelTable, Table

EXIT_CODE = 78

MAX_MODELS = 1000
"""More than any machine serves; a daemon keeps books of each, whether it runs or not."""

MAX_DEPTH = 100
"""Tables and arrays of a useful configuration are nested less deeply; so whatever reads them later
may descend into them."""

WITHOUT_FILE = Path("--model")
"""The name that errors give a configuration without a file."""

_FIXED_KEYS = {
    "runtime_dir": "runtime_dir",
    "log_dir": "log_dir",
    "log_format": "log_format",
    "prevent_sleep": "prevent_sleep",
    "gateway": "gateway",
    "gateway_rules": "gateway",
}
"""Attributes of a configuration, and the key or table of the file that has them."""

_SIZES = {
    "memory_limit_bytes": "memory",
    "cache_limit_bytes": "cache_limit",
    "wired_limit_bytes": "wired",
    "prefix_cache_bytes": "prefix_cache",
}
"""The settings whose keys have shorter names; every other key has the same name."""

_SYNTAX_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


MOST_PROBLEMS = 100
"""So many are read at a time; a file that is no configuration may have one in each line."""


class ConfigError(Exception):
    """The configuration cannot be used (exit 78).

    Attributes:
        problems: everything that is wrong with it, each with file, line, key and what was
            expected; in the order of the file; of more than 100 how many more there are.
        rest: what it says without the keys that are wrong, so that a change can repair it; None if
            it cannot be read.
    """

    exit_code = EXIT_CODE

    def __init__(self, problems: list[str], rest: DaemonConfig | None = None) -> None:
        if (more := len(problems) - MOST_PROBLEMS) > 0:
            problems = [*problems[:MOST_PROBLEMS], f"and {more} more"]
        super().__init__("\n".join(problems))
        self.problems = problems
        self.rest = rest


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """What a daemon runs with; every path is absolute.

    Attributes:
        config_path: the file; None if the command line named the models.
        runtime_dir: where the sockets and the lock are.
        keys: where the API keys of the gateway are.
        log_dir: where the logs are.
        log_format: `text` or `json`.
        prevent_sleep: `off` or `busy`.
        memory_budget: what all models may take together, in bytes; None: automatic.
        core: the limits.
        models: the entries, in the order of the file.
        gateway: where the gateway listens; None without a table `[gateway]`.
        gateway_rules: what it says about requests.
        http: as `gateway`, as the command line gives it; it takes precedence.
        text: what a file would say; empty if there is one.
    """

    config_path: Path | None
    runtime_dir: Path
    keys: KeyPlace
    log_dir: Path
    memory_budget: int | None
    core: CoreSettings
    models: tuple[ModelSettings, ...]
    gateway: Address | None = None
    gateway_rules: GatewayRules = field(default_factory=GatewayRules)
    http: Address | None = None
    log_format: str = "text"
    prevent_sleep: str = "off"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigText:
    """The text of a configuration, as it was read from its file if it has one.

    Attributes:
        raw: as it is on the disk.
        folder: what relative paths are relative to: that of the file, where links lead to now.
    """

    raw: str
    folder: Path

    @property
    def text(self) -> str:
        """Return the content, with the line ends that TOML's reader takes."""
        return normal_lines(self.raw)


def load_config(path: Path, *, has_sockets: bool = False) -> DaemonConfig:
    """Read a configuration file, and look up the repositories of its models in the cache.

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
    return parse_config(read_text(path), path, has_sockets=has_sockets)


def looked_up(config: DaemonConfig) -> DaemonConfig:
    """Return a configuration with the folders that the cache has for its repositories.

    For commands: a daemon has the cache read in another process.
    """
    return replace(config, models=tuple(map(_looked_up, config.models)))


def _looked_up(model: ModelSettings) -> ModelSettings:
    if not model.repo:
        return model
    from mlxsup.store.model_folder import missing_files  # only a repository needs it

    with suppress(OSError):
        snapshot = find_snapshot(model.repo, model.revision)
        if snapshot is not None:
            return located(model, str(snapshot), is_lacking=bool(missing_files(snapshot)))
    return model


def located(model: ModelSettings, path: str, *, is_lacking: bool) -> ModelSettings:
    """Return the entry of a repository with what the cache has of it."""
    download = Repository(model.repo, model.revision) if is_lacking else None
    return replace(model, launch=replace(model.launch, path=path), download=download)


def changed_for_later(old: DaemonConfig, new: DaemonConfig) -> tuple[str, ...]:
    """Return the keys of `[supervisor]` and the tables that a reload leaves for the next start."""
    changed = (name for name in _FIXED_KEYS if getattr(old, name) != getattr(new, name))
    return tuple(dict.fromkeys(_FIXED_KEYS[name] for name in changed))


def read_text(path: Path) -> ConfigText:
    """Read a configuration file without looking at what it says.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is too large.
    """
    try:
        raw = read_regular(path.expanduser(), MAX_CONFIG_BYTES).decode()
        folder = path.expanduser().resolve().parent
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text (byte {error.start})"]) from None
    return ConfigText(raw=raw, folder=folder)


def parse_config(read: ConfigText, path: Path | None, *, has_sockets: bool = False) -> DaemonConfig:
    """Check the text of a configuration and turn it into settings; no model folder is looked at.

    Args:
        read: the text.
        path: the file, as errors call it; None if there is none.
        has_sockets: see `read_config`.

    Raises:
        ConfigError: anything in it is wrong.
    """
    text, folder, called = read.text, read.folder, path or WITHOUT_FILE
    values = _parse_toml(text, called)
    models = values.get("models")
    if isinstance(models, dict) and len(models) > MAX_MODELS:
        raise ConfigError(
            [f"{called}: has {len(models)} models, but a daemon serves at most {MAX_MODELS}"]
        )
    check = Check(path=called, lines=LineIndex(text), values=values)
    file = check.tables()
    supervisor = file.supervisor
    # Not where a link leads now: a reload follows it anew.
    config_path = None if path is None else Path(os.path.abspath(path))
    runtime_dir = absolute(supervisor.runtime_dir, folder)
    log_dir = absolute(supervisor.log_dir, folder)
    if "log_dir" not in supervisor.model_fields_set:
        log_dir = default_log_dir(runtime_dir)
    keys = KeyPlace.beside(config_path, runtime_dir)
    check.rules(file)
    check.machine(file, keys, runtime_dir if has_sockets else None)
    clients = {name: _client_settings(entry) for name, entry in file.clients.items()}
    address: Address | None = None
    if file.gateway is not None:
        with suppress(ValueError):  # which `machine` has found
            address = Address.parse(file.gateway.listen)
    config = DaemonConfig(
        config_path=config_path,
        runtime_dir=runtime_dir,
        keys=keys,
        log_dir=log_dir,
        log_format=supervisor.log_format,
        prevent_sleep=supervisor.prevent_sleep,
        memory_budget=supervisor.memory_budget,
        core=CoreSettings(**_shared(CoreSettings, supervisor), clients=clients),
        models=tuple(_model_settings(name, entry, folder) for name, entry in file.models.items()),
        gateway=address,
        gateway_rules=GatewayRules() if file.gateway is None else rules_of(file.gateway),
        text=text if path is None else "",
    )
    if check.problems:
        raise ConfigError(check.problems, config)
    return config


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
    """True if tables and arrays are nested more than that deeply in one another."""
    level: list[object] = [values]
    for _ in range(depth):
        below: list[object] = []
        for value in level:
            below += value.values() if isinstance(value, dict) else cast(list[object], value)
        level = [value for value in below if isinstance(value, dict | list)]
    return bool(level)


def _shared(settings: type, table: Table) -> dict[str, Any]:
    """Return the values of the keys that the settings have under the same name."""
    return {
        setting.name: getattr(table, setting.name)
        for setting in fields(settings)
        if setting.name in type(table).model_fields
    }


def _client_settings(entry: ClientTable) -> ClientSettings:
    classes = {
        "priority": Priority(entry.priority),
        "max_priority": Priority(entry.max_priority),
    }
    return ClientSettings(**{**_shared(ClientSettings, entry), **classes})


def _model_settings(name: str, entry: ModelTable, folder: Path) -> ModelSettings:
    settings = {
        **_shared(ModelSettings, entry),
        "name": ModelName(name),
        "launch": _launch_settings(entry, folder),
        "repo": entry.repo or "",
        "revision": entry.revision if entry.repo else "",
        "download": Repository(entry.repo, entry.revision) if entry.repo else None,
        "aliases": tuple(entry.aliases),
        "presets": {
            preset: {key: value for key, value in table if key in table.model_fields_set}
            for preset, table in entry.presets.items()
        },
        "restart": RestartSettings(**dict(entry.restart)),
    }
    return ModelSettings(**settings)


def _launch_settings(entry: ModelTable, folder: Path) -> LaunchSettings:
    path = str(absolute(entry.path, folder)) if entry.path is not None else ""
    if entry.repo is not None:
        # Where the cache would have it, so that the error of a load names the place.
        path = str(repository_folder(entry.repo, find_cache()))
    sizes = {setting: getattr(entry, key) for setting, key in _SIZES.items()}
    shared = _shared(LaunchSettings, entry)
    adapters = {name: str(absolute(place, folder)) for name, place in entry.adapters.items()}
    sampling = entry.sampling.model_dump(exclude_unset=True)
    hosts = tuple(GroupHost(**dict(host)) for host in entry.hosts)
    drafts = str(absolute(entry.drafts, folder)) if "/" in entry.drafts else entry.drafts
    own = {
        "path": path,
        "adapters": adapters,
        "drafts": drafts,
        "sampling": sampling,
        "hosts": hosts,
    }
    return LaunchSettings(**{**shared, **sizes, **own})


# ---------------------------------------------------------------- without a file


def split_model(given: str) -> tuple[str, Path | str]:
    """Return the name of a model, and where it is.

    Args:
        given: a folder, or a repository as OWNER/NAME; NAME= may stand before it.

    Returns:
        The name, and the absolute folder or the repository.
    """
    name, equals, source = given.partition("=")
    if not equals or not MODEL_NAME.fullmatch(name):
        name, source = "", given
    if _is_repository(source):
        return name or source.rpartition("/")[2], source
    path = Path(os.path.expanduser(source)).absolute()
    return name or path.resolve().name, path


def _is_repository(text: str) -> bool:
    """True if it reads as one and is no folder; below a folder that exists, only one in the cache
    is."""
    if not is_owned_repository(text) or Path(text).exists():
        return False
    if not Path(text).parent.is_dir():
        return True
    with suppress(OSError):
        return find_snapshot(text) is not None
    return False


def config_of_folders(sources: Mapping[str, Path | str]) -> DaemonConfig:
    """Return the configuration that a daemon runs with, and its text.

    Raises:
        ConfigError: a name is invalid.
    """
    text = "\n".join(
        f"[models.{table_key(name)}]\n{source_line(source)}\n" for name, source in sources.items()
    )
    return looked_up(parse_config(ConfigText(raw=text, folder=Path.cwd()), None))
