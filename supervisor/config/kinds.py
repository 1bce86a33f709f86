"""What the keys of the configuration file take: the kinds of values, and what all tables share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .values import (
    check_count_or_auto,
    check_duration,
    check_name_map,
    check_names,
    check_repository_name,
    check_revision_name,
    check_size_auto_or_off,
    check_size_or_auto,
    parse_size,
)

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
PreventSleep = Literal["off", "busy"]
Class = Literal["interactive", "normal", "batch"]
CLASS_EXPECTED = '"interactive", "normal" or "batch"'

Duration = Annotated[float, BeforeValidator(check_duration)]
Folder = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
"""No system call takes a path with a NUL in it."""
Repository = Annotated[str, BeforeValidator(check_repository_name)]
Revision = Annotated[str, BeforeValidator(check_revision_name)]
Size = Annotated[int, BeforeValidator(parse_size)]
SizeOrAuto = Annotated[int | str, BeforeValidator(check_size_or_auto)]
SizeAutoOrOff = Annotated[int | str, BeforeValidator(check_size_auto_or_off)]
CountOrAuto = Annotated[int | str, BeforeValidator(check_count_or_auto)]
Names = Annotated[list[str], BeforeValidator(check_names)]
NameMap = Annotated[dict[str, str], BeforeValidator(check_name_map)]
Number = Annotated[
    float, BeforeValidator(lambda value: float(value) if type(value) is int else value)
]


class Table(BaseModel):
    """What all tables share: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
