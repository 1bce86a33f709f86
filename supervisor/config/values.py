"""Configuration values in a form that people write: durations, sizes."""

from __future__ import annotations

import re
from typing import Any

from mlxsup.protocol.text import parse_duration
from mlxsup.store.hub_cache import (
    REPOSITORY_EXPECTED,
    REVISION_EXPECTED,
    check_repository,
    check_revision,
)

DURATION_EXPECTED = 'seconds as a number, or text such as "90s", "5m" or "1h"'

MAX_DURATION_S = 1e9

SIZE_EXPECTED = 'bytes as an integer, or text such as "256MiB"'

AUTO = "auto"
OFF = "off"

NAMES_EXPECTED = "an array of names"

NAME_MAP_EXPECTED = "a table of names, each with the name of a model"

HOSTS_EXPECTED = "an array of names, without schemes, ports and paths"

KEYS_EXPECTED = '"auto" or "required"'

ORIGINS_EXPECTED = "an array of schemes and names, without paths"

COUNT_OR_AUTO_EXPECTED = '"auto", or an integer from 1'

SIZE_PATTERN = r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)"

_SIZE = re.compile(SIZE_PATTERN)
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def check_duration(value: Any) -> float:
    """Converts a number or a string to seconds.

    Raises:
        ValueError: it is neither a finite number from 0 up nor such a string.
    """
    if isinstance(value, str):
        try:
            return min(parse_duration(value), MAX_DURATION_S)
        except ValueError:
            raise ValueError(DURATION_EXPECTED) from None
    if type(value) in (int, float) and 0 <= value <= MAX_DURATION_S:  # never true of NaN
        return float(value)
    raise ValueError(DURATION_EXPECTED)


def parse_size(value: object) -> int:
    """Converts an integer or a string to bytes.

    Raises:
        ValueError: it is neither an integer from 0 up nor such a string.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match and (size_bytes := float(match.group(1)) * _BYTES[match.group(2)]) < 2**63:
            return int(size_bytes)
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(SIZE_EXPECTED)


def check_size_or_auto(value: Any) -> Any:
    """Converts a size to bytes; leaves "auto" as it is.

    Raises:
        ValueError: it is neither.
    """
    if value != AUTO:
        parse_size(value)
    return value


def check_size_auto_or_off(value: Any) -> Any:
    """Converts a size to bytes; leaves "auto" and "off" as they are.

    Raises:
        ValueError: it is none of these.
    """
    return value if value == OFF else check_size_or_auto(value)


def check_count_or_auto(value: Any) -> Any:
    """Leaves an integer from 1, and "auto", as they are.

    Raises:
        ValueError: it is neither.
    """
    if value == AUTO or (type(value) is int and value >= 1):
        return value
    raise ValueError(COUNT_OR_AUTO_EXPECTED)


def check_names(value: Any) -> Any:
    """Leaves a list of texts as it is.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return value
    raise ValueError(NAMES_EXPECTED)


def check_repository_name(value: Any) -> Any:
    """Leaves the name of a repository as it is.

    Raises:
        ValueError: no repository can be called so.
    """
    if isinstance(value, str):
        return check_repository(value)
    raise ValueError(REPOSITORY_EXPECTED)


def check_revision_name(value: Any) -> Any:
    """Leaves the name of a revision as it is.

    Raises:
        ValueError: no branch, tag or commit can be called so.
    """
    if isinstance(value, str):
        return check_revision(value)
    raise ValueError(REVISION_EXPECTED)


def check_name_map(value: Any) -> Any:
    """Leaves a map of texts as it is.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, dict) and all(isinstance(name, str) for name in value.values()):
        return value
    raise ValueError(NAME_MAP_EXPECTED)


def count_or_auto(value: int | str) -> int | None:
    """The number; None for "auto"."""
    return None if isinstance(value, str) else value


def size_or_auto(value: int | str) -> int | None:
    """Bytes; None for "auto", 0 for "off"."""
    if value == OFF:
        return 0
    return None if value == AUTO else parse_size(value)
