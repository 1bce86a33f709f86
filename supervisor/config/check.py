"""Checks the tables of a configuration file, and collects everything that is wrong with them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mlxsup.protocol.folders import DAEMON_LOG_NAME, GATEWAY_LOG_NAME, check_runtime_dir
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.key_file import KeyPlace
from mlxsup.protocol.states import Priority
from mlxsup.protocol.text import size_text
from mlxsup.store.repositories import DEFAULT_REVISION

from ..core.memory.pins import pins_problem
from ..core.settings import ANYONE
from ..memory.machine import find_backend, largest_budget_bytes
from .client_table import ClientTable
from .entry_text import MODEL_NAME, MODEL_NAME_EXPECTED
from .file_table import FileTable
from .gateway_sites import rules_of, site_problems
from .gateway_table import GatewayTable, gateway_problems
from .kinds import Table
from .lines import LineIndex
from .model_names import foreign_problems, name_problems
from .preset_table import PresetTable
from .sampling_table import SamplingTable
from .tables import (
    ModelTable,
    RestartTable,
    SupervisorTable,
)
from .values import size_or_auto

CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,63}")
CLIENT_NAME_EXPECTED = (
    "1 to 64 of the characters A-Z a-z 0-9 . _ @ : / + -, the first a letter or digit"
)
RESERVED_NAMES = (DAEMON_LOG_NAME, GATEWAY_LOG_NAME)
"""The log files of the daemon and of its gateway have these names."""


AnyTable = TypeVar("AnyTable", bound=Table)


class Check:
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
        self._wrong: set[tuple[str, ...]] = set()

    @property
    def problems(self) -> list[str]:
        """What is wrong so far, in the order of the file."""
        return [text for _, text in sorted(self._problems, key=lambda problem: problem[0])]

    def integers(self) -> None:
        """Checks that all integers fit into the 64 bits that TOML promises."""
        for where in _long_integers(self._values):
            self._add(where, f"{'.'.join(where)} cannot take an integer of more than 64 bits")

    def tables(self) -> FileTable:
        """The checked tables, without what is wrong."""
        for key in self._values.keys() - FileTable.model_fields.keys():
            self._add((key,), f"unknown key {key}{_suggestion((key,))}")
        supervisor = self._table(SupervisorTable, ("supervisor",))
        defaults = self._table(ModelTable, ("defaults",))
        gateway = self._table(GatewayTable, ("gateway",)) if "gateway" in self._values else None
        clients = self._clients()
        entries = self._values.get("models", {})
        if not isinstance(entries, dict):
            self._add(("models",), f"models takes a table for each model, not {_shown(entries)}")
        elif not entries:
            self._add(
                ("models",), "names no model: add a table [models.NAME] with a path or a repo"
            )
        else:
            self._check_names(list(entries))
        models: dict[str, ModelTable] = {}
        for name in entries if isinstance(entries, dict) else ():
            entry = self._table(ModelTable, ("models", name))
            if entry is not None:
                models[name] = entry
        return FileTable(
            supervisor=supervisor or SupervisorTable(),
            gateway=gateway,
            clients=clients,
            defaults=defaults or ModelTable(),
            models=models,
        )

    def _clients(self) -> dict[str, ClientTable]:
        """The checked entries of `clients`, without what is wrong in them."""
        entries = self._values.get("clients", {})
        if not isinstance(entries, dict):
            shown = _shown(entries)
            self._add(("clients",), f"clients takes a table for each client, not {shown}")
            return {}
        clients = {}
        for name in entries:
            where = ("clients", name)
            if name != ANYONE and not CLIENT_NAME.fullmatch(name):
                expected = f'{CLIENT_NAME_EXPECTED}; or "{ANYONE}" for all others'
                self._add(where, f"clients.{name!r}: a client's name takes {expected}")
            entry = self._table(ClientTable, where)
            if entry is not None:
                clients[name] = entry
                self._check_classes(name, entry)
        return clients

    def _check_classes(self, name: str, entry: ClientTable) -> None:
        where = ("clients", name, "priority")
        if where in self._wrong or ("clients", name, "max_priority") in self._wrong:
            return
        if Priority(entry.priority).is_above(Priority(entry.max_priority)):
            expected = f"max_priority ({entry.max_priority}) or a lower class"
            self._add(where, f"{_joined(where)} takes {expected}, not {_shown(entry.priority)}")

    def _table(self, table: type[AnyTable], where: tuple[str, ...]) -> AnyTable | None:
        """The table at a place in the file, without what is wrong in it; an empty one if it is
        absent, None if it is no table."""
        value: Any = self._values
        for part in where:
            value = value.get(part, {})
        try:
            return table.model_validate(value)
        except ValidationError as error:
            for details in error.errors():
                self._add_details(where, details)
        if where in self._wrong:
            return None
        return table.model_validate(_without(value, self._wrong, where))

    def effective(self, name: str, entry: ModelTable) -> None:
        """Checks an entry, after the defaults are applied, for keys that contradict each other.

        What depends on a value that is wrong is not judged.
        """
        where = ("models", name)
        if self._is_right(name, "path") and self._is_right(name, "repo"):
            self._check_source(name, entry)
        if entry.fake and entry.engine == "mlx" and self._is_right(name, "engine"):
            self._add((*where, "fake"), f'models.{name}.fake needs engine = "fake"')
        if not _is_plain(entry.fake):
            self._add((*where, "fake"), f"models.{name}.fake takes texts, numbers and tables")
        for preset, table in entry.presets.items():
            if not _is_plain(table.model_dump()["chat_template_kwargs"]):
                key = f"models.{name}.presets.{preset}.chat_template_kwargs"
                self._add((*where, "presets", preset), f"{key} takes texts, numbers and tables")
        restart = entry.restart
        backoffs = ("backoff_initial_s", "backoff_max_s")
        is_right = all(self._is_right(name, "restart", key) for key in backoffs)
        if is_right and restart.backoff_max_s < restart.backoff_initial_s:
            self._add(
                (*where, "restart", "backoff_max_s"),
                f"models.{name}.restart.backoff_max_s takes at least backoff_initial_s"
                f" ({restart.backoff_initial_s:g}), not {restart.backoff_max_s:g}",
            )

    def _check_source(self, name: str, entry: ModelTable) -> None:
        """Checks that an entry says in one way where its model is."""
        where = ("models", name)
        is_needed = entry.engine == "mlx" and self._is_right(name, "engine")
        if entry.path is not None and entry.repo is not None:
            self._add((*where, "repo"), f"models.{name} takes either path or repo, not both")
        elif is_needed and entry.path is None and entry.repo is None:
            self._add(where, f"models.{name} names neither a folder with path, nor a repo")
        elif entry.repo is None and entry.revision != DEFAULT_REVISION:
            self._add((*where, "revision"), f"models.{name}.revision needs repo")

    def memory_budget(self, value: int | str) -> None:
        """Checks that the machine has as much memory as the models may take."""
        size = size_or_auto(value)
        where = ("supervisor", "memory_budget")
        if size == 0:
            self._add(where, "supervisor.memory_budget takes a size above 0")
        elif size is not None:
            most = largest_budget_bytes(size, find_backend())
            if size > most:
                self._add(
                    where,
                    f"supervisor.memory_budget takes at most what this machine has "
                    f"({size_text(most)}), not {size_text(size)}",
                )

    def names(self, entries: Mapping[str, ModelTable], gateway: GatewayTable | None) -> None:
        """Checks that each name means one model, and that those of other APIs mean one at all."""
        for where, text in name_problems(entries):
            self._add(where, f"{_joined(where)} {text}")
        if gateway is not None and ("gateway", "names") not in self._wrong:
            for where, text in foreign_problems(gateway.names, entries):
                self._add(where, f"{_joined(where)} {text}")

    def pins(self, entries: Mapping[str, ModelTable], budget: int | str) -> None:
        """Checks that the pinned models fit together, as far as the file gives the sizes."""
        budget_bytes = size_or_auto(budget)
        sizes = {
            name: size_or_auto(entry.memory) for name, entry in entries.items() if entry.pinned
        }
        pinned = {ModelName(name): size for name, size in sizes.items() if size is not None}
        problem = pins_problem(pinned, budget_bytes) if budget_bytes else ""
        if problem:
            self._add(("models", [*pinned][-1], "pinned"), problem)

    def gateway(self, table: GatewayTable | None, keys: KeyPlace) -> None:
        """Check that the gateway, if there is one, could run on this machine."""
        if table is None:
            return
        sites = [*site_problems(table)]
        for place, text in sites:
            self._add(place, f"{_joined(place)} {text}")
        if not sites and ("gateway", "listen") not in self._wrong:
            for setting, text in gateway_problems(table.listen, rules_of(table), keys):
                self._add(("gateway", setting), f"gateway.{setting} {text}")

    def runtime_dir(self, path: Path) -> None:
        """Checks that the paths of the sockets in this folder are short enough."""
        try:
            check_runtime_dir(path)
        except ValueError as error:
            where = ("supervisor", "runtime_dir")
            self._add(where, f"supervisor.runtime_dir takes a shorter folder: {error}")

    def _check_names(self, names: list[str]) -> None:
        seen: dict[str, str] = {}
        for name in names:
            where = ("models", name)
            if not MODEL_NAME.fullmatch(name):
                self._add(where, f"models.{name!r}: a model's name takes {MODEL_NAME_EXPECTED}")
            elif name.lower() in RESERVED_NAMES:
                self._add(where, f"models.{name}: the name {name.lower()} is the daemon's own")
            elif name.lower() in seen:  # names become log files, and some file systems ignore case
                other = seen[name.lower()]
                self._add(where, f"models.{name}: differs from models.{other} only in case")
            seen.setdefault(name.lower(), name)

    def _is_right(self, name: str, *key: str) -> bool:
        """Whether neither the model's entry nor the defaults have a wrong value there."""
        return not any(
            (*table, *key[:length]) in self._wrong
            for table in (("models", name), ("defaults",))
            for length in range(len(key) + 1)
        )

    def _add(self, where: tuple[str, ...], text: str) -> None:
        line = self._lines.find(where)
        self._problems.append((line, f"{self._path}:{line}: {text}"))

    def _add_details(self, table: tuple[str, ...], details: ErrorDetails) -> None:
        where = table + tuple(str(part) for part in details["loc"] if part != "[key]")
        self._wrong.add(where)
        key = _joined(where)
        if details["type"] == "extra_forbidden":
            self._add(where, f"unknown key {key}{_suggestion(where)}")
            return
        expected = _expected(where)
        self._add(where, f"{key} takes {expected}, not {_shown(details['input'])}")


def _without(value: Any, wrong: Set[tuple[str, ...]], where: tuple[str, ...]) -> Any:
    """The value at a place in the file, without what is wrong in it."""
    if not isinstance(value, dict):
        return value
    return {
        key: _without(inner, wrong, (*where, key))
        for key, inner in value.items()
        if (*where, key) not in wrong
    }


def _table_at(where: tuple[str, ...]) -> type[BaseModel]:
    """The table that holds the key at this place."""
    match where:
        case ("supervisor", _):
            return SupervisorTable
        case ("gateway", _):
            return GatewayTable
        case ("clients", _, _):
            return ClientTable
        case ("defaults", _) | ("models", _, _):
            return ModelTable
        case ("defaults", "restart", _) | ("models", _, "restart", _):
            return RestartTable
        case ("defaults", "sampling", _) | ("models", _, "sampling", _):
            return SamplingTable
        case ("defaults", "presets", _, _) | ("models", _, "presets", _, _):
            return PresetTable
    return FileTable


def _expected(where: tuple[str, ...]) -> str:
    if (len(where) == 2 and where[0] in ("clients", "models")) or where[-2:-1] == ("presets",):
        return "a table"
    description = _table_at(where).model_fields[where[-1]].description
    assert description is not None
    return description


def _suggestion(where: tuple[str, ...]) -> str:
    known = list(_table_at(where).model_fields)
    for table, title in (
        (SupervisorTable, "[supervisor]"),
        (GatewayTable, "[gateway]"),
        (ClientTable, "[clients.NAME]"),
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


def _joined(where: tuple[str, ...]) -> str:
    """A key as a file writes it."""
    return ".".join(f'"{part}"' if part == ANYONE else part for part in where)


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
