"""The fields of requests, and what each is for: the lists that checks and documents share.

A field that cannot change the text of an answer is accepted. One that would, and that has no effect
here, is refused, so that nobody takes an answer for what it is not; docs/http-api.md names the few
exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlxsup.protocol.codec import MAX_ID_CHARACTERS

from . import limits
from .failure import bad_field


class Use(StrEnum):
    """What becomes of a field; the value is the word that the document has."""

    USED = "used"
    PASSED = "used as it is"
    IGNORED = "accepted, no effect"
    NEUTRAL = "only as it would be without it"


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    Attributes:
        name: in the request.
        use: what becomes of it.
        says: for people.
        neutral: with `Use.NEUTRAL`, the values besides null that change nothing.
    """

    name: str
    use: Use
    says: str = ""
    neutral: tuple[Any, ...] = ()


def passed(*names: str) -> tuple[Field, ...]:
    """Parameters of `generate`."""
    says = "see [parameters](http-api.md#parameters)"
    return tuple(Field(name, Use.PASSED, says) for name in names)


def ignored(*names: str) -> tuple[Field, ...]:
    """Fields that cannot change the text of an answer."""
    return tuple(Field(name, Use.IGNORED) for name in names)


def time_limits() -> tuple[Field, ...]:
    """Limits of one request: the daemon's, by their own names."""
    return (
        Field("timeout_s", Use.USED, "seconds until the last token; then 504 "
              "(`deadline_exceeded`), or in a stream an error event; 0: no limit"),
        Field("queue_timeout_s", Use.USED, "seconds in the queue; then 503 (`queue_timeout`); "
              "0: no limit; without it that of the configuration"),
        Field("first_token_timeout_s", Use.USED, "seconds until the first token; then 504 "
              "(`deadline_exceeded`); 0: no limit; without it that of the configuration"),
    )  # fmt: skip


def check_fields(
    values: Mapping[str, Any], fields: Sequence[Field], *, within: str = ""
) -> dict[str, Any]:
    """The fields that mean something, without those that are null.

    Args:
        values: of a request, or of a part of one.
        fields: those that there are.
        within: the path of the part, `messages[0]`; empty for the whole request.

    Raises:
        Failure: a field is unknown, or would change the answer if it had an effect.
    """
    known = {field.name: field for field in fields}
    given = {}
    for name, value in values.items():
        path = f"{within}.{name[:64]}" if within else name[:64]
        field = known.get(name)
        if field is None:
            raise bad_field(path, f"unknown field {path!r}; known are {', '.join(sorted(known))}")
        if value is None or field.use is Use.IGNORED:
            continue
        if field.use is Use.NEUTRAL:
            # Not `in`: 1 equals True.
            if not any(type(one) is type(value) and one == value for one in field.neutral):
                raise bad_field(path, f"{path} has no effect here: {field.says}")
            continue
        given[name] = value
    return given


def read_model(given: dict[str, Any]) -> str:
    """Take the name of the model out of the fields.

    Raises:
        Failure: it is missing, or no name.
    """
    model = given.pop("model", None)
    if not isinstance(model, str) or not model:
        raise bad_field("model", "model takes the name of a model; GET /v1/models lists them")
    if len(model) > MAX_ID_CHARACTERS:
        message = f"model takes text of 1 to {MAX_ID_CHARACTERS} characters, not of {len(model)}"
        raise bad_field("model", f"{message}; GET /v1/models lists the names")
    return model


def check_count(values: Sized, path: str, things: str, most: int = limits.MAX_ITEMS) -> None:
    """Raise if a list is too long.

    Raises:
        Failure: it is; the message says how many there may be.
    """
    if len(values) > most:
        raise bad_field(
            path, f"{path} takes at most {most} {things}, not {len(values)}: send fewer"
        )
