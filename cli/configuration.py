"""Configuration files as commands read them, and write them for editors that know JSON Schema."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mlxsup.protocol.places import config_places, find_config

from .connection import Target
from .exit_status import CliError, ExitStatus
from .new_file import new_file

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig

NO_FILE_HINT = "create one with `mlxsup init`, or choose one with --config FILE"

SCHEMA_NAME = "mlxsup.schema.json"
SCHEMA_LINE = f"#:schema {SCHEMA_NAME}"
"""The first line of a configuration: relative to the file, as editors take it."""


def find_configuration(given: Path | None, *, hint: str = NO_FILE_HINT) -> Path:
    """Return the file that `start` reads, or refuse if there is none in any of its places."""
    found = find_config(given)
    if found is not None:
        return found.path
    looked = ", ".join(str(place.path) for place in config_places())
    message = f"there is no configuration file; looked for {looked}"
    raise CliError(message, hint=hint, status=ExitStatus.BAD_CONFIGURATION)


def read_configuration(
    path: Path, *, has_sockets: bool = False, is_looked_up: bool = True
) -> DaemonConfig:
    """Return a checked configuration.

    Args:
        path: the file.
        has_sockets: whether sockets must fit into its runtime folder.
        is_looked_up: whether repositories are looked up in the cache, whose disk may not answer;
            a daemon does that by itself.

    Raises:
        CliError: the file is missing or wrong; the message names every problem.
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


def schema_text() -> str:
    """Return the schema, without a line break at its end.

    It is generated ahead of time: generating takes longer than a command may take to begin.
    """
    return Path(__file__).with_name(SCHEMA_NAME).read_text(encoding="utf-8").removesuffix("\n")


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
    partial = schema.with_name(f".{SCHEMA_NAME}.{os.getpid()}")
    try:
        with new_file(path, 0o666) as file:
            file.write(text.encode())
            file.flush()
            partial.write_text(schema_text() + "\n", encoding="utf-8")
            partial.replace(schema)
    finally:
        partial.unlink(missing_ok=True)


def change_configuration(path: Path, change: Callable[[MutableMapping[str, Any]], object]) -> None:
    """Change the models of a configuration that exists; comments and all other lines stay.

    Args:
        path: the file. If it is a link, the file that it leads to is changed.
        change: gets the tables of the models by name.

    Raises:
        CliError: the file is wrong, or would be; it is as it was.
        OSError: it cannot be read or written; it is as it was.
    """
    import tomlkit

    file = Path(os.path.realpath(path.expanduser()))
    read_configuration(file, is_looked_up=False)
    document = tomlkit.parse(file.read_bytes().decode())
    if "models" not in document:
        document.append("models", tomlkit.table(is_super_table=True))
    change(cast(MutableMapping[str, Any], document["models"]))
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_bytes(tomlkit.dumps(document).encode())
        shutil.copymode(file, partial)
        read_configuration(partial, is_looked_up=False)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
