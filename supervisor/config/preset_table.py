"""`[models.NAME.presets.NAME]`: parameters for requests that name the preset."""

from __future__ import annotations

from typing import Any

from pydantic import Field, create_model

from mlxsup.protocol.parameters import NUMBERS, SAMPLING, NumberParameter

from .fields import documented
from .kinds import Number, Table


def _preset(number: NumberParameter, says: str) -> tuple[Any, Any]:
    """A request parameter, with its range; left out: what the model's entry says."""
    limits: dict[str, Any] = {"gt" if number.is_low_open else "ge": number.low, "le": number.high}
    kind = int if number.is_integer else Number
    limits["json_schema_extra"] = documented(unit=number.unit or "tokens")
    return kind | None, Field(None, title=says, description=number.expected, **limits)


_FIELDS: Any = {
    **{name: _preset(number, number.says) for name, number in SAMPLING.items()},
    "max_tokens": _preset(NUMBERS["max_tokens"], "how many tokens to generate at most"),
    "chat_template_kwargs": (
        dict[str, Any],
        Field(
            default_factory=dict,
            title="further arguments for the chat template, such as enable_thinking",
            description="a table of texts, numbers, truth values and tables",
        ),
    ),
}
PresetTable = create_model(
    "PresetTable",
    __base__=Table,
    __doc__="`[models.NAME.presets.NAME]`: the parameters of requests that leave them out.",
    **_FIELDS,
)
