"""Changes of a configuration file, of its models and of single keys: all other lines stay.

A change is planned on the text, checked as a whole, and then written at once, so that a crash, a
full disk or a mistake leaves the file as it was.
"""

from __future__ import annotations

import errno
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mlxsup.protocol.discovery import normal_lines
from mlxsup.protocol.regular_file import lock, room_hint, write_draft
from mlxsup.store.local_models import short_name
from mlxsup.store.sources import RefusedModelError, Source

from ..core.settings import ModelSettings
from .check import RESERVED_NAMES
from .lines import MODEL_NAME, MODEL_NAME_EXPECTED, LineIndex, Place
from .load import (
    WITHOUT_FILE,
    ConfigError,
    ConfigText,
    DaemonConfig,
    parse_config,
    read_text,
)

MAX_TRIES = 10
"""How often a change is planned anew because another program has written the file meanwhile."""

Tables = MutableMapping[str, Any]
"""A file or a table of it: plain, or with comments and line ends as tomlkit has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of a configuration.

    Attributes:
        name: what it is about.
        change: makes it in the tables of the file; None if there is nothing to change.
        answer: what the client that asked for it is told.
    """

    name: str
    change: Callable[[Tables], object] | None
    answer: Mapping[str, Any]


def adding(
    config: DaemonConfig,
    model: str,
    name: str | None,
    *,
    find: Callable[[], Source],
    ready: Callable[[Source], Source],
) -> Edit:
    """Return the change that makes a configuration serve one more model, or one by another name.

    Args:
        config: as it is.
        model: as the user named it; a name that the configuration has means that entry.
        name: what to call it; None: by a short name. It becomes an alias of a model that is there.
        find: returns where the model is.
        ready: returns it once a worker can load it, or once a load would download it.

    Raises:
        RefusedModelError: the name cannot be had; or one of the two refuses the model.
    """
    for one in config.models:
        if model in (one.name, *one.aliases):
            return _also_called(config, one, name)
    source = find()
    for one in config.models:
        is_same = source.is_that_of(one.repo, one.revision, one.launch.path)
        if one.launch.engine == "mlx" and is_same:
            return _also_called(config, one, name)
    if name is not None:
        check_name(name, config)
    source = ready(source)
    taken = {called.lower() for called in _names_in(config)} | RESERVED_NAMES
    called = name or short_name(source.title, taken)
    entry: dict[str, Any] = {**source.entry()}

    def enter(tables: Tables) -> None:
        # Who adds a model loads it, or leaves that to the first request.
        defaults = inner(tables, "defaults") if "defaults" in tables else {}
        later = {"preload": False} if defaults.get("preload", True) else {}
        inner(tables, "models").update({called: entry | later})

    return Edit(
        name=called,
        change=enter,
        answer={"model": called, "files": source.repo or str(source.folder)},
    )


def _also_called(config: DaemonConfig, one: ModelSettings, name: str | None) -> Edit:
    """Return the change that gives a model that is there another name, unless it has it."""
    if name is None or name in (one.name, *one.aliases):
        return Edit(name=str(one.name), change=None, answer=_of(one))
    check_name(name, config)

    def enter(tables: Tables) -> None:
        table = inner(inner(tables, "models"), one.name)
        if not isinstance(table.setdefault("aliases", []), list):
            raise _no_place(f"models.{one.name}.aliases")
        table["aliases"].append(name)

    return Edit(name=str(one.name), change=enter, answer={**_of(one), "alias": name})


def _not_called(name: str, tables: Tables) -> None:
    """Take an alias out of the table of a model."""
    tables["aliases"].remove(name)
    if not tables["aliases"]:
        del tables["aliases"]


def _of(one: ModelSettings) -> dict[str, Any]:
    return {"model": str(one.name), "files": one.repo or one.launch.path}


def removing(config: DaemonConfig, name: str) -> Edit:
    """Return the change that takes a model out of a configuration, or an alias from its model.

    Raises:
        RefusedModelError: there is no such entry.
    """
    for one in config.models:
        if one.name == name:
            return Edit(
                name=name, change=lambda tables: tables["models"].pop(name), answer=_of(one)
            )
    owner = next((one for one in config.models if name in one.aliases), None)
    if owner is not None:
        return Edit(
            name=str(owner.name),
            change=lambda tables: _not_called(name, tables["models"][owner.name]),
            answer={**_of(owner), "alias": name},
        )
    known = ", ".join(str(one.name) for one in config.models) or "none"
    message = f"no model is called {name!r}; configured: {known}"
    raise RefusedModelError("unknown_model", message, "see `mlxsup models`")


def check_name(name: str, config: DaemonConfig) -> None:
    """Refuse a name that no model can have, or that one has.

    Raises:
        RefusedModelError: says which.
    """
    if not MODEL_NAME.fullmatch(name) or name.lower() in RESERVED_NAMES:
        message = (
            f"a name has {MODEL_NAME_EXPECTED}; {', '.join(sorted(RESERVED_NAMES))} are reserved"
        )
        raise RefusedModelError("usage", message)
    for one in config.models:
        if name.lower() == one.name.lower():
            hint = "choose another name, or see `mlxsup models`"
            raise RefusedModelError("name_taken", f"the name {name} is already taken", hint)
        if name.lower() in {alias.lower() for alias in one.aliases}:
            hint = "choose another name, or see `mlxsup models`"
            raise RefusedModelError("name_taken", f"{name} is another name of {one.name}", hint)


def _names_in(config: DaemonConfig) -> list[str]:
    """Return the names that are taken; aliases are names, too."""
    return [called for one in config.models for called in (str(one.name), *one.aliases)]


# ---------------------------------------------------------------- the text


def edited(text: str, edit: Edit) -> str:
    """Return the text of a configuration with a change in it.

    Args:
        text: a valid configuration, as it is on the disk.
        edit: planned for it.

    Raises:
        RefusedModelError: the file has no place for the change, or it would alter more than that.
    """
    if edit.change is None:
        return text
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    is_of_windows = text.count("\n") == text.count("\r\n") > 0  # and stays it
    text = normal_lines(text)
    before, expected = _values_of(text), _values_of(text)
    edit.change(expected)
    try:
        changed = _with_lines(text, before, expected)
        if _values_of(changed) != expected:  # a value changes, or the tables have no headings
            document = tomlkit.parse(changed)
            edit.change(document)
            changed = tomlkit.dumps(document)
        changed += "" if changed.endswith("\n") else "\n"
        if is_of_windows:
            changed = normal_lines(changed).replace("\n", "\r\n")
        is_sound = _values_of(changed) == expected
    except (TOMLKitError, tomllib.TOMLDecodeError):
        is_sound = False
    if not is_sound:
        raise _no_place(edit.name)
    return changed


def _values_of(text: str) -> dict[str, Any]:
    return {"models": {}, **tomllib.loads(normal_lines(text))}


def _no_place(name: str) -> RefusedModelError:
    message = f"the configuration is written in a way that leaves no place to edit {name}"
    hint = "give each model a table of its own: [models.NAME]"
    return RefusedModelError("not_editable", message, hint)


def inner(tables: Tables, name: str) -> Tables:
    """Return a table within others, which is made if it is not there.

    Raises:
        RefusedModelError: the file, which may be wrong, has something else there.
    """
    found = tables.setdefault(name, {})
    if not isinstance(found, MutableMapping):
        raise _no_place(name)
    return found


def _with_lines(text: str, before: Tables, after: Tables) -> str:
    """Return a text without the tables that go, and with the keys and tables that come.

    To tomlkit the comments above a heading belong to the table before it: they would go with that
    table, or stand above what is added to it.
    """
    import tomlkit

    lines = text.split("\n")
    for place, value in _differences(before, after):
        index = LineIndex("\n".join(lines))
        around, name = place[:-1], place[-1]
        if value is None:
            for table, first, last in reversed(index.tables):
                if table[: len(place)] == place:
                    # The empty line above it goes, too, or each coming and going would leave one.
                    is_apart = first > 1 and not "".join(lines[first - 2 : first - 1]).strip()
                    is_last = not "".join(lines[last : last + 1]).strip()
                    del lines[first - 1 - (is_apart and is_last) : last]
        elif isinstance(value, dict):
            while around and around not in index:
                around = around[:-1]
            ends = [end for table, _, end in index.tables if table[: len(around)] == around]
            if ends or not around:
                filled = [number for number, line in enumerate(lines, 1) if line.strip()]
                end = max(ends or filled, default=0)
                for key in reversed(place):
                    value = {key: value}
                lines[end:end] = ["", *tomlkit.dumps(value).rstrip().split("\n")]
        else:
            for table, _, end in index.tables:
                if table == around:
                    lines.insert(end, tomlkit.dumps({name: value}).rstrip())
    return "\n".join(lines)


def _differences(
    before: Tables, after: Tables, where: Place = ()
) -> Iterator[tuple[Place, object | None]]:
    """Yield where keys and tables come, each with its value, and where others go, with None."""
    for key in {**before, **after}:
        place, old, new = (*where, key), before.get(key), after.get(key)
        if new is None:
            yield place, None
        elif isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, place)
        elif old is None:
            yield place, new


# ---------------------------------------------------------------- the file


def change_file(path: Path, plan: Callable[[DaemonConfig], Edit]) -> Edit:
    """Change a configuration file that exists; return the change that was made.

    Args:
        path: the file. If it is a link, the file that it leads to is changed.
        plan: what to change, of what it says.

    Raises:
        ConfigError: the file is wrong; it is as it was.
        RefusedModelError: the change is refused, or cannot be written; the file is as it was.
    """
    for _ in range(MAX_TRIES):
        read = read_text(path)
        done = planned(read, path, plan)
        if write_text(path, read.raw, done.raw):
            return done.edit
    raise still_written(path)


class Planned(NamedTuple):
    """A change of a file that was not written yet, its text with the change, and what that says."""

    edit: Edit
    raw: str
    config: DaemonConfig


def planned(read: ConfigText, path: Path | None, plan: Callable[[DaemonConfig], Edit]) -> Planned:
    """Plan a change of a file, which may repair a wrong one, or of a text that has no file.

    Raises:
        ConfigError: the file is wrong, and still is with the change.
        RefusedModelError: the change is refused, or what it puts into the file is wrong.
    """
    wrong: ConfigError | None = None
    try:
        config = parse_config(read, path)
    except ConfigError as error:
        if error.rest is None:
            raise
        config, wrong = error.rest, error
    edit = plan(config)
    try:
        raw = edited(read.raw, edit)
    except RefusedModelError:
        if wrong is not None:  # which is why there is no place for the change
            raise wrong from None
        raise
    try:
        return Planned(edit, raw, parse_config(replace(read, raw=raw), path))
    except ConfigError as error:
        if wrong is not None:
            raise wrong from None
        # As the file was right before, this is about the change.
        called = f"{path or WITHOUT_FILE}:"
        problems = [one.removeprefix(called).partition(": ")[2] for one in error.problems]
        raise RefusedModelError("usage", "; ".join(problems), "nothing was changed") from None


def still_written(path: Path) -> ConfigError:
    """Return the error for a file that another program keeps writing."""
    return ConfigError([f"{path}: is still being written; try again once it is complete"])


def write_text(path: Path, before: str, after: str) -> bool:
    """Replace the text of a file at once, unless another program has written it meanwhile.

    Args:
        path: the file. If it is a link, the file that it leads to is written.
        before: its text when the change was planned.
        after: its new text.

    Returns:
        False if it has another text by now; it stays as it is.

    Raises:
        RefusedModelError: it cannot be written, and is as it was.
    """
    if before == after:
        return True
    file = Path(os.path.realpath(path.expanduser()))
    try:
        with _sole_editor(file.parent):
            if file.read_bytes() != before.encode():
                return False
            if not file.stat().st_mode & 0o222 or not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, "it is read-only")
            draft = write_draft(file, after.encode(), is_durable=True)
            try:
                shutil.copymode(file, draft)
                draft.replace(file)
            finally:
                draft.unlink(missing_ok=True)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        hint = "make it writable, or copy it and run `mlxsup start --config FILE`"
        raise RefusedModelError("output", message, room_hint(error, hint)) from None
    return True


@contextmanager
def _sole_editor(folder: Path) -> Iterator[None]:
    """Wait until no other mlxsup edits a file of this folder, and keep others waiting.

    The folder itself is locked: the file is replaced, and no other file is left behind.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)
