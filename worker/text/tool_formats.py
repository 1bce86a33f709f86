"""How the families of models write tool calls, and a parser for each. No MLX here.

A parser takes the text between a format's markers and returns its calls. It accounts for every
character: text that it cannot place means `ValueError`, never a shortened value. A parser is asked
strictly first, and leniently once no more text can come that would make the call whole.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .call_grammars import JSON, JSON_LIST, CallForm, TagForm
from .tool_calls import CallIds, ToolCallParser, Tools
from .tool_values import JSON_VALUES, types_of, value_of

_SPACE = re.compile(r"\s*")
MOST_TRIES = 256
"""Places at which a value may end are tried this often; a text with more of them is no call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        name: the format's name, for docs and tests.
        begins: each of these markers begins a call.
        ends: each of these ends it; if empty, the end of the answer does.
        parse: reads the text between them, behind the header if one announces the call.
        call_ids: the form of the ids.
        starts: characters with which a call may begin behind its marker; empty: with any.
        has_bare_calls: whether text without markers is a call if it names a tool.
        shows_its_end: whether a whole call can be told from the beginning of a longer one, as JSON
            can; values between tags may contain any marker. If not, a marker that ends a call may
            be part of a value, until another call or the end of the answer follows.
        forms: those to which a grammar can hold a call behind its marker; empty: to none.
        unmarked: how a call begins whose marker the model has left out, with `{}` for the name of
            its function; empty if such a call is text.
    """

    name: str
    parse: ToolCallParser
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    call_ids: CallIds = CallIds.OURS
    starts: str = ""
    has_bare_calls: bool = False
    shows_its_end: bool = True
    forms: tuple[CallForm | TagForm, ...] = ()
    unmarked: str = ""


def _parse_nothing(text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
    raise ValueError("the form of calls is not known")


UNKNOWN = ToolFormat(name="unknown", parse=_parse_nothing)
"""Of a model that has no calls, or writes them in a way that is not known."""


# ---------------------------------------------------------------- JSON
_FENCE = re.compile(r"\s*```(?:json)?\s*(?P<inside>.*?)\s*(?:```)?\s*", re.DOTALL)


def json_values(text: str, *, is_lenient: bool = False) -> list[Any]:
    """Return JSON values that stand one after the other, with white space, commas or semicolons
    between them.

    Args:
        text: of a model.
        is_lenient: take the values out of a fence, and leave out brackets that close nothing.

    Raises:
        ValueError: there is something else.
    """
    if is_lenient and (fenced := _FENCE.fullmatch(text)):
        text = fenced["inside"]
    between = re.compile(r"[\s;,\]}]*" if is_lenient else r"[\s;,]*")
    values: list[Any] = []
    at = 0
    while (found := between.match(text, at)) and found.end() < len(text):
        if is_lenient and not values:
            found = _SPACE.match(text, at)
            assert found is not None
        value, at = JSON_VALUES.raw_decode(text, found.end())
        values += value if isinstance(value, list) else [value]
    return values


_CALL_KEYS = {"name", "tool_name", "function", "arguments", "parameters", "id", "type"}


def _json_call(value: Any) -> dict[str, Any]:
    """Return a call from JSON with any of the keys that families use.

    Raises:
        ValueError: the value is no call, or has arguments under no known key.
    """
    if not isinstance(value, dict):
        raise ValueError("a call is a map")
    inner = value.get("function")
    if isinstance(inner, dict):  # OpenAI's own form
        value = {"id": value.get("id"), **inner}
    names = [value[key] for key in ("name", "tool_name", "function") if key in value]
    keys = [key for key in ("arguments", "parameters") if key in value]
    if not names or (not keys and value.keys() - _CALL_KEYS):
        raise ValueError("no name, or no arguments")
    arguments = value[keys[0]] if keys else {}
    if isinstance(arguments, str):
        arguments = JSON_VALUES.decode(arguments) if arguments.strip() else {}
    call_id = {"id": value["id"]} if value.get("id") is not None else {}
    return {"name": names[0], "arguments": {} if arguments is None else arguments, **call_id}


def parse_json_calls(text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
    """Read `{"name": …, "arguments": {…}}`, one or several."""
    return [_json_call(value) for value in json_values(text, is_lenient=is_lenient)]


def parse_unmarked_calls(text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
    """Read JSON, or calls as Python writes them, or Llama's `NAME>{…}` behind `<function=`."""
    if found := _LLAMA.match(text):
        arguments, end = JSON_VALUES.raw_decode(text, found.end())
        if text[end:].strip():
            raise ValueError("more than a call")
        return [{"name": found["name"], "arguments": arguments}]
    start = text.lstrip()
    if start[:1] in ("{", "`") or (start[:1] == "[" and start[1:].lstrip()[:1] in ("{", "]")):
        return parse_json_calls(text, tools, is_lenient)
    return parse_python_calls(text, tools, is_lenient)


_LLAMA = re.compile(r"\s*(?P<name>[^\s<>{}()\"']+)>\s*(?=\{)")


def parse_fenced_calls(text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
    """Read a JSON list; a call of `directly_answer` means that the model calls nothing."""
    calls = parse_json_calls(text, tools, is_lenient)
    return [call for call in calls if call["name"] not in ("directly_answer", "directly-answer")]


DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_FENCE = re.compile(r"\s*(?P<name>[^\n]+)\n```json\n(?P<arguments>.*)\n```\s*", re.DOTALL)


def _deepseek_call(text: str) -> dict[str, Any]:
    """Read V3's and R1's `function<sep>NAME` with a fence of JSON, or V3.1's `NAME<sep>{…}`."""
    name, _, arguments = text.partition("<｜tool▁sep｜>")
    if fenced := _DEEPSEEK_FENCE.fullmatch(arguments):
        name, arguments = fenced["name"], fenced["arguments"]
    return {"name": name.strip(), "arguments": JSON_VALUES.decode(arguments)}


KIMI_CALL = "<|tool_call_begin|>"
_KIMI = re.compile(
    r"\s*(?P<id>(?:functions\.)?(?P<name>\S+?):\d+)\s*<\|tool_call_argument_begin\|>"
    r"(?P<arguments>.*)",
    re.DOTALL,
)


def _kimi_call(text: str) -> dict[str, Any]:
    """Read Kimi K2's `functions.NAME:0<|tool_call_argument_begin|>{…}`."""
    found = _KIMI.fullmatch(text)
    if found is None:
        raise ValueError("no call")
    arguments = JSON_VALUES.decode(found["arguments"])
    return {"id": found["id"], "name": found["name"], "arguments": arguments}


def in_sections(begin: str, end: str, read: Callable[[str], dict[str, Any]]) -> ToolCallParser:
    """Return a parser of calls that each have their own markers in a section.

    An end marker inside of a string ends nothing.

    Args:
        begin: begins a call; also the marker of the first, if no section is around it.
        end: ends a call.
        read: reads the text between them, or raises ValueError.
    """

    def parse(text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
        if not text.lstrip().startswith(begin):
            text = begin + text
        calls: list[dict[str, Any]] = []
        at = 0
        while text[at:].strip():
            start = text.find(begin, at)
            if start < 0 or text[at:start].strip():
                raise ValueError("no calls alone")
            start += len(begin)
            for stop in _places(text, end, start, is_cut_allowed=is_lenient):
                try:
                    calls.append(read(text[start:stop]))
                except ValueError:
                    continue
                at = stop + len(end)
                break
            else:
                raise ValueError("a call without its end")
        return calls

    return parse


def _places(text: str, end: str, at: int, *, is_cut_allowed: bool = False) -> Iterator[int]:
    """Yield where the end marker stands, and the end of the text if it may be missing.

    Raises:
        ValueError: there are more than `MOST_TRIES`.
    """
    for _ in range(MOST_TRIES):
        at = text.find(end, at)
        if at < 0:
            if is_cut_allowed:
                yield len(text)
            return
        yield at
        at += len(end)
    raise ValueError("too many ends")


_MISTRAL = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?"
    r"(?:\[ARGS\])?\s*(?=\{)"
)


def parse_mistral_calls(text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
    """Read a JSON list, or any number of `NAME[CALL_ID]ID[ARGS]{…}`, the id left out or not."""
    if text.lstrip()[:1] in ("[", "{"):
        return parse_json_calls(text, tools, is_lenient)
    calls: list[dict[str, Any]] = []
    at = 0
    while text[at:].strip():
        found = _MISTRAL.match(text, at)
        if found is None:
            raise ValueError("no call")
        arguments, at = JSON_VALUES.raw_decode(text, found.end())
        calls.append({"name": found["name"], "arguments": arguments, "id": found["id"]})
    return calls


# ---------------------------------------------------------------- Python
_PYTHON_PARTS = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|"""
    rf"(?P<key>\b(?:{'|'.join(keyword.kwlist)})\b)(?=\s*=(?!=))",
    re.DOTALL,
)
_KEYWORD = "ᜀ"
"""Stands before keys that are words of Python, as long as Python reads them."""

MOST_PYTHON = 20_000
"""Characters of Python that are in no string; Python reads them slowly."""


def parse_python_calls(text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
    """Read calls as Python writes them, one on each line or in a list: `f(city="Rome", days=2)`.

    Strings may have line breaks, and keys may be words of Python.
    """
    stripped = text.strip()
    if stripped[:1] == "[":
        if stripped[-1:] != "]":
            raise ValueError("a list without its end")
        stripped = stripped[1:-1].strip()
    if len(stripped) > MOST_PYTHON or "#" in stripped:
        code = _PYTHON_PARTS.sub("", stripped)
        if len(code) > MOST_PYTHON or "#" in code:
            raise ValueError("too much Python, or a comment")
    try:
        try:
            tree = ast.parse(stripped)
        except SyntaxError:
            tree = ast.parse(_PYTHON_PARTS.sub(_as_python, stripped))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no Python") from error
    nodes: list[ast.expr] = []
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("no call")
        value = statement.value
        nodes += value.elts if isinstance(value, ast.Tuple) else [value]
    return [_python_call(node) for node in nodes]


def _as_python(found: re.Match[str]) -> str:
    if found["key"]:
        return _KEYWORD + found["key"]
    return found[0].replace("\r", "\\r").replace("\n", "\\n")


def _python_call(node: ast.expr) -> dict[str, Any]:
    prefix = ""
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):  # a name with hyphens
        prefix, node = f"{ast.unparse(node.left).replace(' ', '')}-", node.right
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise ValueError("an argument without a name")
        value = ast.literal_eval(_PythonValues().visit(argument.value))
        arguments[argument.arg.removeprefix(_KEYWORD)] = value
    return {"name": prefix + ast.unparse(node.func), "arguments": arguments}


class _PythonValues(ast.NodeTransformer):
    """Models write JSON's words for Python's."""

    _WORDS = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._WORDS[node.id]) if node.id in self._WORDS else node


# ---------------------------------------------------------------- Gemma
@dataclass(frozen=True, slots=True)
class _Gemma:
    """Reader of `call:NAME{key:<quote>text<quote>,other:{…}}`, whose keys have no quotes.

    Strings may have other quotes, or none: no text that follows would make such a call another one.

    Attributes:
        quote: stands around strings.
    """

    quote: str

    def calls(self, text: str) -> list[dict[str, Any]]:
        """Return the calls.

        Raises:
            ValueError: the text is not calls alone.
        """
        calls: list[dict[str, Any]] = []
        at = 0
        while text[at:].strip(" \n\t,"):
            found = re.compile(r"[\s,]*call:(?P<name>[^{]*)(?=\{)").match(text, at)
            if found is None:
                raise ValueError("no call")
            arguments, at = self._inside(text, found.end() + 1, "}")
            calls.append({"name": found["name"].strip(), "arguments": dict(arguments)})
        return calls

    def _value(self, text: str, at: int, close: str) -> tuple[Any, int]:
        """Return the value that begins here, and where it ends; `close` ends what it is in."""
        at = self._skip(text, at)
        if text.startswith(self.quote, at):
            return self._string(text, at + len(self.quote), self.quote, close)
        if text[at : at + 1] == "{":
            items, at = self._inside(text, at + 1, "}")
            return dict(items), at
        if text[at : at + 1] == "[":
            items, at = self._inside(text, at + 1, "]")
            return [value for _, value in items], at
        if (found := _json_string(text, at)) and self._goes_on(text, found[1], close):
            return found
        if text[at : at + 1] in ('"', "'"):
            return self._string(text, at + 1, text[at], close)
        bare = re.compile(r"[^,{}\[\]]*").match(text, at)
        assert bare is not None
        word = bare[0].strip()
        try:
            return JSON_VALUES.decode(word), bare.end()
        except ValueError:
            if not word:
                raise ValueError("no value") from None
            return word, bare.end()

    def _inside(self, text: str, at: int, close: str) -> tuple[list[tuple[str, Any]], int]:
        """Return keys and values up to the closing bracket, and where it ends; those of a list
        have no keys."""
        found: list[tuple[str, Any]] = []
        while not text.startswith(close, at := self._skip(text, at)):
            key = ""
            if close == "}":
                key, at = self._key(text, at)
            value, at = self._value(text, at, close)
            found.append((key, value))
            at = self._next(text, at, close)
        return found, at + 1

    def _key(self, text: str, at: int) -> tuple[str, int]:
        if (found := _json_string(text, at)) and text.startswith(":", found[1]):
            return found[0], found[1] + 1
        for quote in (self.quote, '"'):
            if text.startswith(quote, at):
                end = text.find(f"{quote}:", at + len(quote))
                if end < 0:
                    raise ValueError("no key")
                return text[at + len(quote) : end], end + len(quote) + 1
        end = text.find(":", at)
        if end < 0 or not text[at:end].strip():
            raise ValueError("no key")
        return text[at:end].strip(), end + 1

    def _string(self, text: str, at: int, quote: str, close: str) -> tuple[str, int]:
        """Return the text up to a quote after which its map or list goes on, or ends."""
        for end in _places(text, quote, at):
            if self._goes_on(text, end + len(quote), close):
                return text[at:end], end + len(quote)
        raise ValueError("a string without its end")

    def _goes_on(self, text: str, at: int, close: str) -> bool:
        """True if a map or list goes on here, or ends."""
        at = self._skip(text, at)
        return text[at : at + 1] in (",", close)

    def _next(self, text: str, at: int, close: str) -> int:
        """Return the place after a comma, or of the closing bracket."""
        at = self._skip(text, at)
        if text[at : at + 1] == ",":
            return at + 1
        if text[at : at + 1] == close:
            return at
        raise ValueError("no comma and no end")

    @staticmethod
    def _skip(text: str, at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None
        return found.end()


def _json_string(text: str, at: int) -> tuple[str, int] | None:
    """Return the string of JSON that begins here, and where it ends; None if none does."""
    if text[at : at + 1] != '"':
        return None
    try:
        value, end = JSON_VALUES.raw_decode(text, at)
    except ValueError:
        return None
    return value, end


def parse_gemma(quote: str) -> ToolCallParser:
    """Return a parser of calls in Gemma's form, whose strings stand between these quotes."""
    return lambda text, tools, is_lenient: _Gemma(quote).calls(text)


# ---------------------------------------------------------------- tags
_WORDS = frozenset({"integer", "number", "boolean", "null"})
LONGEST_WORD = 400
"""Characters of a value of one of these types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Calls as `<call NAME> <argument KEY>VALUE</argument> … </call>`.

    Attributes:
        call: matches the beginning of a call, with the group `name`.
        end_call: ends it; empty if the end of the text does.
        argument: matches the beginning of an argument, with the group `key`, perhaps `type`.
        end_argument: ends its value; `{key}` in it stands for the argument's key.
        is_on_lines: whether one line break on each side of a value belongs to the tags.
        is_escaped: whether a value may stand in a CDATA section.
        has_entities: whether names and keys have `&quot;` and `&amp;`.
        block: matches what may begin one block of JSON instead of the arguments.
        end_block: ends it.
        opens: texts that open what `end_argument` or `end_call` closes; a value that contains more
            of them than of these is not over.
        is_nested: whether a value may be arguments in tags again: a map, or a list of `item`.
    """

    call: re.Pattern[str]
    end_call: str
    argument: re.Pattern[str]
    end_argument: str
    is_on_lines: bool = False
    is_escaped: bool = False
    has_entities: bool = False
    block: re.Pattern[str] | None = None
    end_block: str = ""
    opens: tuple[tuple[str, str], ...] = ()
    is_nested: bool = False

    def parse(self, text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
        """Return the calls; see `ToolCallParser`."""
        reader = _TagReader(self, text, tools, is_lenient)
        calls: list[dict[str, Any]] = []
        at = 0
        while text[at:].strip():
            call, at = reader.call(at)
            calls.append(call)
        if not calls:
            raise ValueError("no call")
        return calls


class _TagReader:
    """Reads one text of calls between tags, whose values may contain any of them.

    A value ends at the first end tag from which the rest reads as arguments and calls.
    """

    def __init__(self, tags: Tags, text: str, tools: Tools, is_lenient: bool) -> None:
        self._tags = tags
        self._text = text
        self._tools = tools
        self._is_lenient = is_lenient
        self._tries = 0

    def call(self, at: int) -> tuple[dict[str, Any], int]:
        """Return the call that begins here, and where it ends.

        Raises:
            ValueError: no call begins here.
        """
        tags = self._tags
        found = tags.call.match(self._text, at)
        if found is None:
            raise ValueError("no call")
        name = self._plain(found["name"])
        if tags.block is not None and (block := tags.block.match(self._text, found.end())):
            return self._block(name, block.end())
        parameters = self._tools.get(name, {})
        rest = self._arguments(found.end(), parameters, frozenset())
        if rest is None:
            raise ValueError("an argument that cannot be read")
        arguments, end = rest
        return {"name": name, "arguments": dict(reversed(arguments))}, end

    def _block(self, name: str, at: int) -> tuple[dict[str, Any], int]:
        """Return the call whose arguments are the JSON that begins here, and where it ends."""
        arguments, at = JSON_VALUES.raw_decode(self._text, self._skip(at))
        at = self._skip(at)
        if not self._text.startswith(self._tags.end_block, at):
            raise ValueError("a block without its end")
        end = self._end_of_call(self._skip(at + len(self._tags.end_block)))
        if end is None:
            raise ValueError("a call without its end")
        return {"name": name, "arguments": arguments}, end

    def _plain(self, name: str) -> str:
        """Return a name or a key without its quotes and escapes."""
        name = name.strip().strip("\"'")
        return (
            name.replace("&quot;", '"').replace("&amp;", "&") if self._tags.has_entities else name
        )

    def _arguments(
        self, at: int, parameters: Mapping[str, Any], seen: frozenset[str]
    ) -> tuple[list[tuple[str, Any]], int] | None:
        """Return the arguments from here on, last first, and the end of the call; None if the
        text does not read so."""
        text, tags = self._text, self._tags
        at = self._skip(at)
        end = self._end_of_call(at)
        if end is not None:
            return [], end
        found = tags.argument.match(text, at)
        if found is None:
            return None
        groups = found.groupdict()
        key = self._plain(groups["key"])
        if key in seen:
            return None
        schema = (parameters.get("properties") or {}).get(key)
        if kind := groups.get("type"):  # the model may say itself of which type a value is
            schema = {"type": kind}
        elif is_text := groups.get("is_text"):  # or whether it is a text
            schema = {"type": "string"} if is_text == "true" else {}
        end_argument = tags.end_argument.replace("{key}", groups["key"])
        for stop in self._stops(found.end(), end_argument, schema, parameters):
            self._tries += 1
            if self._tries > MOST_TRIES:
                return None
            rest = self._arguments(stop + len(end_argument), parameters, seen | {key})
            if rest is not None:
                rest[0].append((key, self._value(text[found.end() : stop], schema, parameters)))
                return rest
        return None

    def _stops(
        self, at: int, end_argument: str, schema: Any, parameters: Mapping[str, Any]
    ) -> Iterator[int]:
        """Yield where the value that begins here may end: after its JSON unless it may be a
        string, or else before each end tag that does not close a tag in the value itself."""
        text, tags = self._text, self._tags
        start = self._skip(at)
        types = types_of(schema, parameters)
        if text[start : start + 1] in ("{", "[") and "string" not in types:
            try:
                end = self._skip(JSON_VALUES.raw_decode(text, start)[1])
            except (ValueError, RecursionError):
                end = -1
            if end >= 0 and text.startswith(end_argument, end):
                yield end
                return
        surplus = [0] * len(tags.opens)
        longest = LONGEST_WORD if types and types <= _WORDS and not self._is_lenient else len(text)
        for stop in _places(text, end_argument, at):
            if stop - start > longest:
                return
            for number, (opening, closing) in enumerate(tags.opens):
                surplus[number] += text.count(opening, at, stop) - text.count(closing, at, stop)
            at = stop
            if self._is_lenient or max(surplus, default=0) <= 0:
                yield stop

    def _end_of_call(self, at: int) -> int | None:
        """Return the place after a call's end if one stands here and no more text follows that
        is no call."""
        text, end = self._text, self._tags.end_call
        if end and text.startswith(end, at):
            at += len(end)
        elif at < len(text) or (end and not self._is_lenient):
            return None
        after = self._skip(at)
        return at if after == len(text) or self._tags.call.match(text, after) else None

    def _value(self, text: str, schema: Any, parameters: Mapping[str, Any]) -> Any:
        tags = self._tags
        if tags.is_nested and (not text.strip() or tags.argument.match(text)):
            nested = self._nested(text, schema, parameters)
            if nested is not None:
                return nested
        if tags.is_escaped and (
            data := re.fullmatch(r"\s*<!\[CDATA\[(.*)\]\]>\s*", text, re.DOTALL)
        ):
            text = data[1]
        elif tags.is_on_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        return value_of(text, schema, parameters)

    def _nested(self, text: str, schema: Any, parameters: Mapping[str, Any]) -> Any:
        """Return the map or the list that a value in tags stands for; None if it is a text."""
        types = types_of(schema, parameters)
        if "string" in types:
            return None
        if not text.strip():  # so templates write empty ones
            return [] if "array" in types else {} if "object" in types else None
        known = schema if isinstance(schema, Mapping) else {}
        is_list = "array" in types or text.lstrip().startswith(ITEM)
        items: list[Any] = []
        values: dict[str, Any] = {}
        at = 0
        while text[at:].strip():
            found = self._tags.argument.match(text, at)
            if found is None:
                return None
            key = found["key"]
            end = self._tags.end_argument.replace("{key}", key)
            stop = _closing(text, found[0].strip(), end, found.end())
            if stop < 0:
                return None
            inner = known.get("items") if is_list else (known.get("properties") or {}).get(key)
            value = self._value(text[found.end() : stop], inner, parameters)
            items.append(value)
            values[key] = value
            at = stop + len(end)
        return items if is_list else values

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        assert found is not None
        return found.end()


def _closing(text: str, opening: str, end: str, at: int) -> int:
    """Return where the tag stands that closes one of which the inside begins here, of several of
    its name; -1 if none does."""
    depth = 1
    while (stop := text.find(end, at)) >= 0:
        depth += text.count(opening, at, stop) - 1
        if not depth:
            return stop
        at = stop + len(end)
    return -1


QWEN_TAGS = Tags(
    call=re.compile(r"\s*<function=(?P<name>[^\n<>]+)>"),
    end_call="</function>",
    argument=re.compile(r"<parameter=(?P<key>[^\n<>]+)>"),
    end_argument="</parameter>",
    is_on_lines=True,
    opens=(("<parameter=", "</parameter>"), ("<function=", "</function>")),
)


def _invoke_tags(prefix: str) -> Tags:
    """Return the tags `<invoke name="…">` and `<parameter name="…">` with a prefix."""
    named = r'\b[^>]*?\bname="?(?P<{}>[^"\n<>]+)"?'
    is_text = r'(?:\s+string="(?P<is_text>true|false)")?'
    return Tags(
        call=re.compile(rf"\s*<{prefix}invoke{named.format('name')}[^>]*>"),
        end_call=f"</{prefix}invoke>",
        argument=re.compile(rf"<{prefix}parameter{named.format('key')}{is_text}[^>]*>"),
        end_argument=f"</{prefix}parameter>",
        opens=tuple(
            (f"<{prefix}{tag} name=", f"</{prefix}{tag}>") for tag in ("parameter", "invoke")
        ),
    )


def _pair_tags(prefix: str) -> Tags:
    """Return the tags `<arg_key>` and `<arg_value>` with a prefix."""
    return Tags(
        call=re.compile(rf"\s*(?P<name>[^\s<>{{}}\"']+)\s*(?=<{prefix}arg_key>|$)"),
        end_call="",
        argument=re.compile(
            rf"<{prefix}arg_key>(?P<key>[^<]*)</{prefix}arg_key>(?:\\n|\s)*<{prefix}arg_value>"
        ),
        end_argument=f"</{prefix}arg_value>",
        opens=((f"<{prefix}arg_value>", f"</{prefix}arg_value>"),),
    )


MINIMAX_TAGS = _invoke_tags("")
MUSE_TAGS = _invoke_tags("atem:")
DSML_TAGS = _invoke_tags("｜DSML｜")
GLM_TAGS = _pair_tags("")
LONGCAT_TAGS = _pair_tags("longcat_")
M3_MARK = "]<]minimax[>["
"""Stands before every tag of MiniMax M3."""
ITEM = M3_MARK + "<item>"
M3_TAGS = Tags(
    call=re.compile(rf'\s*{re.escape(M3_MARK)}<invoke name="?(?P<name>[^\n<>"]+)"?>'),
    end_call=M3_MARK + "</invoke>",
    argument=re.compile(rf"\s*{re.escape(M3_MARK)}<(?P<key>[^\s<>/]+)>"),
    end_argument=M3_MARK + "</{key}>",
    is_nested=True,
)
MINICPM_TAGS = Tags(
    call=re.compile(r"\s*(?:<function\s+name\s*=\s*)?(?P<name>\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>"),
    end_call="",
    argument=re.compile(r"<param\s+name\s*=\s*(?P<key>\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>"),
    end_argument="</param>",
    is_escaped=True,
    opens=(("<param name=", "</param>"),),
)
_ATTRIBUTES = r'(?:\s+\w+="[^"]*")*'
KIMI_K3_TAGS = Tags(
    call=re.compile(
        rf'\s*<\|open\|>call(?={_ATTRIBUTES}?\s+tool="(?P<name>[^"]+)"){_ATTRIBUTES}\s*<\|sep\|>'
    ),
    end_call="<|close|>call<|sep|>",
    argument=re.compile(
        rf'<\|open\|>argument(?={_ATTRIBUTES}?\s+key="(?P<key>[^"]+)")'
        rf'(?=(?:{_ATTRIBUTES}?\s+type="(?P<type>[^"]+)")?){_ATTRIBUTES}\s*<\|sep\|>'
    ),
    end_argument="<|close|>argument<|sep|>",
    has_entities=True,
    block=re.compile(rf"\s*<\|open\|>json{_ATTRIBUTES}\s*<\|sep\|>"),
    end_block="<|close|>json<|sep|>",
    opens=(("<|open|>argument", "<|close|>argument"), ("<|open|>call", "<|close|>call")),
)


def parse_tags_or_json(tags: Tags) -> ToolCallParser:
    """Return a parser of a family that also writes JSON between its markers."""

    def parse(text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
        if text.lstrip()[:1] in ("{", "["):
            return parse_json_calls(text, tools, is_lenient)
        name, brace, arguments = text.partition("{")
        if brace and name.strip() in tools:
            return [{"name": name.strip(), "arguments": JSON_VALUES.decode(brace + arguments)}]
        return tags.parse(text, tools, is_lenient)

    return parse


# ---------------------------------------------------------------- families
def pair_form(prefix: str) -> TagForm:
    """Return the form of calls with `<arg_key>` and `<arg_value>` with a prefix."""
    return TagForm(
        call="$plain",
        argument=f"<{prefix}arg_key>$key</{prefix}arg_key>~<{prefix}arg_value>",
        close=f"</{prefix}arg_value>",
        last="$end",
        end="",
    )


def invoke_form(prefix: str, is_text: str = "") -> TagForm:
    """Return the form of calls with `<invoke name="…">` and `<parameter name="…">` with a prefix,
    and what says whether an argument is a text."""
    return TagForm(
        call=f'<{prefix}invoke name="$plain">',
        argument=f'<{prefix}parameter name="$key"{is_text}>',
        close=f"</{prefix}parameter>",
        last=f"</{prefix}invoke>",
        may_repeat=True,
    )


JSON_STARTS = "{[`"
LLAMA = ToolFormat(
    name="llama",
    begins=("<|python_tag|>", "<function="),
    ends=("</function>",),
    parse=parse_unmarked_calls,
    has_bare_calls=True,
    forms=(replace(JSON, end=""), CallForm(one=("$plain>~$arguments",), end="~</function>")),
)
DEEPSEEK = ToolFormat(
    name="deepseek",
    begins=("<｜tool▁calls▁begin｜>", DEEPSEEK_CALL),
    ends=("<｜tool▁calls▁end｜>",),
    parse=in_sections(DEEPSEEK_CALL, "<｜tool▁call▁end｜>", _deepseek_call),
    forms=(
        CallForm(
            begin=("~" + DEEPSEEK_CALL, ""),
            one=(
                "$plain<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
                "function<｜tool▁sep｜>$plain\n```json\n$arguments\n```<｜tool▁call▁end｜>",
            ),
            between="~" + DEEPSEEK_CALL,
            end="~<｜tool▁calls▁end｜>",
        ),
    ),
)
DSML = ToolFormat(
    name="dsml",
    begins=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    ends=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    parse=DSML_TAGS.parse,
    forms=(invoke_form("｜DSML｜", ' string="$is_text"'),),
    starts="<",
    shows_its_end=False,
)
MINIMAX_M3 = ToolFormat(
    name="minimax-m3",
    begins=(M3_MARK + "<tool_call>",),
    ends=(M3_MARK + "</tool_call>",),
    parse=M3_TAGS.parse,
    starts="]",
    shows_its_end=False,
)
PHI = ToolFormat(
    name="phi",
    begins=("<|tool_call|>",),
    ends=("<|/tool_call|>",),
    parse=parse_json_calls,
    starts=JSON_STARTS,
    forms=(JSON_LIST,),
)
GRANITE = ToolFormat(
    name="granite",
    begins=("<|tool_call|>",),
    parse=parse_unmarked_calls,
    has_bare_calls=True,
    forms=(JSON_LIST,),
)
OLMO = ToolFormat(
    name="olmo",
    begins=("<function_calls>",),
    ends=("</function_calls>",),
    parse=parse_python_calls,
)
COMMAND_A = ToolFormat(
    name="command-a",
    begins=("<|START_ACTION|>",),
    ends=("<|END_ACTION|>",),
    parse=parse_fenced_calls,
    forms=(
        replace(
            JSON_LIST,
            one=(
                '{~"tool_name"~:~$name~,~"parameters"~:~$arguments~}',
                '{~"tool_call_id"~:~"$id"~,~"tool_name"~:~$name~,~"parameters"~:~$arguments~}',
            ),
        ),
    ),
)
COMMAND_R = ToolFormat(
    name="command-r",
    begins=("Action: ```json", "Action:```json", "Action:\n```json"),
    ends=("```",),
    parse=parse_fenced_calls,
)
MISTRAL = ToolFormat(
    name="mistral",
    begins=("[TOOL_CALLS]",),
    parse=parse_mistral_calls,
    call_ids=CallIds.NINE,
    forms=(
        JSON_LIST,
        CallForm(
            one=(
                "$plain[ARGS]$arguments",
                "$plain[CALL_ID]$id[ARGS]$arguments",
                "$plain~$arguments",
            ),
            between="~[TOOL_CALLS]~",
        ),
    ),
)
KIMI_FORMS = (
    CallForm(
        begin=(f"~{KIMI_CALL}~", "~"),
        one=("functions.$plain:$number~<|tool_call_argument_begin|>~$arguments~<|tool_call_end|>",),
        between=f"~{KIMI_CALL}~",
        end="~$end",
    ),
)

PARSERS: dict[str, ToolCallParser] = {
    "json_tools": parse_unmarked_calls,
    "kimi_k2": in_sections(KIMI_CALL, "<|tool_call_end|>", _kimi_call),
    "pythonic": parse_python_calls,
    "gemma4": parse_gemma('<|"|>'),
    "function_gemma": parse_gemma("<escape>"),
}
"""By mlx-lm's name of the format, those whose calls show by themselves where they end."""

TAGGED: dict[str, ToolCallParser] = {
    "qwen3_coder": parse_tags_or_json(QWEN_TAGS),
    "minimax_m2": MINIMAX_TAGS.parse,
    "muse_spark": MUSE_TAGS.parse,
    "minicpm5": MINICPM_TAGS.parse,
    "glm47": parse_tags_or_json(GLM_TAGS),
    "laguna": parse_tags_or_json(GLM_TAGS),
    "longcat": parse_tags_or_json(LONGCAT_TAGS),
    "kimi_k3": KIMI_K3_TAGS.parse,
}
"""Those whose values stand between tags."""


def format_of_mlx_lm(kind: str, begin: str, end: str) -> ToolFormat:
    """Return the format of a model that mlx-lm recognises; `UNKNOWN` for one that is new to us.

    Args:
        kind: mlx-lm's name of it.
        begin: the marker that begins a call.
        end: the one that ends it; may be empty.
    """
    if kind == "mistral":
        return MISTRAL
    parse = PARSERS.get(kind) or TAGGED.get(kind)
    if parse is None:
        return UNKNOWN
    return ToolFormat(
        name=kind,
        begins=(begin, KIMI_CALL) if kind == "kimi_k2" else (begin,),
        ends=(end,) if end else (),
        parse=parse,
        call_ids=CallIds.NUMBERED if kind == "kimi_k2" else CallIds.OURS,
        starts=_STARTS.get(kind, ""),
        has_bare_calls=kind == "json_tools",
        shows_its_end=kind in PARSERS,
        forms=FORMS.get(kind, ()),
        # Qwen3-Coder often writes a text and then a call without `<tool_call>`.
        unmarked="<function={}>" if kind == "qwen3_coder" else "",
    )


_STARTS = {
    "json_tools": JSON_STARTS, "qwen3_coder": "<" + JSON_STARTS, "minimax_m2": "<",
    "muse_spark": "<", "kimi_k3": "<", "gemma4": "c", "function_gemma": "c",
}  # fmt: skip


QWEN_FORM = TagForm(
    call="<function=$plain>",
    argument="<parameter=$key>",
    close="</parameter>",
    last="</function>",
    is_on_lines=True,
)
FORMS: dict[str, tuple[CallForm | TagForm, ...]] = {
    "json_tools": (JSON,),
    "kimi_k2": KIMI_FORMS,
    "qwen3_coder": (QWEN_FORM,),
    "minimax_m2": (invoke_form(""),),
    "muse_spark": (invoke_form("atem:"),),
    "glm47": (pair_form(""),),
    "laguna": (pair_form(""),),
    "longcat": (pair_form("longcat_"),),
}


def own_format(vocabulary: Collection[str], template: str) -> ToolFormat:
    """Return the format of a model that mlx-lm has no parser for; may be `UNKNOWN`.

    Args:
        vocabulary: the model's tokens.
        template: its chat template; empty if it has none.
    """
    if M3_MARK in vocabulary or M3_MARK in template:
        return MINIMAX_M3
    has_older = "<｜tool▁calls▁begin｜>" in vocabulary
    if "｜DSML｜" in template or ("｜DSML｜" in vocabulary and not (has_older and template)):
        return DSML
    if has_older:
        return DEEPSEEK
    if "<|START_ACTION|>" in vocabulary:
        return COMMAND_A
    if "<|/tool_call|>" in vocabulary:
        return PHI
    if "<|tool_call|>" in vocabulary:
        return GRANITE
    if "<function_calls>" in template:
        return OLMO
    if "<|python_tag|>" in vocabulary and "tool_calls" in template:
        return LLAMA
    if "Action:" in template and "```json" in template:
        return COMMAND_R
    return UNKNOWN
