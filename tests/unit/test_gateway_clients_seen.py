"""Requests of other programs, and answers of their models, that were wrong here once.

Each was seen: with LiteLLM, pydantic 2.12, zod 4 and clients in Java, and with a small model.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxsup.worker.text.grammar import call_form, closed
from mlxsup.worker.text.tool_calls import ToolCallReader
from mlxsup.worker.text.tool_formats import parse_json_calls

llguidance = pytest.importorskip("llguidance")

DECIMAL = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}  # pydantic 2.12
DURATION = {"type": "string", "format": "duration", "pattern": r"^P(?!.*W)(?=\d|T\d)(\d+Y)?$"}


def compiled(schema: Any) -> tuple[bool, list[str]]:
    """Return whether llguidance refuses a schema, and the keywords that it does not enforce."""
    matcher = llguidance.LLMatcher
    grammar = matcher.grammar_from_json_schema(closed(schema), overrides={"lenient": True})
    is_refused, said = matcher.validate_grammar_with_warnings(grammar)
    return is_refused, said


def with_properties(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize("number", ["9e726", "-1e+400", "7" * 5000])
def test_number_that_is_too_large_to_pass_on_leaves_a_call_a_call(number: str) -> None:
    reader = ToolCallReader([{"function": {"name": "f"}}], seed=0)
    text = f'{{"name": "f", "arguments": {{"x": {number}, "y": 1.5, "z": 7}}}}'
    lines = reader.read(text, parse_json_calls)
    assert lines is not None
    function = json.loads(lines[0])["function"]
    assert json.loads(function["arguments"]) == {"x": number, "y": 1.5, "z": 7}


@pytest.mark.parametrize("schema", [DECIMAL, DURATION, {"anyOf": [{"type": "number"}, DECIMAL]}])
def test_pattern_that_looks_ahead_is_not_enforced_and_is_said_so(schema: dict[str, Any]) -> None:
    is_refused, said = compiled(with_properties(a=schema, b={"type": "string", "pattern": "^x$"}))
    assert not is_refused
    [warning] = said
    assert "(?!" in warning


def test_pattern_that_can_be_enforced_stays() -> None:
    schema = with_properties(a={"type": "string", "pattern": r"^[a-z]{2}\d$"})
    assert closed(schema)["properties"] == schema["properties"]
    assert compiled(schema) == (False, [])


@pytest.mark.parametrize("reference", ["#/$defs/City", "/$defs/City"])
def test_reference_into_the_schema_needs_no_mark(reference: str) -> None:
    schema = with_properties(a={"$ref": reference}) | {"$defs": {"City": {"const": "Rome"}}}
    assert compiled(schema) == (False, [])


def test_null_keyword_counts_as_left_out() -> None:
    odd = {"required": None, "additionalProperties": None, "minProperties": None}
    schema = {"type": "object", "properties": {"a": {"const": None, "enum": None}}, **odd}
    assert closed(schema) == {
        "type": "object",
        "properties": {"a": {"const": None}},
        "additionalProperties": False,
    }
    assert compiled(schema) == (False, [])


@pytest.mark.parametrize("required", [True, "a", [{}], [["a"]]])
def test_required_that_is_no_list_of_names_is_llguidances_to_judge(required: Any) -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": required}
    assert "additionalProperties" not in closed(schema)


@pytest.mark.parametrize(
    ("parameters", "is_open"),
    [
        ({"type": "object"}, False),
        ({"type": "object", "title": "Nothing", "properties": None}, False),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, True),
        ({"$ref": "#/$defs/A", "$defs": {"A": with_properties(a={"type": "integer"})}}, True),
    ],
)
def test_function_that_names_no_argument_takes_none(
    parameters: dict[str, Any], is_open: bool
) -> None:
    """Without names a small model would invent some until the limit."""
    [(_, schema)] = call_form([{"function": {"name": "now", "parameters": parameters}}])["tools"]
    assert (schema.get("additionalProperties") is not False) is is_open
    assert compiled(schema) == (False, [])
