"""The fields of requests, and what each is for: the lists that checks and documents share.

Null is the same as leaving a field out, whatever its name. A field that cannot change the text of
an answer is accepted. One that asks for another answer than it would get is refused. A hint that
cannot be followed, or a name that is not known here, is left out and named in the answer's header
`x-mlxsup-ignored`; `[gateway] unknown_fields = "refuse"` refuses it. Unknown fields of messages,
their parts and items are not looked at: they describe what was said, and ask for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlxsup.protocol.ids import MAX_ID_CHARACTERS
from mlxsup.protocol.parameters import NUMBERS

from . import limits
from .failure import bad_field

WHOLE = frozenset(
    {
        *(name for name, number in NUMBERS.items() if number.is_integer),
        *("n", "logprobs", "max_completion_tokens", "max_output_tokens"),
    }
)
"""Fields that take an integer."""

MOST_UNREAD = 32
"""So many of the fields that are not read are named."""


class Use(StrEnum):
    """What becomes of a field; the value is the word that the document has."""

    USED = "used"
    PASSED = "used as it is"
    IGNORED = "accepted, no effect"
    NEUTRAL = "only as it would be without it"
    HINT = "left out, and named in `x-mlxsup-ignored`"


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    Attributes:
        name: in the request.
        use: what becomes of it.
        says: for people.
        neutral: with `Use.NEUTRAL` and `Use.HINT`, the values besides null that change nothing.
    """

    name: str
    use: Use
    says: str = ""
    neutral: tuple[Any, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        """True if this value of a field without effect changes nothing."""
        # Not `in`: 1 equals True.
        return any(type(one) is type(value) and one == value for one in self.neutral)


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
    values: Mapping[str, Any], fields: Sequence[Field], unread: list[str], *, within: str = ""
) -> dict[str, Any]:
    """Return the fields that mean something here, without those that are null.

    Args:
        values: of a request, or of a part of one.
        fields: those that there are.
        unread: gets the paths of the others.
        within: the path of the part, `stream_options`; empty for the whole request.

    Raises:
        Failure: a field would change the answer if it had an effect.
    """
    known = {field.name: field for field in fields}
    given = {}
    for name, value in values.items():
        field = known.get(name)
        if value is None or (field is not None and field.use is Use.IGNORED):
            continue
        path = f"{within}.{name[:64]}" if within else name[:64]
        if field is None:
            add_unread(unread, path)
        elif field.use not in (Use.NEUTRAL, Use.HINT):
            given[name] = value
        elif not field.is_neutral(value):
            if field.use is Use.NEUTRAL:
                raise bad_field(path, f"{path} has no effect here: {field.says}")
            add_unread(unread, path)
    return given


def add_unread(unread: list[str], path: str) -> None:
    """Note what is not read of a request, up to `MOST_UNREAD`: a header names it."""
    if len(unread) < MOST_UNREAD:
        unread.append(path)


def check_unread(unread: Sequence[str]) -> None:
    """Raise if anything in a request is not read here: `[gateway] unknown_fields = "refuse"`.

    Raises:
        Failure: something is; the message names the first.
    """
    if unread:
        path = unread[0]
        raise bad_field(path, f"{path} is not known here, or has no effect: leave it out")


def whole_numbers(given: dict[str, Any]) -> None:
    """Make `5.0` of a field that takes integers the same as `5`, as JavaScript does."""
    for name in WHOLE & given.keys():
        value = given[name]
        if isinstance(value, float) and value.is_integer():
            given[name] = int(value)


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
