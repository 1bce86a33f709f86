"""Reads the configuration file, checks all of it, and turns it into the parts' settings."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings

from ..core.settings import CoreSettings, ModelSettings, RestartSettings
from .lines import LineIndex
from .tables import (
    FileTable,
    ModelTable,
    RestartTable,
    SamplingTable,
    SupervisorTable,
    Table,
)
from .values import size_or_auto

EXIT_CODE = 78
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MODEL_NAME_EXPECTED = "1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or digit"
RESERVED_NAME = "mlxsup"
"""The daemon's own log file has this name."""

_SYNTAX_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


AnyTable = TypeVar("AnyTable", bound=Table)


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
        log_dir: where the logs are.
        log_level: `debug`, `info`, `warning` or `error`.
        core: the limits.
        models: the entries, in the order of the file.
    """

    config_path: Path | None
    runtime_dir: Path
    log_dir: Path
    log_level: str
    core: CoreSettings
    models: tuple[ModelSettings, ...]


def load_config(path: Path) -> DaemonConfig:
    """Reads a configuration file.

    Raises:
        ConfigError: it cannot be read, or anything in it is wrong.
    """
    text = _read(path)
    return parse_config(text, path=path, config_path=path.resolve(), folder=path.resolve().parent)


def parse_config(text: str, *, path: Path, config_path: Path | None, folder: Path) -> DaemonConfig:
    """Checks the text of a configuration and turns it into settings.

    Args:
        text: the configuration, in TOML.
        path: what errors call the text.
        config_path: the file, if there is one.
        folder: what relative paths are relative to.

    Raises:
        ConfigError: anything in it is wrong.
    """
    values = _parse_toml(text, path)
    check = _Check(path=path, lines=LineIndex(text), values=values)
    check.integers()
    check.raise_if_wrong()
    table = check.tables()
    effective = {name: _with_defaults(table, entry) for name, entry in table.models.items()}
    for name, entry in effective.items():
        check.effective(name, entry)
    check.raise_if_wrong()
    return DaemonConfig(
        config_path=config_path,
        runtime_dir=_absolute(table.supervisor.runtime_dir, folder),
        log_dir=_absolute(table.supervisor.log_dir, folder),
        log_level=table.supervisor.log_level,
        core=_core_settings(table.supervisor),
        models=tuple(_model_settings(name, entry, folder) for name, entry in effective.items()),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text (byte {error.start})"]) from None


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError([f"{path}: is nested too deeply to be a configuration"]) from None
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _SYNTAX_PLACE.search(message)
        line = int(place.group(1)) if place and place.group(1) else text.count("\n") + 1
        what = _SYNTAX_PLACE.sub("", message)
        column = f", column {place.group(2)}" if place and place.group(2) else ""
        raise ConfigError([f"{path}:{line}: is not TOML: {what}{column}"]) from None
    except ValueError:  # Python reads no integers of more than 4300 digits
        raise ConfigError([f"{path}: contains an integer of more than 64 bits"]) from None


class _Check:
    """Collects everything that is wrong with one file.

    Args:
        path: the file, for the messages.
        lines: where its tables and keys are.
        values: what `tomllib` made of it.
    """

    def __init__(self, *, path: Path, lines: LineIndex, values: dict[str, Any]) -> None:
        self._path = path
        self._lines = lines
        self._values = values
        self._problems: list[tuple[int, str]] = []

    def integers(self) -> None:
        """Checks that all integers fit into the 64 bits that TOML promises."""
        for where in _long_integers(self._values):
            self._add(where, f"{'.'.join(where)} cannot take an integer of more than 64 bits")

    def tables(self) -> FileTable:
        """The checked tables, without what is wrong; `raise_if_wrong` must follow."""
        for key in self._values.keys() - FileTable.model_fields.keys():
            self._add((key,), f"unknown key {key}{_suggestion((key,))}")
        supervisor = self._table(SupervisorTable, ("supervisor",))
        defaults = self._table(ModelTable, ("defaults",))
        entries = self._values.get("models", {})
        if not isinstance(entries, dict):
            self._add(("models",), f"models takes a table for each model, not {_shown(entries)}")
        elif not entries:
            self._add(("models",), "names no model: add a table [models.NAME] with a path")
        else:
            self._check_names(list(entries))
        models: dict[str, ModelTable] = {}
        for name in entries if isinstance(entries, dict) else ():
            entry = self._table(ModelTable, ("models", name))
            if entry is not None and defaults is not None:
                models[name] = entry
        return FileTable(
            supervisor=supervisor or SupervisorTable(),
            defaults=defaults or ModelTable(),
            models=models,
        )

    def _table(self, table: type[AnyTable], where: tuple[str, ...]) -> AnyTable | None:
        """The table at a place in the file; an empty one if it is absent, None if it is wrong."""
        value: Any = self._values
        for part in where:
            value = value.get(part, {})
        try:
            return table.model_validate(value)
        except ValidationError as error:
            for details in error.errors():
                self._add_details(where, details)
            return None

    def effective(self, name: str, entry: ModelTable) -> None:
        """Checks an entry, after the defaults are applied, for keys that contradict each other."""
        where = ("models", name)
        if entry.engine == "mlx" and entry.path is None:
            self._add(where, f"models.{name}.path is missing; it takes a folder")
        if entry.engine == "mlx" and entry.fake:
            self._add((*where, "fake"), f'models.{name}.fake needs engine = "fake"')
        if not _is_plain(entry.fake):
            self._add((*where, "fake"), f"models.{name}.fake takes texts, numbers and tables")
        restart = entry.restart
        if restart.backoff_max_s < restart.backoff_initial_s:
            self._add(
                (*where, "restart", "backoff_max_s"),
                f"models.{name}.restart.backoff_max_s takes at least backoff_initial_s"
                f" ({restart.backoff_initial_s:g}), not {restart.backoff_max_s:g}",
            )

    def raise_if_wrong(self) -> None:
        """Reports all problems at once.

        Raises:
            ConfigError: there is at least one.
        """
        if self._problems:
            self._problems.sort(key=lambda problem: problem[0])
            raise ConfigError([text for _, text in self._problems])

    def _check_names(self, names: list[str]) -> None:
        seen: dict[str, str] = {}
        for name in names:
            where = ("models", name)
            if not MODEL_NAME.fullmatch(name):
                self._add(where, f"models.{name!r}: a model's name takes {MODEL_NAME_EXPECTED}")
            elif name.lower() == RESERVED_NAME:
                self._add(where, f"models.{name}: the name {RESERVED_NAME} is the daemon's own")
            elif name.lower() in seen:  # names become log files, and some file systems ignore case
                other = seen[name.lower()]
                self._add(where, f"models.{name}: differs from models.{other} only in case")
            seen.setdefault(name.lower(), name)

    def _add(self, where: tuple[str, ...], text: str) -> None:
        line = self._lines.find(where)
        self._problems.append((line, f"{self._path}:{line}: {text}"))

    def _add_details(self, table: tuple[str, ...], details: ErrorDetails) -> None:
        where = table + tuple(str(part) for part in details["loc"] if part != "[key]")
        key = ".".join(where)
        if details["type"] == "extra_forbidden":
            self._add(where, f"unknown key {key}{_suggestion(where)}")
            return
        expected = _expected(where)
        self._add(where, f"{key} takes {expected}, not {_shown(details['input'])}")


def _table_at(where: tuple[str, ...]) -> type[BaseModel]:
    """The table that holds the key at this place."""
    match where:
        case ("supervisor", _):
            return SupervisorTable
        case ("defaults", _) | ("models", _, _):
            return ModelTable
        case ("defaults", "restart", _) | ("models", _, "restart", _):
            return RestartTable
        case ("defaults", "sampling", _) | ("models", _, "sampling", _):
            return SamplingTable
    return FileTable


def _expected(where: tuple[str, ...]) -> str:
    if len(where) == 2 and where[0] == "models":
        return "a table"
    description = _table_at(where).model_fields[where[-1]].description
    assert description is not None
    return description


def _suggestion(where: tuple[str, ...]) -> str:
    known = list(_table_at(where).model_fields)
    for table, title in (
        (SupervisorTable, "[supervisor]"),
        (ModelTable, "[models.NAME] or [defaults]"),
        (RestartTable, "[models.NAME.restart]"),
        (SamplingTable, "[models.NAME.sampling]"),
    ):
        if where[-1] in table.model_fields:
            return f"; it belongs to {title}"
    close = difflib.get_close_matches(where[-1], known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(known)}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value[:60], ensure_ascii=False)  # TOML has the same escapes
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    return str(value)[:60]


def _long_integers(value: object, where: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of integers that 64 bits do not hold."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _long_integers(inner, (*where, key))
    elif isinstance(value, list):
        for inner in value:
            yield from _long_integers(inner, where)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield where


def _is_plain(value: object) -> bool:
    """Whether the value fits into JSON, which the launch contract uses: TOML also has dates."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | bool)


def _with_defaults(file: FileTable, entry: ModelTable) -> ModelTable:
    """The entry, with the keys it leaves out taken from `[defaults]`."""
    restart = file.defaults.restart.model_copy(update=entry.restart.model_dump(exclude_unset=True))
    sampling = file.defaults.sampling.model_copy(
        update=entry.sampling.model_dump(exclude_unset=True)
    )
    given = {name: getattr(entry, name) for name in entry.model_fields_set}
    return file.defaults.model_copy(update={**given, "restart": restart, "sampling": sampling})


def _absolute(path: str, folder: Path) -> Path:
    # `..` is resolved without following links: people see the path as they wrote it.
    # `~name` of a user that does not exist stays as it is, as in a shell.
    return Path(os.path.normpath(folder / os.path.expanduser(path)))


def _core_settings(table: SupervisorTable) -> CoreSettings:
    return CoreSettings(
        max_queue=table.max_queue,
        max_queue_per_client=table.max_queue_per_client,
        max_queue_bytes=table.max_queue_bytes,
        drain_timeout_s=table.drain_timeout_s,
        queue_timeout_s=table.queue_timeout_s,
        first_token_timeout_s=table.first_token_timeout_s,
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
    values["path"] = str(_absolute(entry.path, folder)) if entry.path is not None else ""
    values["sampling"] = entry.sampling.model_dump()
    return LaunchSettings(**values)


def _model_settings(name: str, entry: ModelTable, folder: Path) -> ModelSettings:
    return ModelSettings(
        name=ModelName(name),
        launch=_launch_settings(entry, folder),
        preload=entry.preload,
        idle_unload_s=entry.idle_unload_s,
        load_stall_timeout_s=entry.load_stall_timeout_s,
        restart=RestartSettings(**entry.restart.model_dump()),
    )
