"""Checks a configuration file, and says of each mistake where it is and what is allowed there.

pydantic finds what is wrong with a single value; its own wording reaches no user. The rules between
keys, between entries and about this machine are below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mlxsup.protocol.folders import DAEMON_LOG_NAME, GATEWAY_LOG_NAME, check_runtime_dir
from mlxsup.protocol.gateway import (
    KEYS_HINT,
    Address,
    GatewayRules,
    find_key_need,
)
from mlxsup.protocol.ids import DEFAULT_REVISION, ModelName
from mlxsup.protocol.key_file import KeyPlace, have_been_made
from mlxsup.protocol.states import Priority
from mlxsup.protocol.text import size_text

from ..core.budget import pins_problem
from ..core.settings import ANYONE
from ..memory.machine import find_backend, largest_budget_bytes
from .lines import MODEL_NAME, MODEL_NAME_EXPECTED, LineIndex, Place
from .tables import (
    CLIENT_NAME,
    ClientTable,
    FileTable,
    GatewayTable,
    ModelTable,
    suggestion,
    table_around,
    table_in,
    takes,
)

Problem = tuple[Place, str]
"""Where it is in the file, and a phrase that follows the key."""

RESERVED_NAMES = frozenset({DAEMON_LOG_NAME, GATEWAY_LOG_NAME})
"""The log files of the daemon and of its gateway have these names."""

CLIENT_NAME_EXPECTED = (
    "1 to 64 of the characters A-Z a-z 0-9 . _ @ : / + -, the first a letter or digit"
)
FOREIGN = re.compile(r"[!-~]{1,128}")
FOREIGN_EXPECTED = "1 to 128 printable characters without spaces"

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SOURCES = {"path", "repo", "revision"}


class Check:
    """Everything that is wrong with one file."""

    def __init__(self, *, path: Path, lines: LineIndex, values: dict[str, Any]) -> None:
        self._path = path
        self._lines = lines
        self._values = values
        self._problems: list[tuple[int, str]] = []
        self._wrong: set[Place] = set()

    @property
    def problems(self) -> list[str]:
        """Return the problems so far, in the order of the file."""
        return [text for _, text in sorted(self._problems, key=lambda problem: problem[0])]

    def tables(self) -> FileTable:
        """Return the tables without what is wrong in them, the defaults in each model's entry."""
        for where in _long_integers(self._values):
            self._wrong.add(where)
            self._add(where, f"{_joined(where)} cannot take an integer of more than 64 bits")
        try:
            FileTable.model_validate(_without(self._values, self._wrong))
        except ValidationError as error:
            for details in error.errors():
                self._add_details(details)
        return FileTable.model_validate(_with_defaults(_without(self._values, self._wrong)))

    def rules(self, file: FileTable) -> None:
        """Check the rules between the keys and entries of a file; a wrong value is not judged."""
        self._add_all(_client_name_problems(self._values.get("clients")))
        self._add_all(_model_name_problems(self._values.get("models")))
        for name, client in file.clients.items():
            if self._is_right(("clients", name), "priority", "max_priority"):
                self._add_all(_class_problems(name, client))
        for name, model in file.models.items():
            self._add_all(self._entry_problems(name, model))
        self._add_all(_alias_problems(file.models))
        if file.gateway is not None and self._is_right(("gateway",), "names"):
            self._add_all(_foreign_problems(file.gateway.names, file.models))

    def machine(self, file: FileTable, keys: KeyPlace, socket_dir: Path | None) -> None:
        """Check that this machine can serve a file.

        Args:
            file: the tables.
            keys: where the API keys are.
            socket_dir: for which the paths of sockets must be short enough; None: no sockets.
        """
        budget = file.supervisor.memory_budget
        if budget is not None:
            most = largest_budget_bytes(budget, find_backend())
            if budget > most:
                where = ("supervisor", "memory_budget")
                expected = f"must be at most what this machine has ({size_text(most)})"
                self._add_all([(where, f"{expected}, not {size_text(budget)}")])
            pinned = {
                ModelName(name): entry.memory
                for name, entry in file.models.items()
                if entry.pinned and entry.memory is not None
            }
            if problem := pins_problem(pinned, budget):
                self._add(("models", [*pinned][-1], "pinned"), problem)
        if file.gateway is not None and self._is_right(("gateway",), "listen", "hosts", "origins"):
            found = gateway_problems(file.gateway.listen, rules_of(file.gateway), keys)
            self._add_all((("gateway", key), text) for key, text in found)
        if socket_dir is not None:
            try:
                check_runtime_dir(socket_dir)
            except ValueError as error:
                self._add_all([(("supervisor", "runtime_dir"), f"cannot hold a socket: {error}")])

    def _entry_problems(self, name: str, entry: ModelTable) -> Iterator[Problem]:
        where = ("models", name)

        def is_right(*keys: str) -> bool:
            return self._is_right(where, *keys) and self._is_right(("defaults",), *keys)

        if is_right("path", "repo"):
            needs_one = entry.engine == "mlx" and is_right("engine")
            if entry.path is not None and entry.repo is not None:
                yield (*where, "repo"), "cannot be combined with path; remove one of them"
            elif needs_one and entry.path is None and entry.repo is None:
                yield where, "needs a path or a repo"
            elif entry.repo is None and entry.revision != DEFAULT_REVISION:
                yield (*where, "revision"), "needs repo"
        if is_right("hosts", "min_hosts") and entry.min_hosts > len(entry.hosts):
            yield (*where, "min_hosts"), "must be at most the number of hosts"
        if is_right("hosts") and entry.hosts:
            if len(entry.hosts) < 2:
                yield (*where, "hosts"), "must be two hosts or more, this machine first"
            elif entry.hosts[0].ssh:
                yield (*where, "hosts"), "must begin with this machine, which has no ssh"
            elif any(host.ssh for host in entry.hosts) and not all(
                "address" in host.model_fields_set for host in entry.hosts
            ):
                yield (*where, "hosts"), "must each have an address that the others reach"
            if entry.adapters:
                yield (*where, "adapters"), "cannot be combined with hosts; remove one of them"
        if entry.fake and entry.engine == "mlx" and is_right("engine"):
            yield (*where, "fake"), 'needs engine = "fake"'
        restart = entry.restart
        if (
            restart.backoff_max_s < restart.backoff_initial_s
            and is_right("restart")
            and self._is_right((*where, "restart"), "backoff_initial_s", "backoff_max_s")
            and self._is_right(("defaults", "restart"), "backoff_initial_s", "backoff_max_s")
        ):
            yield (
                (*where, "restart", "backoff_max_s"),
                f"must be at least backoff_initial_s ({restart.backoff_initial_s:g}),"
                f" not {restart.backoff_max_s:g}",
            )

    def _is_right(self, table: Place, *keys: str) -> bool:
        """True if no mistake was found in these keys of a table, nor in the table itself."""
        return table not in self._wrong and not any((*table, key) in self._wrong for key in keys)

    def _add(self, where: Place, sentence: str) -> None:
        line = self._lines.find(where)
        self._problems.append((line, f"{self._path}:{line}: {sentence}"))

    def _add_all(self, problems: Iterable[Problem]) -> None:
        for where, phrase in problems:
            self._add(where, f"{_joined(where)} {phrase}")

    def _add_details(self, details: ErrorDetails) -> None:
        """Say in our own words what pydantic has found."""
        value: Any = self._values
        for part in details["loc"]:  # as the file has it, not as it was converted
            value = value[part]
        where = tuple(map(str, details["loc"]))
        table, rest = table_around(where)
        for place, part in enumerate(details["loc"]):
            if isinstance(part, int):  # of an array, which is right or wrong as a whole
                self._wrong.add(where[:place])
        if details["type"] == "extra_forbidden":
            self._wrong.add(where)
            self._add(where, f"unknown key {_joined(where)}{suggestion(table, rest[0])}")
            return
        field = table.model_fields[rest[0]]
        inside = rest[1:]
        if not inside or table_in(field) is not None:
            expected = "a table" if inside else takes(field)
            self._wrong.add(where)
            self._add(where, f"{_joined(where)} must be {expected}, not {_shown(value)}")
            return
        key = where[: -len(inside)]
        outside = "a table" if get_origin(field.annotation) is dict else "an array"
        self._wrong.add(key)
        self._add(
            where, f"{_joined(key)} must be {takes(field)}, not {outside} with {_shown(value)}"
        )


def gateway_problems(listen: str, rules: GatewayRules, keys: KeyPlace) -> Iterator[tuple[str, str]]:
    """Yield what keeps a gateway from running here: the key of `[gateway]`, and a phrase behind it.

    Keys that were lost keep it from nothing: it runs, refuses every request and says why.
    """
    try:
        address = Address.parse(listen)
    except ValueError as error:
        yield "listen", f"{_quoted(listen, 60)} {error}"
    else:
        need = find_key_need(address, rules)
        if need is not None and not have_been_made(keys):
            setting, why = need
            yield setting, f"{why}, but no API key exists; `{KEYS_HINT}` creates one"


def rules_of(table: GatewayTable) -> GatewayRules:
    """Return what a table says about requests; origins as browsers send them: in small letters,
    without the usual port."""
    usual_ports = {"http": ":80", "https": ":443"}
    origins = []
    for origin in map(str.lower, table.origins):
        origins.append(origin.removesuffix(usual_ports.get(origin.partition("://")[0], "")))
    return GatewayRules(
        names=dict(table.names),
        hosts=tuple(table.hosts),
        origins=tuple(origins),
        needs_keys=table.keys == "required",
        refuses_unread=table.unknown_fields == "refuse",
        adds_models=table.auto_add,
    )


def _client_name_problems(clients: object) -> Iterator[Problem]:
    for name in clients if isinstance(clients, dict) else ():
        if name != ANYONE and not re.fullmatch(CLIENT_NAME, name):
            expected = f'{CLIENT_NAME_EXPECTED}; or "{ANYONE}" for all others'
            yield ("clients", name), f"is not a valid client name: it must be {expected}"


def _class_problems(name: str, client: ClientTable) -> Iterator[Problem]:
    if Priority(client.priority).is_above(Priority(client.max_priority)):
        expected = f"max_priority ({client.max_priority}) or a lower class"
        yield ("clients", name, "priority"), f"must be {expected}, not {_shown(client.priority)}"


def _model_name_problems(models: object) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for name in models if isinstance(models, dict) else ():
        where = ("models", name)
        if not MODEL_NAME.fullmatch(name):
            yield where, f"is not a valid model name: it must be {MODEL_NAME_EXPECTED}"
        elif name.lower() in RESERVED_NAMES:
            yield (
                where,
                (
                    "cannot be the name of a model, because a log of the daemon has this name: "
                    f"{name.lower()}"
                ),
            )
        elif name.lower() in seen:  # names become log files, and some file systems ignore case
            yield where, f"differs from models.{seen[name.lower()]} only in case"
        seen.setdefault(name.lower(), name)


def _alias_problems(models: Mapping[str, ModelTable]) -> Iterator[Problem]:
    """Yield what is wrong with the names of aliases, presets and adapters."""
    owners = {name: name for name in models}
    for name, entry in models.items():
        where = ("models", name, "aliases")
        for alias in entry.aliases:
            if alias in owners:
                yield where, f"has {alias}, which already means models.{owners[alias]}"
            owners.setdefault(alias, name)
        for kind, table in (("preset", entry.presets), ("adapter", entry.adapters)):
            for own in table:
                if not MODEL_NAME.fullmatch(own):
                    place = ("models", name, f"{kind}s", own)
                    yield place, f"is not a valid {kind} name: it must be {MODEL_NAME_EXPECTED}"
        for adapter in entry.adapters.keys() & entry.presets.keys():
            yield ("models", name, "adapters", adapter), f"is the name of a preset of {name}, too"


def _foreign_problems(
    names: Mapping[str, str], models: Mapping[str, ModelTable]
) -> Iterator[Problem]:
    """Yield what is wrong with the names of other APIs."""
    known = {one: name for name, entry in models.items() for one in (name, *entry.aliases)}
    for foreign, model in names.items():
        where = ("gateway", "names", foreign)
        base, _, variant = model.rpartition(":")
        entry = models.get(known.get(base, ""))
        if not FOREIGN.fullmatch(foreign):
            yield where, f"is not a valid name: it must be {FOREIGN_EXPECTED}"
        elif foreign in known:
            yield where, f"has no effect, because models.{known[foreign]} has this name"
        elif model not in known and not (
            entry and (variant in entry.presets or variant in entry.adapters)
        ):
            expected = "the name of a model, NAME:PRESET or NAME:ADAPTER"
            yield where, f"must be {expected}, not {_shown(model)}"


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return a file whose entries have the keys that they leave out from `[defaults]`.

    An entry that says where its model is takes no part of that from there.
    """
    defaults = values.get("defaults", {})
    elsewhere = {key: value for key, value in defaults.items() if key not in _SOURCES}
    models = {}
    for name, entry in values.get("models", {}).items():
        taken = elsewhere if {"path", "repo"} & entry.keys() else defaults
        merged = {**taken, **entry}
        for inner in ("restart", "sampling"):
            merged[inner] = {**taken.get(inner, {}), **entry.get(inner, {})}
        models[name] = merged
    return {**values, "models": models}


def _without(value: Any, wrong: Set[Place], where: Place = ()) -> Any:
    """Return the value at a place in the file without what is wrong in it."""
    if not isinstance(value, dict):
        return value
    return {
        key: _without(inner, wrong, (*where, key))
        for key, inner in value.items()
        if (*where, key) not in wrong
    }


def _joined(where: Place) -> str:
    """Return a key as a file writes it."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else _quoted(part, 128) for part in where)


def _shown(value: object) -> str:
    """Return a value as a file writes it, tables and arrays by their kind."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value, 60)
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    return str(value)[:60]


def _quoted(text: str, length: int) -> str:
    return json.dumps(text[:length], ensure_ascii=False)  # TOML has the same escapes


def _long_integers(value: object, where: Place = ()) -> Iterator[Place]:
    """Yield the places of integers that 64 bits do not hold."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _long_integers(inner, (*where, key))
    elif isinstance(value, list):
        for inner in value:
            yield from _long_integers(inner, where)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield where
