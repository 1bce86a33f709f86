"""The configuration as a JSON Schema, generated from the tables that check it; for editors."""

from __future__ import annotations

import re
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from mlxsup.protocol.text import DURATION_PATTERN

from ..core.settings import ANYONE
from .check import CLIENT_NAME
from .client_table import ClientTable
from .entry_text import MODEL_NAME
from .file_table import FileTable
from .gateway_table import GatewayTable
from .preset_table import PresetTable
from .sampling_table import SamplingTable
from .tables import ModelTable, RestartTable, SupervisorTable
from .values import AUTO, OFF, SIZE_PATTERN

DIALECT = "https://json-schema.org/draft/2020-12/schema"

SIZES = {
    "memory": (AUTO,),
    "memory_budget": (AUTO,),
    "cache_limit": (AUTO,),
    "prefix_cache": (AUTO,),
    "wired": (OFF, AUTO),
}
"""Keys that take a size without saying so in their name, and the words they take as well."""


COUNTS = {"max_parallel_prefills": AUTO}
"""Keys that take an integer from 1, and the word that they take as well."""


TABLES = (
    FileTable, SupervisorTable, GatewayTable, ClientTable, ModelTable, RestartTable, SamplingTable,
    PresetTable,
)  # fmt: skip


class _Generate(GenerateJsonSchema):
    """Generates a schema without the titles that pydantic derives from names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """See `GenerateJsonSchema`."""
        return False


def config_schema() -> dict[str, Any]:
    """The schema of a whole file.

    For each key it says what the key does, what it takes, and its default. Rules between keys, and
    about keys that a file leaves out, are checked by `mlxsup config check` alone.
    """
    schema = FileTable.model_json_schema(schema_generator=_Generate)
    tables = schema["$defs"]
    for table in TABLES:
        shape = schema if table is FileTable else tables[table.__name__]
        shape.pop("title", None)
        for name, entry in shape["properties"].items():
            field = table.model_fields[name]
            shape["properties"][name] = _readable(name, entry, field.title, field.description)
    client = f"^({re.escape(ANYONE)}|{CLIENT_NAME.pattern})$"
    schema["properties"]["clients"]["propertyNames"] = {"pattern": client}
    schema["properties"]["models"]["propertyNames"] = {"pattern": f"^{MODEL_NAME.pattern}$"}
    return {"$schema": DIALECT, "title": "mlxsup", **schema}


def _readable(
    name: str, entry: dict[str, Any], title: str | None, expected: str | None
) -> dict[str, Any]:
    """One key's part of the schema, for a person who writes the file."""
    # TOML has no null: a key without a value is left out.
    choices = [choice for choice in entry.pop("anyOf", []) if choice != {"type": "null"}]
    for choice in choices:
        entry |= choice
    if entry.get("default", "") is None:
        del entry["default"]
    for ours in ("title", "more", "unit"):
        entry.pop(ours, None)
    what = title or name
    entry["description"] = f"{what[:1].upper()}{what[1:]}. Takes {expected}."
    pattern = None
    if name.endswith("_s"):
        pattern = DURATION_PATTERN
    elif name.endswith("_bytes") or name in SIZES:
        pattern = "|".join([*SIZES.get(name, ()), SIZE_PATTERN])
        entry["type"] = "integer"
    elif name in COUNTS:
        pattern = COUNTS[name]
        entry |= {"type": "integer", "minimum": 1}
    if pattern is None:
        return entry
    limits = ("type", "minimum", "maximum", "exclusiveMinimum")
    number = {key: entry.pop(key) for key in limits if key in entry}
    return {"anyOf": [number, {"type": "string", "pattern": f"^({pattern})$"}], **entry}
