"""Grammars of tool calls as families of models write them, in llguidance's variant of Lark.

Such a grammar begins behind the mark that begins a call. A form is a text in which

    ~             stands for white space, or none
    $name         for the name of a function as JSON, $plain for the name as it is
    $arguments    for the JSON of its arguments
    $field        for the name under which JSON has them
    $key          for the name of an argument in tags, $is_text for whether it is one
    $type         for what JSON may say before the name
    $id, $number  for what tells a call from others
    $end          for the mark that ends a call

and all else for itself. No MLX here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .tool_values import types_of

WRITTEN = {"whitespace_pattern": r"\n?[ \t]{0,40}", "lenient": True}
"""How the JSON of arguments may be spaced: as templates do it, densely, or on lines. Keywords that
llguidance does not know are left out, not refused."""

ANY_ARGUMENTS = {"type": "object"}
"""The schema of arguments that need not match one."""

_ATOMS = {
    "~": "SPACE?",
    "$field": r'("\"arguments\"" | "\"parameters\"")',
    "$type": r'("\"type\"" SPACE? ":" SPACE? "\"function\"" SPACE? "," SPACE?)?',
    "$id": "/[0-9a-zA-Z_-]{1,64}/",
    "$number": "/[0-9]{1,4}/",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a family writes calls behind the mark that begins them.

    Attributes:
        one: the forms of one call.
        begin: what may come before the first call, one of these.
        between: what comes before a further one; empty: there is none.
        end: what comes behind the last.
    """

    one: tuple[str, ...]
    begin: tuple[str, ...] = ("~",)
    between: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagForm:
    """How a family writes calls whose arguments stand between tags, behind the mark that begins
    them.

    Strings without a list of values are written as they are, so that their patterns and lengths
    are not held to. One that shows the tags themselves lets go of its call.

    Attributes:
        call: begins one call.
        argument: begins an argument.
        close: ends its value.
        last: ends the call.
        end: what comes behind the last call.
        is_on_lines: true if a line break on each side of a value belongs to the tags.
        may_repeat: true if another call may follow before the end.
    """

    call: str
    argument: str
    close: str
    last: str
    end: str = "~$end"
    is_on_lines: bool = False
    may_repeat: bool = False

    @property
    def opening(self) -> str:
        """Return what comes before the name of an argument."""
        return self.argument.partition("$key")[0]


def call_grammar(
    forms: Sequence[CallForm | TagForm],
    tools: Sequence[tuple[str, Any]],
    *,
    ends: Sequence[str] = (),
    special: Mapping[str, int],
) -> str:
    """Return the grammar of calls; empty if they have none.

    Args:
        forms: one of them.
        tools: the names of the functions, and the schemas of their arguments.
        ends: the marks that end a call.
        special: the ids of the tokens that are no text, by what they stand for.
    """
    writer = _Writer(ends, special)
    forms = [form for form in forms if writer.can_write(form)]
    if not forms:
        return ""
    lines = ["start: " + " | ".join(f"form{place}" for place in range(len(forms)))]
    for place, form in enumerate(forms):
        if isinstance(form, TagForm):
            lines += _tag_rules(writer, form, place, tools)
        else:
            lines += _json_rules(writer, form, place, tools)
    return "\n".join([*lines, r"SPACE: /[ \t\r\n]{1,40}/"])


def _json_rules(
    writer: _Writer, form: CallForm, place: int, tools: Sequence[tuple[str, Any]]
) -> Iterator[str]:
    """Yield the rules of a form whose arguments are JSON."""
    begin = " | ".join(writer.lark(text) or '""' for text in form.begin)
    more = f" ({writer.lark(form.between)} one{place})*" if form.between else ""
    yield f"form{place}: ({begin}) one{place}{more} {writer.lark(form.end)}"
    yield f"one{place}: " + " | ".join(f"call{place}_{number}" for number in range(len(tools)))
    for number, (name, schema) in enumerate(tools):
        own = f"{place}_{number}"
        arguments = {"$arguments": f"arguments{own}"}
        written = " | ".join(writer.lark(text, name, arguments) for text in form.one)
        yield f"call{own}: {written}"
        # Each is a root of its own, to which its references are relative.
        yield f"arguments{own}: %json {json.dumps(schema | {'x-guidance': WRITTEN})}"


def _tag_rules(
    writer: _Writer, form: TagForm, place: int, tools: Sequence[tuple[str, Any]]
) -> Iterator[str]:
    """Yield the rules of a form whose arguments stand between tags.

    A text ends where its tag is closed and what follows goes on: the tag alone may be a part of it.
    """
    one = f"one{place}"
    again = f" | SPACE? {one}" if form.may_repeat else ""
    yield f"form{place}: SPACE? {one}"
    yield f"{one}: " + " | ".join(f"call{place}_{number}" for number in range(len(tools)))
    yield f"rest{place}: {writer.lark(form.end) or chr(34) * 2}{again}"
    opening, close, last = map(writer.regex, (form.opening, form.close, form.last))
    if not writer.special_in(form.close):
        space = r"[ \t\r\n]*"
        going_on = f"{close}{space}({opening}|{last})"
        yield f"TEXT{place}: /(?s:.*)/ & ~/(?s:.*)({going_on}|{opening})(?s:.*)/"
        yield f"OPEN{place}: TEXT{place} & ~/(?s:.*){close}{space}/"
        yield f"next{place}[lazy]: TEXT{place} /{close}{space}{opening}/"
        yield f"last{place}[lazy]: TEXT{place} /{close}{space}{last}/"
        yield f"open{place}[lazy]: OPEN{place} /{opening}/"
    for number, (name, schema) in enumerate(tools):
        own = f"{place}_{number}"
        can_hold = schema.get("additionalProperties") is False and not _WHOLE & schema.keys()
        yield f"call{own}: {writer.lark(form.call, name)}" + (f" more{own}_0" if can_hold else "")
        if can_hold:
            yield from _argument_rules(writer, form, place, own, schema)


_WHOLE = frozenset({"$ref", "anyOf", "oneOf", "allOf", "patternProperties", "if"})
"""Keywords of parameters that are no list of properties."""


def _argument_rules(
    writer: _Writer, form: TagForm, place: int, own: str, schema: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the rules of one function's arguments: `more` with the tag that begins the next one,
    `key` behind it, and `value`."""
    properties = list((schema.get("properties") or {}).items())
    required = schema.get("required") or ()
    close, last = writer.lark(form.close), f"{writer.lark('~' + form.last)} rest{place}"
    suffix = form.argument.partition("$key")[2]
    line = r'"\n"' if form.is_on_lines else ""
    for number, (key, one) in enumerate(properties):
        name, following = f"{own}_{number}", f"{own}_{number + 1}"
        has_more = number + 1 < len(properties)
        types = types_of(one, schema)
        is_text = not types or "string" in types
        may_end = not any(key in required for key, _ in properties[number + 1 :])
        more = [f"{writer.lark('~' + form.opening)} key{name}"]
        keys = [
            f"{_quoted(key)} {writer.lark(suffix, '', {'$is_text': _quoted(str(is_text).lower())})}"
            f" value{name}"
        ]
        if key not in required:
            keys += [f"key{following}"] if has_more else []
            more += [last] if may_end else []
        yield f"more{name}: " + " | ".join(more)
        yield f"key{name}: " + " | ".join(keys)
        words = [word for word in _words(one) if isinstance(word, str)]
        if "string" in types and words:
            allowed = " | ".join(map(_quoted, words))
            yield f"value{name}: {line} ({allowed}) {line} {close} more{following}"
        elif is_text and (mark := writer.special_in(form.close)):
            before, _, after = form.close.partition(mark)
            text = f"/(?s:.*){writer.regex(before)}/"
            yield f"value{name}: {text} {writer.lark(mark + after)} more{following}"
        elif is_text:
            ways = [f"next{place} key{following}"] if has_more else []
            ways += [f"last{place} rest{place}"] if may_end else []
            yield f"value{name}: " + " | ".join([*ways, f"open{place}"])
        else:
            yield f"value{name}: SPACE? data{name} SPACE? {close} more{following}"
            yield f"data{name}: %json {json.dumps(_alone(one, schema))}"
    yield f"more{own}_{len(properties)}: {last}"


def _words(schema: Any) -> list[Any]:
    """Return the values that a schema lists; none if it lists none."""
    if not isinstance(schema, Mapping):
        return []
    return [schema["const"]] if "const" in schema else list(schema.get("enum") or ())


def _alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a value with what it may refer to."""
    known = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**known, **schema, "x-guidance": WRITTEN}


class _Writer:
    """Writes forms in Lark.

    Args:
        ends: the marks that end a call.
        special: the ids of the tokens that are no text, by what they stand for.
    """

    def __init__(self, ends: Sequence[str], special: Mapping[str, int]) -> None:
        self._ends = ends
        self._special = special

    def can_write(self, form: CallForm | TagForm) -> bool:
        """True unless a text in tags ends with text behind which comes what is none."""
        if isinstance(form, CallForm):
            return True
        lasts = self._ends if form.last == "$end" else [form.last]
        return bool(self.special_in(form.close)) or not any(map(self.special_in, lasts))

    def special_in(self, text: str) -> str:
        """Return the first mark in a text that is a token and no text; empty if there is none."""
        marks = [mark for mark in self._special if mark in text]
        return min(marks, key=lambda mark: (text.index(mark), -len(mark)), default="")

    def regex(self, text: str) -> str:
        """Return a regular expression of a form without white space and names."""
        texts = self._ends if text == "$end" else [text]
        return "(" + "|".join(re.escape(one).replace("/", r"\/") for one in texts) + ")"

    def lark(self, form: str, name: str = "", own: Mapping[str, str] | None = None) -> str:
        """Return a form as an expression.

        Args:
            form: the form.
            name: of the function.
            own: expressions for what stands for something else.
        """
        marks = {mark: f"<[{token}]>" for mark, token in self._special.items() if mark in form}
        names = {"$name": _quoted(json.dumps(name, ensure_ascii=False)), "$plain": _quoted(name)}
        known = {**_ATOMS, **names, **(own or {}), **marks}
        if "$end" in form:
            ends = " | ".join(map(self.lark, self._ends))
            known["$end"] = f"({ends})" if ends else ""
        atoms = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        parts = [part for part in re.split(f"({atoms})", form) if part]
        return " ".join(known[part] if part in known else _quoted(part) for part in parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------- families
_CALL = '{~$type"name"~:~$name~,~$field~:~$arguments~}'
BARE = CallForm(one=(_CALL,))
"""Of JSON without marks."""
JSON = CallForm(one=(_CALL,), end="~$end")
JSON_LIST = CallForm(one=(_CALL,), begin=("~[~",), between="~,~", end="~]~$end")
