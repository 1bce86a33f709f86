"""The kinds of values that keys take: how people write them, and what an error says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema

from mlxsup.protocol.launch import MOST_DECODE_SHARE
from mlxsup.protocol.text import DURATION_PATTERN, parse_duration
from mlxsup.store.hub_cache import (
    REVISION_EXPECTED,
    check_repository,
    check_revision,
)

MAX_DURATION_S = 1e9
MAX_WARM_WORKERS = 16

_DURATION = 'seconds as a number, or text such as "90s", "5m" or "1h"'
_SIZE = 'bytes as an integer, or text such as "256MiB"'

_SIZE_PATTERN = r"([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB)"
_HOST = r"([A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])"
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_seconds(text: str) -> float:
    """Return the seconds of a text such as `90s`, at most `MAX_DURATION_S`.

    Raises:
        ValueError: it is no duration.
    """
    return min(parse_duration(text), MAX_DURATION_S)


def parse_size(text: str) -> int:
    """Return the bytes of a text such as `256MiB`.

    Raises:
        ValueError: it is no size, or 64 bits do not hold it.
    """
    match = re.fullmatch(_SIZE_PATTERN, text.strip())
    if match and (size_bytes := float(match.group(1)) * _BYTES[match.group(2)]) < 2**63:
        return int(size_bytes)
    raise ValueError(text)


def _from_text(parse: Callable[[str], object]) -> BeforeValidator:
    """Have texts parsed, and leave the rest as it is."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _word(word: str, meant: int | None) -> BeforeValidator:
    """Replace a word by the value it stands for, and leave the rest as it is."""
    return BeforeValidator(lambda value: meant if value == word else value)


def _as_json(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table that fits into JSON, which the launch contract uses: TOML also has dates."""
    try:
        json.dumps(table)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return table


def _written(number: dict[str, Any], *patterns: str) -> WithJsonSchema:
    """Have editors take a number or a text."""
    text = {"type": "string", "pattern": f"^({'|'.join(patterns)})$"}
    return WithJsonSchema({"anyOf": [number, text]})


Duration = Annotated[
    float,
    Field(ge=0, le=MAX_DURATION_S, description=_DURATION),
    _from_text(parse_seconds),
    _written({"type": "number", "minimum": 0}, DURATION_PATTERN),
]
DurationAboveZero = Annotated[
    float,
    Field(gt=0, le=MAX_DURATION_S, description=f"{_DURATION}, above 0"),
    _from_text(parse_seconds),
    _written({"type": "number", "exclusiveMinimum": 0}, DURATION_PATTERN),
]
Size = Annotated[
    int,
    Field(ge=0, description=_SIZE),
    _from_text(parse_size),
    _written({"type": "integer", "minimum": 0}, _SIZE_PATTERN),
]
SizeAboveZero = Annotated[
    int,
    Field(ge=1, description=_SIZE),
    _from_text(parse_size),
    _written({"type": "integer", "minimum": 1}, _SIZE_PATTERN),
]
SizeOrAuto = Annotated[
    Size | None,
    Field(description=f'"auto", or {_SIZE}'),
    _word("auto", None),
    _written({"type": "integer", "minimum": 0}, "auto", _SIZE_PATTERN),
]
SizeAboveZeroOrAuto = Annotated[
    SizeAboveZero | None,
    Field(description=f'"auto", or {_SIZE}, above 0'),
    _word("auto", None),
    _written({"type": "integer", "minimum": 1}, "auto", _SIZE_PATTERN),
]
SizeAutoOrOff = Annotated[
    SizeOrAuto,
    Field(description=f'"off", "auto", or {_SIZE}'),
    _word("off", 0),
    _written({"type": "integer", "minimum": 0}, "off", "auto", _SIZE_PATTERN),
]
Count = Annotated[int, Field(ge=0, description="an integer of 0 or more")]
CountFromOne = Annotated[int, Field(ge=1, description="an integer of 1 or more")]
DecodeShare = Annotated[
    float,
    Field(ge=0, le=MOST_DECODE_SHARE, description=f"a number from 0 to {MOST_DECODE_SHARE}"),
]
CountOrAuto = Annotated[
    CountFromOne | None,
    Field(description='"auto", or an integer of 1 or more'),
    _word("auto", None),
    _written({"type": "integer", "minimum": 1}, "auto"),
]
WarmWorkers = Annotated[
    Annotated[int, Field(ge=0, le=MAX_WARM_WORKERS)] | None,
    Field(description=f'"auto", or an integer from 0 to {MAX_WARM_WORKERS}'),
    _word("auto", None),
    _written({"type": "integer", "minimum": 0, "maximum": MAX_WARM_WORKERS}, "auto"),
]
Folder = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$", description="a folder")]
"""No system call takes a path with a NUL in it."""
Drafts = Annotated[str, StringConstraints(pattern=r"^(off|ngram|[^\x00]*/[^\x00]*)$")]
Repository = Annotated[str, _from_text(check_repository)]
Revision = Annotated[str, Field(description=REVISION_EXPECTED), _from_text(check_revision)]
Flag = Annotated[bool, Field(description="true or false")]
JsonTable = Annotated[dict[str, Any], AfterValidator(_as_json)]
Alias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
Host = Annotated[str, StringConstraints(pattern=f"^{_HOST}$")]
Origin = Annotated[
    str, StringConstraints(pattern=rf"^[A-Za-z][A-Za-z0-9+.-]{{0,31}}://{_HOST}(:[0-9]{{1,5}})?$")
]
Class = Literal["interactive", "normal", "batch"]
