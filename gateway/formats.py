"""Reads the format of an answer, which requests ask for in several ways."""

from __future__ import annotations

from typing import Any

from .failure import bad_field
from .fields import Field, Use, check_fields, ignored

FORMAT_FIELDS = (
    Field("type", Use.USED),
    Field("schema", Use.USED),
    Field("json_schema", Use.USED),
    Field("regex", Use.USED),
    Field("strict", Use.USED),
    *ignored("name", "description"),
)

_TAKES = "takes the type text, json_object, json_schema (with a schema) or regex"


def read_format(form: Any, path: str, unread: list[str]) -> dict[str, Any]:
    """Return a format as `generate` takes it.

    Chats have the schema within `json_schema`, responses and messages have it beside the type, and
    llama.cpp and LM Studio have one in a `json_object`, too.

    Raises:
        Failure: it is none.
    """
    if not isinstance(form, dict):
        raise bad_field(path, f"{path} {_TAKES}")
    read = check_fields(form, FORMAT_FIELDS, unread, within=path)
    if isinstance(inner := read.get("json_schema"), dict):
        read |= check_fields(inner, FORMAT_FIELDS, unread, within=f"{path}.json_schema")
    match read:
        case {"type": "json_schema" | "json_object", "schema": dict(schema)}:
            return schema_format(schema, is_strict=read.get("strict") is True)
        case {"type": "json_object" | "text" as kind} if "schema" not in read:
            return {"type": kind}
        case {"type": "regex", "regex": str(regex)}:
            return {"type": "regex", "regex": regex}
    raise bad_field(path, f"{path} {_TAKES}")


def schema_format(schema: dict[str, Any], *, is_strict: bool = False) -> dict[str, Any]:
    """Return the format of JSON that matches a schema.

    Args:
        schema: of the JSON.
        is_strict: true if its objects take only the properties that it names.
    """
    strict = {"strict": True} if is_strict else {}
    return {"type": "json_schema", "json_schema": {"schema": schema, **strict}}
