"""The fields of requests: what each is for, and how those that several APIs share are read.

Null is the same as leaving a field out, whatever its name. A field that cannot change the text of
an answer is accepted. One that asks for another answer than it would get is refused. A hint that
cannot be followed, or a name that is not known here, is left out and named in the answer's header
`x-mlxsup-ignored`; `[gateway] unknown_fields = "refuse"` refuses it. Unknown fields of messages,
their parts and items are not looked at: they describe what was said, and ask for nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlxsup.client.parameters import MAX_LIMIT_S
from mlxsup.client.thinking import thinking_arguments
from mlxsup.protocol.ids import MAX_ID_CHARACTERS
from mlxsup.protocol.parameters import NUMBERS
from mlxsup.protocol.text import parse_duration

from . import limits
from .ask import TEMPLATE
from .failure import bad_field, bad_value

WHOLE = frozenset(
    {
        *(name for name, number in NUMBERS.items() if number.is_integer),
        *("n", "logprobs", "max_completion_tokens", "max_output_tokens"),
    }
)
"""Fields that take an integer."""

MOST_UNREAD = 32
"""So many of the fields that are not read are named."""

TYPES: Mapping[type, str] = {
    bool: "true or false", int: "an integer", str: "text", list: "a list", dict: "an object",
}  # fmt: skip
"""The types of JSON that a field may have to be of, as errors call them."""


class Use(StrEnum):
    """What becomes of a field; the value is the word that the document has."""

    USED = "used"
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
        takes: its type; None if that is checked elsewhere.
        fields: those that an object has.
    """

    name: str
    use: Use
    says: str = ""
    neutral: tuple[Any, ...] = ()
    takes: type | None = None
    fields: tuple[Field, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        """True if this value of a field without effect changes nothing."""
        # Not `in`: 1 equals True.
        return any(type(one) is type(value) and one == value for one in self.neutral)


def used(name: str, says: str = "", takes: type | None = None) -> Field:
    """Return a field that is read, of a type if that is all there is to check."""
    return Field(name, Use.USED, says, takes=takes)


def object_of(name: str, says: str, *fields: Field) -> Field:
    """Return a field that is read, and is an object with these fields."""
    return Field(name, Use.USED, says, takes=dict, fields=fields)


def passed(*names: str) -> tuple[Field, ...]:
    """Return parameters of `generate`, which says what they are for."""
    return tuple(used(name) for name in names)


def ignored(*names: str) -> tuple[Field, ...]:
    """Return fields that cannot change the text of an answer."""
    return tuple(Field(name, Use.IGNORED) for name in names)


def hints(neutral: tuple[Any, ...], *names: str) -> tuple[Field, ...]:
    """Return fields that cannot be followed; these values of them change nothing."""
    return tuple(Field(name, Use.HINT, neutral=neutral) for name in names)


def time_limits() -> tuple[Field, ...]:
    """Return limits of one request: the daemon's, by their own names."""
    return (
        used("timeout_s", "seconds until the last token; then 504 "
             "(`deadline_exceeded`), or in a stream an error event; 0: no limit"),
        used("queue_timeout_s", "seconds in the queue; then 503 (`queue_timeout`); "
             "0: no limit; without it that of the configuration"),
        used("first_token_timeout_s", "seconds until the first token; then 504 "
             "(`deadline_exceeded`); 0: no limit; without it that of the configuration"),
    )  # fmt: skip


KEEP_ALIVE = used(
    "keep_alive",
    "how long the model stays loaded once it is idle: seconds, or a text such as `5m`; 0: unload it"
    " then; below 0: keep it",
)

OF_EVERY_REQUEST = (
    used("model", "the name of a model of the configuration"),
    KEEP_ALIVE,
    *passed("priority"),
    *time_limits(),
)
"""Fields that say who answers and when, and nothing of the answer."""


def check_fields(
    values: Mapping[str, Any], fields: Sequence[Field], unread: list[str], within: str = ""
) -> dict[str, Any]:
    """Return the fields that mean something here, without those that are null.

    Args:
        values: of a request, or of a part of one.
        fields: those that there are.
        unread: gets the paths of the others.
        within: the path of the part, `stream_options`; empty for the whole request.

    Raises:
        Failure: a field is of another type, or would change the answer if it had an effect.
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
            if field.takes is not None and type(value) is not field.takes:
                raise bad_value(path, TYPES[field.takes], value)
            is_object = bool(field.fields)
            given[name] = check_fields(value, field.fields, unread, path) if is_object else value
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
    """Raise if anything in a request is not read here: `[gateway] unknown_fields = "refuse"`."""
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
        raise bad_field("model", "model must be the name of a model; GET /v1/models lists them")
    if len(model) > MAX_ID_CHARACTERS:
        message = f"model must be text of 1 to {MAX_ID_CHARACTERS} characters, not {len(model)}"
        raise bad_field("model", f"{message}; GET /v1/models lists the names")
    return model


def check_list(given: Any, path: str, things: str, most: int = limits.MAX_ITEMS) -> list[Any]:
    """Return a list, after a check that it is one and not too long."""
    if not isinstance(given, list):
        raise bad_value(path, f"a list of {things}", given)
    check_count(given, path, things, most)
    return given


def check_chat(given: Any) -> list[Any]:
    """Return the messages of a chat, which are not looked at."""
    if given == []:
        raise bad_field(
            "messages", "messages must be a list of at least one message, not an empty list"
        )
    return check_list(given, "messages", "messages")


def check_count(values: Sized, path: str, things: str, most: int = limits.MAX_ITEMS) -> None:
    """Raise if a list is too long."""
    if len(values) > most:
        raise bad_field(
            path, f"{path} must have at most {most} {things}, not {len(values)}: send fewer"
        )


# ---------------------------------------------------------------- formats


FORMAT_FIELDS = (
    used("type"),
    used("schema"),
    used("json_schema"),
    used("regex"),
    used("value"),
    *ignored("name", "description", "strict"),
)

_EXPECTED = "must be of type text, json_object, json_schema (with a schema) or regex"


def read_format(form: Any, path: str, unread: list[str]) -> dict[str, Any]:
    """Return a format as `generate` takes it.

    Chats have the schema within `json_schema`, responses and messages have it beside the type, and
    llama.cpp and LM Studio have one in a `json_object`, too. Hugging Face's client and TGI have
    schema and expression as `value`.
    """
    if not isinstance(form, dict):
        raise bad_field(path, f"{path} {_EXPECTED}")
    read = check_fields(form, FORMAT_FIELDS, unread, within=path)
    if isinstance(inner := read.get("json_schema"), dict):
        read |= check_fields(inner, FORMAT_FIELDS, unread, within=f"{path}.json_schema")
    match read:
        case {"type": "json_schema" | "json_object", "schema": dict(schema)} | {
            "type": "json_object" | "json",
            "value": dict(schema),
        }:
            return schema_format(schema)
        case {"type": "json_object" | "text" as kind} if not {"schema", "value"} & read.keys():
            return {"type": kind}
        case {"type": "regex", "regex": str(regex)} | {"type": "regex", "value": str(regex)}:
            return {"type": "regex", "regex": regex}
    raise bad_field(path, f"{path} {_EXPECTED}")


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the format of JSON that matches a schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}


# ---------------------------------------------------------------- reasoning


def add_to_template(given: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Add arguments of the chat template, unless the request has them itself."""
    own = given.get(TEMPLATE, {})
    if extra and isinstance(own, dict):  # otherwise `generate` says what is wrong with it
        given[TEMPLATE] = {**extra, **own}


def think_arguments(think: Any, path: str) -> dict[str, Any]:
    """Return the arguments of the chat template for Ollama's `think`: yes, no, or an effort."""
    if isinstance(think, bool):
        return thinking_arguments(thinks=think)
    if not isinstance(think, str):
        raise bad_value(path, "true, false or an effort", think)
    return {**thinking_arguments(thinks=True), **effort_arguments(think, path)}


def effort_arguments(effort: Any, path: str) -> dict[str, Any]:
    """Return the arguments of the chat template for an effort; `none` means no reasoning.

    Raises:
        Failure: it is no text.
    """
    if not isinstance(effort, str):
        raise bad_value(path, "text", effort)
    return {
        "reasoning_effort": effort,
        **(thinking_arguments(thinks=False) if effort == "none" else {}),
    }


# ---------------------------------------------------------------- keep_alive


FOR_EVER = -1.0
KEEP_ALIVE_NAMES = ("keep_alive", "ttl")
"""How long a model stays once it is idle: Ollama's name, and LM Studio's."""

_WITH_UNIT = re.compile(r"[\d.]+[a-z]+")


def read_keep_alive(given: dict[str, Any]) -> None:
    """Replace both names by the argument of `generate`.

    Raises:
        Failure: a value is no time, or both are there.
    """
    named = [name for name in KEEP_ALIVE_NAMES if name in given]
    if len(named) > 1:
        raise bad_field("ttl", "ttl and keep_alive mean the same; send only one of them")
    for name in named:
        given["keep_alive"] = _seconds(name, given.pop(name))


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
        name, f'{name} must be seconds, text such as "5m", or -1 to keep the model loaded'
    )
