"""The schema for editors: that of the code, with every key of the example."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mlxsup.cli.schema_file import schema_text
from mlxsup.supervisor.config.schema import config_schema
from mlxsup.supervisor.config.tables import (
    ModelTable,
    RestartTable,
    SupervisorTable,
)

EXAMPLE = Path(__file__).parents[2] / "config.example.toml"
SCHEMA = EXAMPLE.parent / "cli" / "mlxsup.schema.json"


def test_the_schema_that_is_printed_is_that_of_the_code_and_the_example_names_it() -> None:
    # Made with: python tools/config_documents.py
    text = json.dumps(config_schema(), indent=2, ensure_ascii=False)
    assert SCHEMA.read_text() == text + "\n"
    assert schema_text() == text
    first = EXAMPLE.read_text().splitlines()[0]
    assert first == "#:schema cli/mlxsup.schema.json"


def test_the_schema_knows_every_key_of_the_example_with_its_default() -> None:
    schema = config_schema()
    tables = schema["$defs"]
    values = tomllib.loads(EXAMPLE.read_text())
    model = values["models"]["smollm2"]
    kinds: list[tuple[dict[str, Any], type[BaseModel]]] = [
        (values["supervisor"], SupervisorTable),
        (model, ModelTable),
        (model["restart"], RestartTable),
    ]
    for given, kind in kinds:
        properties = tables[kind.__name__]["properties"]
        # The example has repo in a comment: it takes the place of path.
        assert set(properties) - {"repo"} == set(given)
        assert tables[kind.__name__]["additionalProperties"] is False
        for key, entry in properties.items():
            assert re.fullmatch(r"[A-Z\"].*\. Takes .+\.", entry["description"]), key
            if key.endswith("_s"):
                assert [choice["type"] for choice in entry["anyOf"]] == ["number", "string"]
            if key not in ("path", "repo", "restart", "sampling", "fake", "presets"):
                assert entry["default"] == kind.model_fields[key].default
    assert "null" not in json.dumps(schema)
