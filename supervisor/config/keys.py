"""The keys of a configuration file by their names: how `config set` and the page change them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from mlxsup.protocol.suggestions import close_names
from mlxsup.store.sources import RefusedModelError

from .entries import Edit, Tables, inner
from .lines import Place, table_key
from .load import ConfigText, DaemonConfig, parse_config
from .tables import (
    FileTable,
    ModelTable,
    SamplingTable,
    Table,
    suggestion,
    table_around,
    table_in,
    takes,
)

SECTIONS = ("models.NAME", "defaults", "clients.NAME", "supervisor", "gateway")

MAX_CHANGES = 64
MAX_TEXT = 4096
MOST_SHOWN = 8


def changing(config: DaemonConfig, changes: Mapping[str, Any]) -> Edit:
    """Return the change that sets keys of a configuration, or takes them out.

    Args:
        config: as it is.
        changes: texts as people write them, by the key's whole name, such as
            `models.NAME.max_concurrency`; None takes the key out.

    Raises:
        RefusedModelError: there is no such key or no such model, or the daemon has no file.
    """
    if config.config_path is None:
        message = "the daemon has no configuration file in which a setting could be kept"
        hint = "`mlxsup init` writes one; then `mlxsup stop` and `mlxsup start --detach`"
        raise RefusedModelError("no_file", message, hint)
    if not 1 <= len(changes) <= MAX_CHANGES:
        raise RefusedModelError("usage", f"changes must be 1 to {MAX_CHANGES}, not {len(changes)}")
    values: dict[Place, Any] = {}
    for key, text in changes.items():
        if text is not None and not (isinstance(text, str) and len(text) <= MAX_TEXT):
            message = f"the value of {key} must be text of at most {MAX_TEXT} characters"
            raise RefusedModelError("usage", message)
        place = place_of(key, config)
        values[place] = None if text is None else value_of(text, place)
    written = {written_key(place): value for place, value in values.items()}
    return Edit(
        name=", ".join(written),
        change=partial(_change, values),
        answer={"values": written},
    )


def _change(values: Mapping[Place, Any], tables: Tables) -> None:
    for (*around, name), value in values.items():
        table = tables
        for outer in around:
            if value is None and outer not in table:
                break
            table = inner(table, outer)
        else:
            if value is not None:
                table[name] = value
            elif name in table:
                del table[name]


def getting(read: ConfigText, path: Path, key: str) -> dict[str, Any]:
    """Return the value of a key: its own, or else its default.

    Args:
        read: the file.
        path: what errors call it.
        key: its whole name, as `changing` takes it.

    Returns:
        The `key` as a file writes it, its `value`, None if it has none, and `is_set`: whether the
        file sets it in this table.

    Raises:
        ConfigError: anything in the file is wrong.
        RefusedModelError: there is no such key or no such model.
    """
    place = place_of(key, parse_config(read, path))
    values = tomllib.loads(read.text)
    table, inside = table_around(place)
    field = table.model_fields[inside[0]]
    default = field.get_default(call_default_factory=True) if len(inside) == 1 else None
    looked = [place]
    if place[0] == "models":
        looked.append(("defaults", *place[2:]))
    for where in looked:
        found: Any = values
        for name in where:
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            is_set = where is place
            return {"key": written_key(place), "value": found, "is_set": is_set}
    has_default = default is not PydanticUndefined
    return {
        "key": written_key(place), "value": default if has_default else None, "is_set": False
    }  # fmt: skip


def written_key(place: Place) -> str:
    """Return a key's whole name as a file writes it."""
    return ".".join(map(table_key, place))


# ---------------------------------------------------------------- the name of a key


def place_of(key: str, config: DaemonConfig) -> Place:
    """Return where a key stands in a file.

    Names of models and clients may have dots in them, with or without quotes around.

    Raises:
        RefusedModelError: there is no such key, or no such model.
    """
    parts = re.sub(r'"[^"]*"|\'[^\']*\'', "quoted", key).split(".")
    if len(parts) > 1 and "" in parts:
        message = f"a key must be names with one dot between them, not {key[:128]!r}"
        hint = f"a key begins with {', '.join(SECTIONS)}; quote a name that has dots at its ends"
        raise RefusedModelError("usage", message, hint)
    section, _, rest = key.partition(".")
    if section not in FileTable.model_fields or not rest:
        more = suggestion(FileTable, key) if "." not in key else ""
        message = f"unknown key {key[:128]!r}{more}"
        raise RefusedModelError("usage", message, f"a key begins with {', '.join(SECTIONS)}")
    match section:
        case "models":
            place: Place = (section, *_split_model(rest, config))
        case "clients":
            name, _, last = rest.rpartition(".")
            place = (section, _unquoted(name), last) if name else (section, rest)
        case _:
            place = (section, *rest.split("."))
    for end in range(1, len(place) + 1):
        table, inside = table_around(place[:end])
        field = table.model_fields.get(inside[0])
        if field and get_origin(field.annotation) is list and table_in(field):
            message = f"{written_key(place[:end])} is an array of tables"
            raise RefusedModelError("usage", message, "`mlxsup config schema` describes all keys")
    if field is None:
        message = f"unknown key {written_key(place)}{suggestion(table, inside[0])}"
        raise RefusedModelError("usage", message, "`mlxsup config schema` describes all keys")
    if below := table_in(field):
        raise _is_table(place, list(below.model_fields))
    if get_origin(field.annotation) is dict:  # of names that are not ours
        if len(inside) == 1:
            raise _is_table(place, ["NAME"])
        return (*place[: -len(inside)], inside[0], _unquoted(".".join(inside[1:])))
    if len(inside) > 1:
        message = f"{written_key(place[: 1 - len(inside)])} is no table, and has no keys"
        raise RefusedModelError("usage", message)
    return place


def _split_model(rest: str, config: DaemonConfig) -> Place:
    """Return a model's name and the keys within its table."""
    names = sorted((str(one.name) for one in config.models), key=len, reverse=True)
    for name in names:
        for called in (name, f'"{name}"', f"'{name}'"):
            if rest == called or rest.startswith(f"{called}."):
                return (name, *filter(None, rest[len(called) :].split(".")))
    called = _unquoted(rest.partition(".")[0])
    for one in config.models:
        if called in one.aliases:
            message = f"{called} is another name of {one.name}"
            raise RefusedModelError("is_alias", message, f"write models.{one.name} instead")
    known = ", ".join(sorted(names)) or "none"
    close = close_names(called, names)
    hint = f"did you mean models.{close[0]}?" if close else "see `mlxsup models`"
    message = f"no model is called {called[:128]!r}; configured: {known}"
    raise RefusedModelError("unknown_model", message, hint)


def _unquoted(name: str) -> str:
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'" else name


def _is_table(place: Place, keys: Sequence[str]) -> RefusedModelError:
    """Return the refusal of a table, which has no value of its own."""
    key = written_key(place)
    more = ", …" if len(keys) > MOST_SHOWN else ""
    hint = f"name one of its keys: {', '.join(keys[:MOST_SHOWN])}{more}"
    return RefusedModelError("usage", f"{key} is a table, not a key", hint)


# ---------------------------------------------------------------- its value


def value_of(text: str, place: Place) -> Any:
    """Return the value that a text means for a key: TOML, or else the text itself, or names
    between commas, whichever the key takes; a value that it does not take is refused later."""
    table, inside = table_around(place)
    meant: list[Any] = [text]
    with suppress(ValueError, RecursionError):
        read = tomllib.loads(f"value = {text}")
        if list(read) == ["value"]:
            meant.insert(0, read["value"])
    if text.isascii():
        with suppress(ValueError):
            meant.append(float(text))  # .5 is no TOML
    meant.append([part for one in text.split(",") if (part := one.strip())])
    for value in meant:
        wrapped = value
        for name in reversed(inside):
            wrapped = {name: wrapped}
        with suppress(ValidationError):
            table.model_validate(wrapped)
            return value
    return meant[0] if meant[0] == meant[0] else text  # NaN would not be found again in the file


def shown(value: Any) -> str:
    """Return a value as people type it; `value_of` reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


# ---------------------------------------------------------------- the settings of a model


def settings_of(read: ConfigText, path: Path, model: str) -> list[dict[str, Any]]:
    """Return the settings of a model that people without the reference understand.

    Args:
        read: the file.
        path: what errors call it.
        model: its name in the file.

    Returns:
        Of each the `key`, as `changing` takes it, its `label`, what it `does` and `takes`, the
        `value` of the model's own table and the `default` without that, both as people type them
        and empty if there is none, and the `choices` if there are few.

    Raises:
        ConfigError: anything in the file is wrong.
    """
    parse_config(read, path)
    values = tomllib.loads(read.text)
    own, defaults = values.get("models", {}).get(model, {}), values.get("defaults", {})
    settings = []
    for way, name, field, (label, does) in _on_page():
        mine, common = own, defaults
        for outer in way:
            mine, common = mine.get(outer, {}), common.get(outer, {})
        default = common.get(name, "" if way else field.default)
        settings.append(
            {
                "key": written_key(("models", model, *way, name)),
                "label": label,
                "does": does[:1].upper() + does[1:],
                "takes": takes(field),
                "value": shown(mine[name]) if name in mine else "",
                "default": shown(default),
                "choices": ["true", "false"] if field.annotation is bool else [],
            }
        )
    return settings


def _on_page() -> Iterator[tuple[Place, str, Any, tuple[str, str]]]:
    tables: tuple[tuple[Place, type[Table]], ...] = (
        ((), ModelTable),
        (("sampling",), SamplingTable),
    )
    for way, table in tables:
        for name, field in table.model_fields.items():
            more = field.json_schema_extra
            if isinstance(more, dict) and isinstance(page := more.get("page"), tuple):
                yield way, name, field, page
