"""Formats of tool calls that mlx-lm has no parser for, or reads wrongly. No MLX here.

Each parser takes the text between a format's markers and the request's tools, and returns calls;
if it raises anything, the text stays text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .tool_calls import CallIds, ToolCallParser

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        name: the format's name, for docs and tests.
        begins: each of these markers begins a call.
        ends: each of these ends it; if empty, the end of the answer does.
        parse: reads the text between them.
        call_ids: the form of the ids.
        has_bare_calls: see `ChannelRules`.
        needs_tools: see `ChannelRules`.
        needs_ends: see `ChannelRules`.
    """

    name: str
    begins: tuple[str, ...]
    parse: ToolCallParser
    ends: tuple[str, ...] = ()
    call_ids: CallIds = CallIds.OURS
    has_bare_calls: bool = False
    needs_tools: bool = False
    needs_ends: bool = False


def json_values(text: str) -> list[Any]:
    """JSON values, one after the other, with whitespace, commas or semicolons between them.

    Raises:
        ValueError: there is something else.
    """
    values: list[Any] = []
    at = 0
    while found := re.compile(r"[\s;,]*").match(text, at):
        if found.end() == len(text):
            return values
        value, at = _DECODER.raw_decode(text, found.end())
        values += value if isinstance(value, list) else [value]
    return values


def parse_json_calls(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Calls as JSON, with any of the keys that families use for name and arguments."""
    calls = []
    for value in json_values(text):
        name = next(value[key] for key in ("name", "tool_name", "function") if key in value)
        keys = [key for key in ("arguments", "parameters") if key in value]
        call = {"name": name, "arguments": value[keys[0]] if keys else {}}
        calls.append(call | {key: value[key] for key in ("id",) if key in value})
    return calls


def parse_python_calls(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Calls as Python writes them, one on each line or in a list: `f(city="Rome", days=2)`."""
    stripped = text.strip()
    tree = ast.parse(stripped[1:-1].strip() if stripped[:1] == "[" else stripped)
    nodes: list[ast.expr] = []
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("no call")
        value = statement.value
        nodes += value.elts if isinstance(value, ast.Tuple) else [value]
    return [_python_call(node) for node in nodes]


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[keyword.arg] = ast.literal_eval(_PythonValues().visit(keyword.value))
    return {"name": ast.unparse(node.func), "arguments": arguments}


class _PythonValues(ast.NodeTransformer):
    """Models write JSON's words for Python's."""

    _WORDS = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._WORDS[node.id]) if node.id in self._WORDS else node


_DEEPSEEK_FENCE = re.compile(r"\s*(?P<name>[^\n]+)\n```json\n(?P<arguments>.*)\n```\s*", re.DOTALL)


def parse_deepseek_calls(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """V3 and R1 write `function<sep>NAME`, and the arguments in a fence of JSON; V3.1 writes
    `NAME<sep>{…}`."""
    calls = []
    between, *parts = text.split("<｜tool▁call▁begin｜>")
    for part in parts:
        call, _, rest = part.partition("<｜tool▁call▁end｜>")
        name, _, arguments = call.partition("<｜tool▁sep｜>")
        if fenced := _DEEPSEEK_FENCE.fullmatch(arguments):
            name, arguments = fenced["name"], fenced["arguments"]
        calls.append({"name": name.strip(), "arguments": json.loads(arguments)})
        between += rest
    if not calls or between.strip():
        raise ValueError("no calls alone")
    return calls


_MISTRAL = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?"
    r"(?:\[ARGS\])?\s*(?=\{)"
)


def parse_mistral_calls(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """A JSON list, or any number of `NAME[CALL_ID]ID[ARGS]{…}`, the id left out or not."""
    if text.lstrip()[:1] in ("[", "{"):
        return parse_json_calls(text)
    calls: list[dict[str, Any]] = []
    at = 0
    while text[at:].strip():
        found = _MISTRAL.match(text, at)
        if found is None:
            raise ValueError("no call")
        arguments, at = _DECODER.raw_decode(text, found.end())
        calls.append({"name": found["name"], "arguments": arguments, "id": found["id"]})
    return calls


def parse_llama_calls(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """`{"name": …, "parameters": {…}}`, several with semicolons between them."""
    return parse_json_calls(text)


def parse_fenced_calls(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """A JSON list; a call of `directly_answer` means that the model calls nothing."""
    calls = parse_json_calls(text)
    return [call for call in calls if call["name"] not in ("directly_answer", "directly-answer")]


_GLM_ARGUMENTS = re.compile(
    r"[^<]+(?:<arg_key>[^<]*</arg_key>(?:\\n|\s)*<arg_value>(?:(?!</arg_value>).)*</arg_value>\s*)+",
    re.DOTALL,
)


def only_whole_calls(parse: ToolCallParser) -> ToolCallParser:
    """mlx-lm's parser for GLM makes a call of any text, and leaves out arguments that it cannot
    read; such text is not a call here."""

    def parse_strictly(text: str, tools: Any = None) -> Any:
        if "<arg_" in text and not _GLM_ARGUMENTS.fullmatch(text):
            raise ValueError("an argument that cannot be read")
        parsed = parse(text, tools)
        for call in parsed if isinstance(parsed, list) else [parsed]:
            if call["name"] == "unknown" or set(call["arguments"]) == {"raw"}:
                raise ValueError("no call")
            if re.search(r"[\s<>{}\"']", call["name"]):
                raise ValueError("no name")
        return parsed

    return parse_strictly


LLAMA = ToolFormat(
    name="llama", begins=("<|python_tag|>",), parse=parse_llama_calls, has_bare_calls=True
)
DEEPSEEK = ToolFormat(
    name="deepseek",
    begins=("<｜tool▁calls▁begin｜>",),
    ends=("<｜tool▁calls▁end｜>",),
    parse=parse_deepseek_calls,
)
PHI = ToolFormat(
    name="phi",
    begins=("<|tool_call|>",),
    ends=("<|/tool_call|>",),
    parse=parse_json_calls,
)
GRANITE = ToolFormat(name="granite", begins=("<|tool_call|>",), parse=parse_json_calls)
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
)
COMMAND_R = ToolFormat(
    name="command-r",
    begins=("Action: ```json", "Action:```json", "Action:\n```json"),
    ends=("```",),
    parse=parse_fenced_calls,
    needs_tools=True,
)
MISTRAL = ToolFormat(
    name="mistral", begins=("[TOOL_CALLS]",), parse=parse_mistral_calls, call_ids=CallIds.NINE
)


def own_format(vocabulary: Collection[str], template: str) -> ToolFormat | None:
    """The format of a model that mlx-lm has no parser for.

    Args:
        vocabulary: the model's tokens.
        template: its chat template; empty if it has none.
    """
    if "<｜tool▁calls▁begin｜>" in vocabulary:
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
    return None
