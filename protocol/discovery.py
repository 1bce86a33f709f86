"""The daemon and the configuration file that are meant: one rule for every command and client.

There is one rule because two were a trap: with `MLXSUP_CONFIG` for `start` alone, `stop` ended
another daemon than the one that had been started. A place that was named counts even if it is
missing, so that a typing error never selects another daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .folders import (
    CLIENT_SOCKET_NAME,
    DEFAULT_CONFIG,
    DEFAULT_RUNTIME_DIR,
    absolute,
    check_socket_path,
    default_log_dir,
)
from .regular_file import MIB, read_regular

MAX_CONFIG_BYTES = MIB
"""Of a configuration file."""

MAX_KEY_PARTS = 32
"""Of a dotted key: what tomllib takes to read one grows with the square of its parts, up to
gigabytes for a file of 60 KB. A configuration needs six."""

_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = rf"(?<![\w-])(?:{_PART}){{{MAX_KEY_PARTS}}}"

ENDPOINT_VARIABLE = "MLXSUP_ENDPOINT"
CONFIG_VARIABLE = "MLXSUP_CONFIG"
USER_FOLDER_VARIABLE = "XDG_CONFIG_HOME"

WORKING_CONFIG = "./mlxsup.toml"
USER_CONFIG = "mlxsup/config.toml"
"""In the user's folder for configurations."""

DEFAULT_USER_FOLDER = "~/.config"


class LongKeyError(ValueError):
    """A dotted key has too many parts; the message says in which line."""


class UnreadableConfigError(ValueError):
    """The configuration file that says where the daemon is cannot be read.

    Attributes:
        path: the file.
    """

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class ConfigPlace(NamedTuple):
    """A place where a configuration file may be.

    Attributes:
        path: as it was named; `~` is not expanded yet.
        source: what names it: an option, a variable, or the place itself.
        is_named: whether it was named, so that it counts even if it is missing.
    """

    path: Path
    source: str
    is_named: bool

    @property
    def is_there(self) -> bool:
        """Return whether there is a file, or a link to one, that may be broken."""
        return os.path.lexists(self.path.expanduser())


class Place(NamedTuple):
    """The place of a daemon.

    Attributes:
        endpoint: where it listens.
        source: what names it: an option, a variable, the place of a configuration file; or empty,
            because it is the default one.
        config: the configuration file that says so; None without one.
    """

    endpoint: str
    source: str
    config: Path | None


def config_places(given: Path | None = None) -> Iterator[ConfigPlace]:
    """Return every place where a configuration file is looked for, in this order.

    Args:
        given: the file of `--config`, if there is one.
    """
    if given is not None:
        yield ConfigPlace(given, "--config", True)
    if named := os.environ.get(CONFIG_VARIABLE):
        yield ConfigPlace(Path(named), CONFIG_VARIABLE, True)
    yield ConfigPlace(Path(WORKING_CONFIG), WORKING_CONFIG, False)
    yield from _user_places()


def _user_places() -> Iterator[ConfigPlace]:
    user = os.path.join(_user_folder() or DEFAULT_USER_FOLDER, USER_CONFIG)
    yield ConfigPlace(Path(user), f"${USER_FOLDER_VARIABLE}" if _user_folder() else user, False)
    yield ConfigPlace(Path(DEFAULT_CONFIG), DEFAULT_CONFIG, False)


def _is_the_users(config: Path) -> bool:
    return config.expanduser().absolute() in [one.path.expanduser() for one in _user_places()]


def _user_folder() -> str:
    """Return what the variable names; a relative path is invalid there, says the specification of
    these folders."""
    folder = os.environ.get(USER_FOLDER_VARIABLE, "")
    return folder if os.path.isabs(folder) else ""


def find_config(given: Path | None = None) -> ConfigPlace | None:
    """Return the configuration file that counts: the first that is named or there; None if none is.

    Args:
        given: the file of `--config`, if there is one.
    """
    return next((one for one in config_places(given) if one.is_named or one.is_there), None)


def find_place(endpoint: str | None = None, config: Path | None = None) -> Place:
    """Find the daemon that is meant: that of `--endpoint`, `--config`, MLXSUP_ENDPOINT,
    MLXSUP_CONFIG, ./mlxsup.toml, $XDG_CONFIG_HOME/mlxsup/config.toml (else in ~/.config),
    ~/.mlxsup/config.toml, or of the default folder, in this order.

    Args:
        endpoint: that of `--endpoint`, or the one given to a client.
        config: the file of `--config`.

    Raises:
        UnreadableConfigError: the file that counts does not say where its daemon is.
        ValueError: what counts is no endpoint that a client can connect to.
    """
    if endpoint is not None:
        return Place(check_endpoint(endpoint), "--endpoint", None)
    named = os.environ.get(ENDPOINT_VARIABLE)
    if named and config is None:
        return Place(check_endpoint(named), ENDPOINT_VARIABLE, None)
    found = find_config(config)
    if found is None:
        return Place(endpoint_in(DEFAULT_RUNTIME_DIR), "", None)
    runtime_dir = runtime_dir_of(found.path)
    return Place(endpoint_in(runtime_dir), found.source, found.path)


def endpoint_in(runtime_dir: str | Path) -> str:
    """Return the endpoint of the daemon with this runtime folder."""
    path = Path(runtime_dir).expanduser() / CLIENT_SOCKET_NAME
    return check_endpoint(f"ipc://{path}")


def socket_at(endpoint: str) -> Path:
    """Return the socket of an endpoint; its folder is the daemon's runtime folder."""
    return Path(endpoint.removeprefix("ipc://"))


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint if a client can connect to it.

    Raises:
        ValueError: it is not `ipc://` and a path of at most 103 bytes.
    """
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or not path:
        raise ValueError(f"an endpoint is ipc:// and the path of a socket, not {endpoint!r}")
    check_socket_path(path)
    return endpoint


def runtime_dir_of(config: Path) -> Path:
    """Return the runtime folder of the daemon with this configuration file.

    Raises:
        UnreadableConfigError: the file cannot be read, or does not say.
    """
    return _folder_in(config, "runtime_dir") or Path(DEFAULT_RUNTIME_DIR).expanduser()


def log_dir_of(config: Path) -> Path:
    """Return the folder for the logs of the daemon with this configuration file.

    Raises:
        UnreadableConfigError: the file cannot be read, or does not say.
    """
    return _folder_in(config, "log_dir") or default_log_dir(runtime_dir_of(config))


def normal_lines(text: str) -> str:
    """Return a text of Windows or of old Macs as others write it: line ends, no byte order mark."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a configuration, unchecked.

    Raises:
        ValueError: it is not TOML (`tomllib.TOMLDecodeError`), has an integer of more than 4300
            digits, or a key of too many parts.
        RecursionError: it is nested too deeply.
    """
    import tomllib  # most clients read no file

    if found := re.search(_LONG_KEY, text):
        line = text.count("\n", 0, found.start()) + 1
        raise LongKeyError(f"line {line} has a key of more than {MAX_KEY_PARTS} parts")
    return tomllib.loads(text)


def read_toml(path: Path) -> dict[str, Any]:
    """Return a configuration file, unchecked; `mlxsup config check` does the checking.

    Raises:
        UnreadableConfigError: it cannot be read, or is not TOML.
    """
    text = _read_text(path)
    try:
        return parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise _not_toml(path, error) from None


def _read_text(path: Path) -> str:
    try:
        return normal_lines(read_regular(path.expanduser(), MAX_CONFIG_BYTES).decode())
    except OSError as error:
        raise UnreadableConfigError(f"cannot read {path}: {error.strerror}", path) from None
    except ValueError as error:
        raise _not_toml(path, error) from None


def _not_toml(path: Path, error: Exception) -> UnreadableConfigError:
    return UnreadableConfigError(f"{path} is not TOML: {error}", path)


def _folder_in(config: Path, key: str) -> Path | None:
    """Return a folder that a configuration names. Of a file that is not TOML, the line of the key
    counts: a daemon that runs can be asked and stopped while its file is wrong. Without that line
    only the user's own file means the default daemon; of another, half of which an editor may
    have written, `stop` would end a daemon that it does not belong to."""
    text = _read_text(config)
    try:
        table = parse_toml(text).get("supervisor", {})
    except (ValueError, RecursionError) as error:
        lines = re.findall(rf"^[ \t]*{key}[ \t]*=[ \t]*([\"'])(.*)\1[ \t]*(?:#.*)?$", text, re.M)
        if len(lines) != 1 and not _is_the_users(config):
            raise _not_toml(config, error) from None
        table = {key: lines[0][1]} if len(lines) == 1 else {}
    if not isinstance(table, dict):
        raise UnreadableConfigError(f"{config}: supervisor must be a table", config)
    value = table.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise UnreadableConfigError(f"{config}: supervisor.{key} must be a string", config)
    return absolute(value, config.expanduser().resolve().parent)
