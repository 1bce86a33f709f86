"""How long a model stays once it is idle, as Ollama's and LM Studio's programs write it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from mlxsup.client.parameters import MAX_LIMIT_S
from mlxsup.protocol.text import parse_duration

from .failure import bad_field
from .keys import Caller, operator_needed

FOR_EVER = -1.0
NAMES = ("keep_alive", "ttl")
"""Ollama's name, and LM Studio's."""

_WITH_UNIT = re.compile(r"[\d.]+[a-z]+")

LEAST_S = 60.0
MOST_S = 24 * 3600.0
"""What those who are no operators may ask for: less unloads a model that others use, as 0 does, and
more keeps it as good as for ever."""


def read_keep_alive(given: dict[str, Any]) -> None:
    """Replaces both names by the argument of `generate`.

    Raises:
        Failure: a value is no time, or both are there.
    """
    named = [name for name in NAMES if name in given]
    if len(named) > 1:
        raise bad_field("ttl", "ttl and keep_alive mean the same: send one")
    for name in named:
        given["keep_alive"] = _seconds(name, given.pop(name))


def check_keep_alive(parameters: Mapping[str, Any], caller: Caller) -> None:
    """Refuses what would soon unload a model, or keep it for very long: that is an operator's to
    decide, once there are keys that tell who is one.

    Args:
        parameters: of a request, as `read_keep_alive` leaves them.
        caller: who has sent it.

    Raises:
        Failure: the caller is no operator.
    """
    keep_s = parameters.get("keep_alive")
    if keep_s is None or LEAST_S <= keep_s <= MOST_S:
        return
    if caller.has_key and not caller.is_operator:
        what = "keep_alive (or ttl) below a minute or above a day"
        raise operator_needed(what, param="keep_alive")


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, str):
        if value.startswith("-"):
            return FOR_EVER
        parts = _WITH_UNIT.findall(value)
        try:
            if len(parts) > 1 and "".join(parts) == value:  # `5m0s`: Ollama's own client writes so
                return sum(map(parse_duration, parts))
            return parse_duration(value, default_unit="s")
        except ValueError:
            raise _wrong(name) from None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Not `math.isfinite`, which integers of hundreds of digits are too large for.
    if not is_number or not -math.inf < value <= MAX_LIMIT_S:
        raise _wrong(name)
    return float(value) if value >= 0 else FOR_EVER


def _wrong(name: str) -> Exception:
    return bad_field(
        name, f'{name} takes seconds, a text such as "5m", or -1 to keep the model loaded'
    )
