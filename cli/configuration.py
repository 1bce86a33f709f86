"""Configuration files as commands read them, and write them for editors that know JSON Schema."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.discovery import config_places, find_config
from mlxsup.protocol.folders import DEFAULT_CONFIG, DEFAULT_LISTEN
from mlxsup.protocol.regular_file import new_file, room_hint

from .connection import Target, connect, status_of_daemon
from .exit_status import CliError, ExitStatus

if TYPE_CHECKING:
    from mlxsup.client import Client
    from mlxsup.supervisor.config.entries import Edit
    from mlxsup.supervisor.config.load import DaemonConfig

NO_FILE_HINT = "create one with `mlxsup init`, or choose one with --config FILE"

SCHEMA_NAME = "mlxsup.schema.json"
SCHEMA_LINE = f"#:schema {SCHEMA_NAME}"
"""The first line of a configuration: relative to the file, as editors take it."""

HEAD = f"""\
{SCHEMA_LINE}
# The configuration of mlxsup, written by `mlxsup`; `mlxsup add MODEL` adds a table.
# See what fits with `mlxsup plan`; a change takes effect with `mlxsup reload`.
# All keys with their defaults are in {SCHEMA_NAME}, by which editors complete and check this file.

[gateway]               # HTTP for programs, and a page with a chat
listen = "{DEFAULT_LISTEN}"

[defaults]
preload = false         # load on the first request; true: when the daemon starts
# idle_unload_s = "30m" # unload after this long without a request
"""


def find_configuration(given: Path | None) -> Path:
    """Return the file that counts, or refuse if there is none in any of its places."""
    found = find_config(given)
    if found is not None:
        return found.path
    looked = ", ".join(str(place.path) for place in config_places())
    message = f"there is no configuration file; looked for {looked}"
    raise CliError(message, hint=NO_FILE_HINT, status=ExitStatus.BAD_CONFIGURATION)


def read_configuration(
    path: Path, *, has_sockets: bool = False, is_looked_up: bool = True
) -> DaemonConfig:
    """Return a checked configuration.

    Args:
        path: the file.
        has_sockets: whether sockets must fit into its runtime folder.
        is_looked_up: whether repositories are looked up in the cache, whose disk may not answer;
            a daemon does that by itself.
    """
    expanded = path.expanduser()
    try:
        expanded.stat()
    except (FileNotFoundError, NotADirectoryError):
        hint = f"create it with `mlxsup init {shlex.quote(str(path))}`, or choose another file"
        message = f"{path} does not exist"
        raise CliError(message, hint=hint, status=ExitStatus.BAD_CONFIGURATION) from None
    except OSError:
        pass  # it cannot be read, as is said below
    from mlxsup.supervisor.config.load import looked_up, read_config

    with configuration_errors(path):
        configuration = read_config(expanded, has_sockets=has_sockets)
    return looked_up(configuration) if is_looked_up else configuration


def check_models(configuration: DaemonConfig, path: Path) -> None:
    """Check the folders of a configuration's models, and what these need in memory.

    Raises:
        ConfigError: names everything that is wrong with them.
    """
    from mlxsup.supervisor.config.load import ConfigError
    from mlxsup.supervisor.config.model_folders import check_model_folders
    from mlxsup.supervisor.memory.needs import check_memory

    problems: list[str] = []
    for check in (partial(check_model_folders, path=path), check_memory):
        try:
            check(configuration)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def optional_configuration(given: Path | None) -> DaemonConfig | None:
    """Return the configuration that commands read; None if none is named and there is none.

    Raises:
        CliError: the file is wrong, or a file that was named is missing.
    """
    found = find_config(given)
    if found is None or (given is None and not os.path.exists(found.path.expanduser())):
        return None
    return read_configuration(found.path)


@contextmanager
def configuration_errors(path: Path) -> Iterator[None]:
    """Name every problem of a configuration that is read or checked, as the user named the file."""
    from mlxsup.supervisor.config.load import ConfigError

    try:
        yield
    except ConfigError as error:
        target = Target(config=path)
        lines = "".join(f"\n  {target.repeat_in(problem)}" for problem in error.problems)
        message = f"{path} is not a valid configuration:{lines}"
        hint = f"fix it, then run `mlxsup config check {shlex.quote(str(path))}`"
        raise CliError(message, hint=hint, status=ExitStatus.BAD_CONFIGURATION) from None


@contextmanager
def refusals() -> Iterator[None]:
    """Raise the refusal of a model, or of a change, as an error of the command line."""
    from mlxsup.store.sources import RefusedModelError

    try:
        yield
    except RefusedModelError as error:
        status = ExitStatus.USAGE if error.code == "usage" else ExitStatus.FAILED
        raise CliError(error.message, code=error.code, hint=error.hint, status=status) from None


def changed(
    target: Target,
    by_daemon: Callable[[Client], dict[str, Any]],
    in_file: Callable[[DaemonConfig], Edit],
) -> dict[str, Any]:
    """Change the configuration by the daemon that runs, or else in the file that it would read.

    Returns:
        What the daemon would answer, with `config_path`, which is None if it has no file.
    """
    if status_of_daemon(target) is not None:
        with connect(target) as client:
            return by_daemon(client)
    from mlxsup.supervisor.config.entries import change_file

    file = find_configuration(target.config)
    with configuration_errors(file), refusals():
        return {**change_file(file, in_file).answer, "config_path": str(file)}


def schema_text() -> str:
    """Return the schema, without a line break at its end.

    It is generated ahead of time: generating takes longer than a command may take to begin.
    """
    return Path(__file__).with_name(SCHEMA_NAME).read_text(encoding="utf-8").removesuffix("\n")


def first_configuration(given: Path | None) -> Path:
    """Return the file that `start` reads; an empty one in the usual place if there is none."""
    found = find_config(given)
    path = found.path if found is not None else Path(DEFAULT_CONFIG)
    if found is None:
        make_configuration(path)
    return path


def make_configuration(path: Path) -> bool:
    """Write a configuration without models, unless there is a file; return whether it was new."""
    expanded = path.expanduser()
    if os.path.exists(expanded):
        return False
    try:
        expanded.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_configuration(expanded, HEAD)
    except FileExistsError:
        return False  # two commands at once
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        hint = room_hint(error, "choose another file with --config FILE")
        raise CliError(message, code="output", hint=hint) from None
    return True


def write_configuration(path: Path, text: str) -> None:
    """Write a new configuration, and the schema that its first line names; an older schema is
    replaced.

    Args:
        path: the file, in a folder that exists.
        text: what it says.

    Raises:
        FileExistsError: it exists.
        OSError: it or the schema cannot be written; no part of it is left.
    """
    schema = path.with_name(SCHEMA_NAME)
    new = path.with_name(f".{SCHEMA_NAME}.{os.getpid()}")
    with new_file(path, 0o666) as file:
        file.write(text.encode())
        file.flush()
        try:
            with new_file(new, 0o666) as draft:
                draft.write(f"{schema_text()}\n".encode())
            new.replace(schema)
        finally:
            new.unlink(missing_ok=True)
