"""Changing one value of a JSON file leaves everything else as it was, comments included."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.cli.connecting.commented_json import Named, NotJson, NotThere, value_of, with_value

COMMENTED = """\
// My settings
{
    "theme": "dark", // as it must be
    /* fonts { */
    "font": {"size": 12},
    "servers": [
        {"name": "a", "url": "x"}, // the first
    ],
    // the end
}
"""


def test_a_new_key_comes_last_and_every_comment_stays() -> None:
    new = with_value(COMMENTED, ("mlx", "url"), "http://x")
    assert new == COMMENTED.replace(
        "    // the end\n}", '    // the end\n    "mlx": {\n        "url": "http://x"\n    }\n}'
    )
    assert value_of(new) == value_of(COMMENTED) | {"mlx": {"url": "http://x"}}


def test_a_comma_is_added_behind_the_value_and_not_behind_its_comment() -> None:
    text = '{\n  "a": 1 // one\n}\n'
    assert with_value(text, ("b",), 2) == '{\n  "a": 1, // one\n  "b": 2\n}\n'


def test_a_value_that_is_there_is_replaced_in_its_place() -> None:
    new = with_value(COMMENTED, ("theme",), "light")
    assert new == COMMENTED.replace('"dark"', '"light"')
    assert with_value(COMMENTED, ("font", "size"), 14) == COMMENTED.replace("12", "14")


def test_an_object_of_a_list_is_found_by_its_name_or_appended() -> None:
    new = with_value(COMMENTED, ("servers", Named("a"), "url"), "y")
    assert new == COMMENTED.replace('"x"', '"y"')
    new = with_value(COMMENTED, ("servers", Named("b")), {"name": "b"})
    assert value_of(new)["servers"] == [{"name": "a", "url": "x"}, {"name": "b"}]
    assert "// the first\n" in new


@pytest.mark.parametrize("text", ["", "\n", "// nothing yet\n", "{}", "{ }\n", "\ufeff{}"])
def test_an_empty_file_gets_an_object(text: str) -> None:
    new = with_value(text, ("a", "b"), [1])
    assert value_of(new) == {"a": {"b": [1]}}
    assert "// nothing yet" in new or "//" not in text
    assert value_of(with_value("", (Named("a"),), {"name": "a"})) == [{"name": "a"}]


@pytest.mark.parametrize("quoted", ['"// no comment"', '"/* none */"', '"}"', '"\\""', '"\\\\"'])
def test_what_looks_like_a_comment_or_an_end_within_a_text_is_none(quoted: str) -> None:
    text = f'{{"a": {quoted}, "b": 1}}'
    assert value_of(text) == json.loads(text)
    assert value_of(with_value(text, ("b",), 2)) == json.loads(text) | {"b": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1, column 2"),
        ('{\n "a" 1}', "a colon is missing (line 2, column 6)"),
        ('{"a": 1 "b": 2}', "a comma or } is missing (line 1, column 9)"),
        ('{"a": nope}', "nope is no value"),
        ('{"a": "x}', "line 1, column 7"),
        ("{} {}", "nothing should follow"),
        ("{,}", "line 1, column 2"),
        ("/* {}", "line 1, column 1"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_said_with_its_place(text: str, words: str) -> None:
    with pytest.raises(NotJson) as error:
        with_value(text, ("a",), 1)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ('{"a": 1}', ("a", "b"), "a is not an object"),
        ("[]", ("a",), "the whole file is not an object"),
        ('{"a": {}}', ("a", Named("b")), "a is not a list"),
    ],
)
def test_a_path_through_another_type_is_refused(text: str, path: Any, words: str) -> None:
    with pytest.raises(NotThere, match=words):
        with_value(text, path, 1)


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
KEYS = st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
COMMENTS = st.sampled_from(["", " ", "\n", "\t", "// it's {\n", '/* " */', "\r\n"])


@st.composite
def commented(draw: st.DrawFn, value: Any) -> str:
    """The value as JSON, with comments anywhere and commas before closing brackets."""

    def text_of(one: Any) -> str:
        def gap() -> str:
            blank: str = draw(COMMENTS)
            return blank

        if isinstance(one, dict):
            parts = [
                f"{gap()}{json.dumps(key)}{gap()}:{gap()}{text_of(inner)}{gap()}"
                for key, inner in one.items()
            ]
        elif isinstance(one, list):
            parts = [f"{gap()}{text_of(inner)}{gap()}" for inner in one]
        else:
            return json.dumps(one)
        is_trailing: bool = draw(st.booleans())
        comma = "," + gap() if parts and is_trailing else ""
        brackets = "{}" if isinstance(one, dict) else "[]"
        return f"{brackets[0]}{gap()}{','.join(parts)}{comma}{brackets[1]}"

    return f"{draw(COMMENTS)}{text_of(value)}{draw(COMMENTS)}"


@given(st.data())
def test_exactly_the_value_at_the_path_changes(data: st.DataObject) -> None:
    before = data.draw(st.dictionaries(KEYS, VALUES, max_size=4))
    text = data.draw(commented(before))
    assert value_of(text) == before
    path: list[str] = data.draw(st.lists(KEYS, min_size=1, max_size=3))
    value = data.draw(VALUES)
    expected: dict[str, Any] = copy.deepcopy(before)
    inner: Any = expected
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            with pytest.raises(NotThere):
                with_value(text, path, value)
            return
    inner[path[-1]] = value
    new = with_value(text, path, value)
    assert value_of(new) == expected
    assert value_of(with_value(new, path, value)) == expected
    if path[0] not in before:
        for comment in ("// it's {\n", '/* " */'):
            assert new.count(comment) >= text.count(comment)
