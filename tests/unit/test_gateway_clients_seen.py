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


def is_possible(schema: Any, text: str) -> bool:
    """Return whether an answer in the form of a schema may be this text."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        closed(schema), overrides={"whitespace_flexible": False, "lenient": True}
    )
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    tokens = list(text.encode())
    is_read = matcher.try_consume_tokens(tokens) == len(tokens)
    return is_read and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("date-time", "2026-11-30T23:59:59.5+01:00", "2026-11-30T23:59:60Z"),
        ("date-time", "0999-01-01T00:00:00Z", "0000-01-01T00:00:00Z"),
        ("time", "23:59:59Z", "23:59:60Z"),
        ("date", "0010-01-01", "0000-01-01"),
        ("uuid4", "123e4567-e89b-42d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
        ("uuid7", "123e4567-e89b-72d3-a456-426614174000", "not a uuid"),
    ],
)
def test_format_is_one_that_pydantic_and_javascript_can_read(
    form: str, right: str, wrong: str
) -> None:
    schema = with_properties(a={"type": "string", "format": form})
    assert compiled(schema) == (False, [])
    assert is_possible(schema, json.dumps({"a": right}, separators=(",", ":")))
    assert not is_possible(schema, json.dumps({"a": wrong}, separators=(",", ":")))


@pytest.mark.parametrize(
    "names",
    [
        {"enum": ["a", "b"]},
        {"type": "string", "pattern": "^[ab]$"},
        {"$ref": "#/$defs/Side"},
        {"$ref": "/$defs/Side"},
    ],
)
def test_keys_of_a_map_are_those_of_its_enum_or_pattern(names: dict[str, Any]) -> None:
    """So pydantic sends `dict[Side, int]`, and zod a record."""
    sides = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    schema = with_properties(m=sides) | {"$defs": {"Side": {"type": "string", "enum": ["a", "b"]}}}
    assert compiled(schema) == (False, [])
    assert is_possible(schema, '{"m":{"a":1,"b":2}}')
    assert is_possible(schema, '{"m":{}}')
    assert not is_possible(schema, '{"m":{"c":1}}')
    assert not is_possible(schema, '{"m":{"a":"x"}}')


def test_record_of_one_key_has_it_and_no_other() -> None:
    names = {"propertyNames": {"const": "only"}, "additionalProperties": {}, "required": ["only"]}
    schema = with_properties(m={"type": "object"} | names)
    assert is_possible(schema, '{"m":{"only":null}}')
    assert not is_possible(schema, '{"m":{}}')
    assert not is_possible(schema, '{"m":{"only":null,"b":1}}')


@pytest.mark.parametrize("names", [{"minLength": 2}, {"$ref": "#/$defs/None"}, True, {"enum": 3}])
def test_other_names_of_keys_are_not_enforced_and_that_is_said(names: Any) -> None:
    schema = with_properties(m={"type": "object", "propertyNames": names})
    is_refused, said = compiled(schema)
    assert not is_refused
    assert "propertyNames" in said[0]


def test_property_that_is_never_there_is_not_written() -> None:
    schema = with_properties(b={"type": "integer"})
    schema["properties"] = {"a": {"not": {}}} | schema["properties"]
    assert compiled(schema) == (False, [])
    assert is_possible(schema, '{"b":1}')
    assert not is_possible(schema, '{"a":1,"b":1}')
