"""`[models.NAME.sampling]`: made from the numbers that a request may have."""

from __future__ import annotations

from typing import Any

from pydantic import Field, create_model

from mlxsup.protocol.parameters import SAMPLING, NumberParameter

from .fields import documented
from .kinds import Number, Table


def _sampling(number: NumberParameter) -> tuple[Any, Any]:
    """A request parameter, with its range and its default."""
    limits: dict[str, Any] = {"gt" if number.is_low_open else "ge": number.low, "le": number.high}
    kind = int if number.is_integer else Number
    limits["json_schema_extra"] = documented(unit=number.unit)
    return kind, Field(number.default, title=number.says, description=number.expected, **limits)


_SAMPLING_FIELDS: Any = {name: _sampling(number) for name, number in SAMPLING.items()}
SamplingTable = create_model(
    "SamplingTable",
    __base__=Table,
    __doc__="`[models.NAME.sampling]`: the parameters of requests that leave them out.",
    **_SAMPLING_FIELDS,
)
