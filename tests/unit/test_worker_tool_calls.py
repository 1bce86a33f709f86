"""Tool calls: every value comes back in every format; what is none, ids, calls without markers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.states import AnswerForm, Channel
from mlxsup.protocol.tool_choice import UNREADABLE_CALL
from mlxsup.worker.text import channels, harmony
from mlxsup.worker.text.channels import (
    NORMAL,
    REASONING,
    TOOL,
    ChannelParser,
    ChannelRules,
    Piece,
)
from mlxsup.worker.text.tool_calls import CallIds, ToolCallReader
from mlxsup.worker.text.tool_formats import (
    COMMAND_A,
    COMMAND_R,
    DEEPSEEK,
    DSML,
    GRANITE,
    LLAMA,
    MINIMAX_M3,
    MISTRAL,
    OLMO,
    PHI,
    UNKNOWN,
    ToolFormat,
    format_of_mlx_lm,
    own_format,
)
from mlxsup.worker.text.tool_values import value_of

from support.worker.tool_values import EACH_MARK, HOSTILE, MARKS, cut_up

Arguments = dict[str, Any]


def spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_json(name: str, arguments: Arguments) -> str:
    return spelled({"name": name, "arguments": arguments})


def raw(value: Any) -> str:
    """A value as templates write it between tags."""
    return value if isinstance(value, str) else spelled(value)


def in_qwen(name: str, arguments: Arguments) -> str:
    inner = "".join(
        f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"\n<function={name}>\n{inner}</function>\n"


def in_tags(call: str, argument: str, end_argument: str, end_call: str) -> Callable[..., str]:
    def written(name: str, arguments: Arguments) -> str:
        inner = "".join(
            argument.format(key) + raw(value) + end_argument for key, value in arguments.items()
        )
        return call.format(name) + inner + end_call

    return written


def in_dsml(name: str, arguments: Arguments) -> str:
    inner = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{raw(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'\n<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'


M3 = "]<]minimax[>["


def in_m3(name: str, arguments: Arguments) -> str:
    def tagged(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(f"{M3}<{key}>{tagged(v)}{M3}</{key}>" for key, v in value.items())
        if isinstance(value, list):
            return "".join(f"{M3}<item>{tagged(v)}{M3}</item>" for v in value)
        return raw(value)

    inner = "".join(f"{M3}<{key}>{tagged(v)}{M3}</{key}>\n" for key, v in arguments.items())
    return f'\n{M3}<invoke name="{name}">\n{inner}{M3}</invoke>\n'


def in_cdata(name: str, arguments: Arguments) -> str:
    inner = "".join(
        f'<param name="{key}"><![CDATA[{raw(value)}]]></param>' for key, value in arguments.items()
    )
    return f'"{name}">{inner}'


def in_kimi_k3(name: str, arguments: Arguments) -> str:
    inner = "".join(
        f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "number"}"'
        f"<|sep|>{raw(value)}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inner}<|close|>call<|sep|>'


def in_python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def in_gemma(quote: str) -> Callable[..., str]:
    def written(name: str, arguments: Arguments) -> str:
        inner = ",".join(
            f"{key}:{quote}{value}{quote}" if isinstance(value, str) else f"{key}:{spelled(value)}"
            for key, value in arguments.items()
        )
        return f"call:{name}{{{inner}}}"

    return written


FORMATS: list[tuple[ToolFormat, Callable[..., str]]] = [
    (format_of_mlx_lm("json_tools", "<tool_call>", "</tool_call>"), in_json),
    (format_of_mlx_lm("qwen3_coder", "<tool_call>", "</tool_call>"), in_qwen),
    (
        format_of_mlx_lm("glm47", "<tool_call>", "</tool_call>"),
        in_tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    ),
    (
        format_of_mlx_lm("longcat", "<longcat_tool_call>", "</longcat_tool_call>"),
        in_tags(
            "{}\n",
            "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>\n",
            "",
        ),
    ),
    (
        format_of_mlx_lm("minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>"),
        in_tags(
            '\n<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n"
        ),
    ),
    (format_of_mlx_lm("minicpm5", "<function name=", "</function>"), in_cdata),
    (
        format_of_mlx_lm("muse_spark", "<atem:function_calls>", "</atem:function_calls>"),
        in_tags(
            '<atem:invoke name="{}">', '<atem:parameter name="{}">', "</atem:parameter>",
            "</atem:invoke>",
        ),
    ),
    (format_of_mlx_lm("kimi_k3", "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"), in_kimi_k3),
    (format_of_mlx_lm("gemma4", "<|tool_call>", "<tool_call|>"), in_gemma('<|"|>')),
    (
        format_of_mlx_lm("function_gemma", "<start_function_call>", "<end_function_call>"),
        in_gemma("<escape>"),
    ),
    (
        format_of_mlx_lm("pythonic", "<|tool_call_start|>", "<|tool_call_end|>"),
        lambda name, arguments: f"[{in_python(name, arguments)}]",
    ),
    (
        format_of_mlx_lm("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        lambda name, arguments: f"<|tool_call_begin|>functions.{name}:0"
        f"<|tool_call_argument_begin|>{spelled(arguments)}<|tool_call_end|>",
    ),
    (MISTRAL, lambda name, arguments: f"{name}[ARGS]{spelled(arguments)}"),
    (LLAMA, in_json),
    (GRANITE, lambda name, arguments: f"[{in_json(name, arguments)}]"),
    (PHI, lambda name, arguments: f"[{in_json(name, arguments)}]"),
    (OLMO, in_python),
    (COMMAND_A, lambda name, arguments: f"[{in_json(name, arguments)}]"),
    (
        DEEPSEEK,
        lambda name, arguments: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{spelled(arguments)}"
        "<｜tool▁call▁end｜>",
    ),
    (DSML, in_dsml),
    (MINIMAX_M3, in_m3),
    (
        COMMAND_R,
        lambda name, arguments: f"\n[{in_json(name, arguments)}]\n",
    ),
]  # fmt: skip

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "rows": {"type": "array"},
        "flag": {"type": "boolean"},
    },
    "required": ["path", "content"],
}


def named(*names: str, parameters: Any = SCHEMA) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in names
    ]


TOOLS = named("f", "weather", "time", "a", "b", "c")


def of_formats(formats: list[tuple[ToolFormat, Callable[..., str]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("form", "written"), formats, ids=[form.name for form, _ in formats]
    )


EVERY_FORMAT = of_formats(FORMATS)
WITH_AN_END = of_formats([(form, written) for form, written in FORMATS if form.ends])


def rules_of(form: ToolFormat) -> ChannelRules:
    """As the engine puts them together."""
    transitions: dict[str, list[tuple[str, str]]] = {
        NORMAL: [("<think>", REASONING), *((begin, TOOL) for begin in form.begins)],
        REASONING: [("</think>", NORMAL), *((begin, TOOL) for begin in form.begins)],
        TOOL: [(end, NORMAL) for end in form.ends],
    }
    return ChannelRules(transitions=transitions, tool_format=form)


Seen = tuple[list[tuple[str, Any]], str, str, list[str]]


def seen_of(pieces: list[Piece]) -> Seen:
    """Return calls, content, reasoning and warnings."""
    texts = dict.fromkeys(Channel, "")
    for piece in pieces:
        texts[piece.channel] += piece.text
    functions = [json.loads(line)["function"] for line in texts[Channel.TOOL_CALL].split("\n")[:-1]]
    return (
        [(one["name"], json.loads(one["arguments"])) for one in functions],
        texts[Channel.CONTENT],
        texts[Channel.REASONING],
        [piece.warning for piece in pieces if piece.warning],
    )


def in_steps(text: str, step: int) -> list[str]:
    return [text[at : at + step] for at in range(0, len(text), step)] if step else [text]


def pieces_of(
    rules: ChannelRules,
    parts: list[str],
    tools: list[dict[str, Any]] | None = TOOLS,
    *,
    opening: str = "",
    is_cut: bool = False,
    form: AnswerForm = AnswerForm.TEXT,
) -> list[Piece]:
    parser = ChannelParser(rules, opening, ToolCallReader(tools, 7), form=form)
    return [piece for part in parts for piece in parser.add(part)] + parser.finish(is_cut=is_cut)


def read(
    rules: ChannelRules,
    text: str,
    tools: list[dict[str, Any]] | None = TOOLS,
    *,
    step: int = 0,
    **how: Any,
) -> Seen:
    """Return calls, content, reasoning and warnings of an answer in steps of characters."""
    return seen_of(pieces_of(rules, in_steps(text, step), tools, **how))


def said(form: ToolFormat, inner: str) -> str:
    return form.begins[0] + inner + (form.ends[0] if form.ends else "")


@EVERY_FORMAT
def test_a_value_comes_back_as_it_was(form: ToolFormat, written: Callable[..., str]) -> None:
    rules = rules_of(form)
    for value in HOSTILE:
        if form.name == "minicpm5" and "]]>" in value:
            continue  # its CDATA has no way to write this
        arguments = {"path": "/a", "content": value}
        text = said(form, written("f", arguments))
        for step in (0,) if value in EACH_MARK else (0, 1):  # in pieces, all marks at once
            seen = read(rules, text, step=step)
            assert seen == ([("f", arguments)], "", "", []), (value, step)


@EVERY_FORMAT
def test_a_cut_call_is_never_shortened(form: ToolFormat, written: Callable[..., str]) -> None:
    """As by `max_tokens`, after any character."""
    rules = rules_of(form)
    arguments = {"path": "/a", "content": "".join(form.ends) + "</think>}\nTail stays."}
    text = said(form, written("f", arguments))
    for cut in range(len(text)):
        calls, content, _, _ = read(rules, text[:cut], is_cut=True)
        assert calls in ([], [("f", arguments)]), text[:cut]
        assert calls or content == text[:cut]


@pytest.mark.parametrize("step", [0, 1, 7])
@pytest.mark.parametrize("end", ["</tool_call>", "\n", ""])
def test_a_call_of_qwen3_coder_without_its_first_marker_is_read(end: str, step: int) -> None:
    arguments = {"path": "/a", "content": "</tool_call>\n<tool_call>"}
    text = "I look.\n" + in_qwen("f", arguments).lstrip() + end
    assert read(rules_of(QWEN), text, step=step) == ([("f", arguments)], "I look.\n", "", [])
    for cut in range(len(text)):
        calls, content, _, _ = read(rules_of(QWEN), text[:cut], is_cut=True)
        assert (calls, content) in (([], text[:cut]), ([("f", arguments)], "I look.\n"))


def test_only_a_function_of_the_request_begins_a_call_without_its_marker() -> None:
    parser = ChannelParser(rules_of(QWEN), "", ToolCallReader(TOOLS, 7))
    text = "Write <function=g> or <function=NAME>, then"
    assert seen_of(parser.add(text))[1] == text, "not held back"
    text = "Write <function=f> and so on."
    assert read(rules_of(QWEN), text)[:2] == ([], text)
    assert read(rules_of(QWEN), "<function=f>\n</function>", tools=None)[0] == []


@WITH_AN_END
def test_calls_follow_each_other_and_text_follows_them(
    form: ToolFormat, written: Callable[..., str]
) -> None:
    one = {"path": "/a", "content": "x"}
    two = {"path": "/b", "content": form.ends[0] + " y"}
    text = f"Look: {said(form, written('f', one))}\n"
    text += said(form, written("f", two))
    calls, content, _, warnings = read(rules_of(form), text, step=1)
    assert (calls, warnings) == ([("f", one), ("f", two)], [])
    assert content.strip() == "Look:"
    after = said(form, written("f", one)) + "Done."
    assert read(rules_of(form), after)[:2] == ([("f", one)], "Done.")


@EVERY_FORMAT
def test_a_function_that_was_not_offered_is_text(
    form: ToolFormat, written: Callable[..., str]
) -> None:
    text = said(form, written("other", {"path": "/a"}))
    calls, content, _, warnings = read(rules_of(form), text)
    assert (calls, content, warnings) == ([], text, [UNREADABLE_CALL])
    offered = said(form, written("f", {"path": "/a"}))
    assert read(rules_of(form), offered, tools=[]) == ([], offered, "", [])


@WITH_AN_END
def test_a_call_in_a_thought_counts_if_nothing_but_its_end_follows(
    form: ToolFormat, written: Callable[..., str]
) -> None:
    rules = rules_of(form)
    arguments = {"path": "/a", "content": "x"}
    call = said(form, written("f", arguments))
    for end in ("", "\n", "</think>", "\n</think>Done."):
        calls, content, reasoning, warnings = read(rules, f"<think>So.{call}{end}", step=1)
        assert (calls, reasoning.strip(), warnings) == ([("f", arguments)], "So.", [])
        assert content == ("Done." if "Done." in end else "")
    thought = f"One writes {call} then."
    for more in ("", "</think>Done."):
        seen = read(rules, f"<think>{thought}{more}", step=1)
        assert seen == ([], more.removeprefix("</think>"), thought, [])
    seen = read(rules, f"<think>Say {form.begins[0]} and stop.</think>{call}", step=1)
    assert seen[0] == [("f", arguments)]
    assert seen[2] == f"Say {form.begins[0]} and stop."


JSON, QWEN, GEMMA = FORMATS[0][0], FORMATS[1][0], next(f for f, _ in FORMATS if f.name == "gemma4")
A = {"path": "/a", "content": "x"}


GLM, PYTHON, K3, MINIMAX, KIMI = (
    next(form for form, _ in FORMATS if form.name == name)
    for name in ("glm47", "pythonic", "kimi_k3", "minimax_m2", "kimi_k2")
)


def in_k3(call: str, *inner: str) -> str:
    return f"<|open|>call {call}<|sep|>{''.join(inner)}<|close|>call<|sep|>"


def k3_block(value: str) -> str:
    return f'<|open|>json type="object"<|sep|>{value}<|close|>json<|sep|>'


def k3_argument(attributes: str, value: str) -> str:
    return f"<|open|>argument {attributes}<|sep|>{value}<|close|>argument<|sep|>"


EXAMPLE = said(QWEN, in_qwen("f", A))
IN_K2 = {form.name: written for form, written in FORMATS}["kimi_k2"]("f", A)


@pytest.mark.parametrize(
    ("form", "inner", "calls"),
    [
        (JSON, '{"name": "f", "parameters": {"path": "/a"}}', [{"path": "/a"}]),
        (JSON, f'{{"type": "function", "function": {in_json("f", A)}}}', [A]),
        (JSON, '{"name": "f", "arguments": "{\\"path\\": \\"/a\\"}"}', [{"path": "/a"}]),
        (JSON, '{"name": "f", "arguments": {"content": "a\nb"}}', [{"content": "a\nb"}]),
        (JSON, f'{in_json("f", A)}\n{in_json("f", A)}', [A, A]),
        (JSON, in_json("f", A) + "}", [A]),
        (JSON, f"```json\n{in_json('f', A)}\n```", [A]),
        (JSON, '{"name": "f"}', [{}]),
        (JSON, '{"name": "f", "arguments": null}', [{}]),
        (JSON, '{"name": "f", "arguments": ""}', [{}]),
        (JSON, '{"name": "f", "args": {"path": "/a"}}', []),
        (JSON, in_json("f", A) + " and so on", []),
        (JSON, '{"name": "f", "arguments": [1]}', []),
        (QWEN, "\n<function=f>\n<parameter=path>\n/a\n</parameter>\n", [{"path": "/a"}]),
        (QWEN, "\n<function=f>\n</function>\n", [{}]),
        (QWEN, in_json("f", A), [A]),
        (QWEN, "\n<function=f>\nstray\n</function>\n", []),
        (QWEN, in_qwen("f", A).replace("=path", "=content"),
         [{"content": "/a\n</parameter>\n<parameter=content>\nx"}]),
        (QWEN, in_qwen("f", {"rows": "[1"}), [{"rows": "[1"}]),
        (QWEN, "\n<function=f>\n<parameter=path>\n/a\n</function>\n", []),
        (GEMMA, "call:f{path:/a*.js,content:'x'}", [{"path": "/a*.js", "content": "x"}]),
        (GEMMA, 'call:f{content:{-A:[1,true,null,{}],b:<|"|>x<|"|>}}',
         [{"content": {"-A": [1, True, None, {}], "b": "x"}}]),
        (GEMMA, r'call:f{path:"C:\\dir",content:["a\n\"b\", c",{"\"k":1}]}',
         [{"path": "C:\\dir", "content": ['a\n"b", c', {'"k': 1}]}]),
        (GEMMA, r'call:f{path:"C:\dir", content:"a "b" c"}',
         [{"path": r"C:\dir", "content": 'a "b" c'}]),
        (GEMMA, 'call:f{<|"|>path<|"|>:1,"a"b":2}', [{"path": 1, 'a"b': 2}]),
        (GEMMA, 'call:f{<|"|>path:1}', []),
        (GEMMA, "call:f{path:}", []),
        (GEMMA, "call:f{path:1", []),
        (GEMMA, "call:f{path:1} more", []),
        (GLM, 'f\n{"a": {"b": 1}}', [{"a": {"b": 1}}]),
        (GLM, 'f\n{"a": 1} more', []),
        (GLM, 'g {"a": 1}', []),
        (PYTHON, '[f(a="one\ntwo", b="it\'s")]', [{"a": "one\ntwo", "b": "it's"}]),
        (PYTHON, '[f(from="a=b", class=1, to={"in": true})]',
         [{"from": "a=b", "class": 1, "to": {"in": True}}]),
        (PYTHON, "[f(a='in = 1\n', is=2)]", [{"a": "in = 1\n", "is": 2}]),
        (PYTHON, "[f(a='#'), f()]", [{"a": "#"}, {}]),
        (PYTHON, "[f(a=1) # and so on\n]", []),
        (PYTHON, "[f(a=1);", []),
        (PYTHON, "[f(**a)]", []),
        (PYTHON, "a = f(b=1)", []),
        (PYTHON, "[f(a=1) - f(a=2)]", []),
        (K3, in_k3('tool="f" index="1"', k3_block('{"a": "<|close|>json<|sep|>"}'))
         + in_k3('tool="f" index="2"', k3_block('{"a": 2}')) + in_k3('index="3" tool="f"'),
         [{"a": "<|close|>json<|sep|>"}, {"a": 2}, {}]),
        (K3, in_k3('tool="f"', k3_block('{"a": 2}'), "x"), []),
        (K3, in_k3('tool="f"', k3_block('{"a": 2} x')), []),
        (KIMI, IN_K2 + "\n" + IN_K2, [A, A]),
        (KIMI, f"{IN_K2} and {IN_K2}", []),
        (K3, in_k3('tool="f"', k3_argument('key="a" type="null"', "null"),
                   k3_argument('type="string" key="b"', "5"), k3_argument('key="c"', "5")),
         [{"a": None, "b": "5", "c": 5}]),
        (K3, in_k3('tool="f"', k3_argument('key="&quot;a&amp;quot;" type="number"', "5")),
         [{'"a&quot;': 5}]),
        (QWEN, in_qwen("f", {"content": f"{EXAMPLE}\n{EXAMPLE}\nEnd."}),
         [{"content": f"{EXAMPLE}\n{EXAMPLE}\nEnd."}]),
        (QWEN, in_qwen("f", {"rows": ["</function>"], "content": "a <function=x> b"}),
         [{"rows": ["</function>"], "content": "a <function=x> b"}]),
        (QWEN, in_qwen("f", {"rows": ["<parameter=x>"], "content": "</parameter> b"}),
         [{"rows": ["<parameter=x>"], "content": "</parameter> b"}]),
        (MINIMAX, '<invoke name="f"><parameter name="rows">["</parameter>"]</parameter>'
                  '<parameter name="flag">true</parameter></invoke>',
         [{"rows": ["</parameter>"], "flag": True}]),
    ],
)  # fmt: skip
def test_what_a_model_writes_is_read_if_it_has_one_meaning(
    form: ToolFormat, inner: str, calls: list[Arguments]
) -> None:
    text = said(form, inner)
    for step in (0, 1):
        seen, content, _, warnings = read(rules_of(form), text, step=step)
        assert seen == [("f", arguments) for arguments in calls]
        assert (content, warnings) == (("", []) if calls else (text, [UNREADABLE_CALL]))


UNMARKED = 'f(path="/a", content="x")'
LIKE_OPENAI = f'{{"type": "function", "function": {in_json("f", A)}}}'


@pytest.mark.parametrize(
    ("form", "text", "count", "content"),
    [
        (LLAMA, f"[{UNMARKED}]", 1, ""),
        (LLAMA, f"[{UNMARKED}, {UNMARKED}]", 2, ""),
        (LLAMA, f"<function=f>{spelled(A)}</function>", 1, ""),
        (LLAMA, f"I read it.\n<function=f>{spelled(A)}</function>", 1, "I read it.\n"),
        (LLAMA, f"<function=f>{spelled(A)} x</function>", 0, None),
        (LLAMA, LIKE_OPENAI, 1, ""),
        (LLAMA, LIKE_OPENAI.replace('"type": "function", ', ""), 1, ""),
        (LLAMA, f"I read it: {in_json('f', A)}", 1, "I read it: "),
        (LLAMA, f"{{x}} {in_json('f', A)}; {in_json('f', A)}", 2, "{x} "),
        (GRANITE, UNMARKED, 1, ""),
        (GRANITE, f"{UNMARKED}\n{UNMARKED}\n", 2, ""),
        (JSON, UNMARKED, 1, ""),
        (JSON, in_json("f", A), 1, ""),
        (JSON, in_json("f", A) + " is how to call it.", 0, None),
        (JSON, f"Write {UNMARKED}", 0, None),
        (JSON, f"{UNMARKED} is how to call it", 0, None),
        (JSON, 'g(path="/a")', 0, None),
        (DEEPSEEK, 2 * f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{spelled(A)}<｜tool▁call▁end｜>",
         2, ""),
        (KIMI, "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
         f"{spelled(A)}<|tool_call_end|>", 1, ""),
        (KIMI, "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>" + spelled(A), 1, ""),
        (JSON, f"{in_json('f', A)}\n{said(JSON, in_json('f', A))}", 1, f"{in_json('f', A)}\n"),
        (KIMI, said(KIMI, f"<|tool_call_begin|>f:0<|tool_call_argument_begin|>{spelled(A)}"
                    "<|tool_call_end|>"), 1, ""),
        (JSON, f"Use <tool_call> to call. {said(JSON, in_json('f', A))}", 1,
         "Use <tool_call> to call. "),
    ],
)  # fmt: skip
def test_other_forms_of_a_family_are_calls_if_nothing_follows(
    form: ToolFormat, text: str, count: int, content: str | None
) -> None:
    for step in (0, 1, 7):
        calls, shown, _, _ = read(rules_of(form), text, step=step)
        assert calls == [("f", A)] * count
        assert shown == (text if content is None else content)


ENDS_IN_IT = '<tool_call>{"name": "f", "arguments": {"content": "With </tool_call> it ends'
CUT = f'<tool_call>{{"name": "f", "arguments": {{"content": "Say {EXAMPLE} or {EXAMPLE} or'


@pytest.mark.parametrize(
    ("form", "text", "is_cut"),
    [
        (JSON, f'<tool_call>{{"name": "f", "arguments": {{"content": "a "b" {one}{one}"}}}}'
         "</tool_call>", False)
        for one in [said(JSON, in_json("a", {}))]
    ] + [
        (JSON, CUT.replace(EXAMPLE, said(JSON, in_json("a", {}))), is_cut)
        for is_cut in (True, False)
    ] + [(QWEN, said(QWEN, in_qwen("f", {"content": EXAMPLE * 3}))[:-60], True),
         (JSON, f"{ENDS_IN_IT} {said(JSON, in_json('a', {}))} or", True)],
)  # fmt: skip
def test_a_broken_call_never_gives_the_calls_in_its_values(
    form: ToolFormat, text: str, is_cut: bool
) -> None:
    calls, content, _, warnings = read(rules_of(form), text, step=5, is_cut=is_cut)
    assert (calls, content) == ([], text)
    assert warnings


@pytest.mark.parametrize(
    ("thought", "count"),
    [("EE", 2), ("E\nE\nE\n", 3), ("So E E E.", 0), ("So E E then", 0), ("E and E", 1), ("EE{", 0)],
)
def test_calls_side_by_side_in_a_thought_count_together(thought: str, count: int) -> None:
    thought = thought.replace("E", said(JSON, in_json("f", A)))
    for end in ("", "</think>Done."):
        calls, content, reasoning, _ = read(rules_of(JSON), f"<think>{thought}{end}", step=3)
        assert (len(calls), content) == (count, end.removeprefix("</think>"))
        assert count or reasoning == thought


@pytest.mark.parametrize("form", [AnswerForm.JSON, AnswerForm.CALL])
def test_the_thought_before_a_format_has_no_calls(form: AnswerForm) -> None:
    thought, call = said(JSON, in_json("f", A)), in_json("a", A)
    answer = call if form is AnswerForm.CALL else f'{{"a": {call}}}'
    parts = [f"{thought}</think>{answer}"]
    seen = seen_of(pieces_of(rules_of(JSON), parts, opening="<think>", form=form))
    calls, content = ([("a", A)], "") if form is AnswerForm.CALL else ([], answer)
    assert seen == (calls, content, thought, [])


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": [1, "two", None, True]},
        {"rows": [{"a": "x", "b": 2}, {"a": "y"}], "flag": True},
        {"content": "]<]minimax[>[<item>1]<]minimax[>[</item>"},
        {"deep": {"a": {"b": {"c": 1.5}}, "d": "e f"}},
        {"deep": {"a": {"b": {"a": 1}, "deep": 2}}},
        {"rows": [[1, 2], [{"rows": ["x", ["y"]]}]]},
        {"rows": []},
    ],
)
def test_nested_tags_are_maps_and_lists(arguments: Arguments) -> None:
    seen = read(rules_of(MINIMAX_M3), said(MINIMAX_M3, in_m3("f", arguments)), step=2)
    assert seen == ([("f", arguments)], "", "", [])


@pytest.mark.parametrize(
    ("form", "name"),
    [(PYTHON, "lib.get-the-docs"), (GEMMA, "fs.read"), (GEMMA, "google:mcp:create-pdf"),
     (GEMMA, "-A")],
)  # fmt: skip
def test_a_function_has_the_name_under_which_it_is_offered(form: ToolFormat, name: str) -> None:
    written = {one.name: how for one, how in FORMATS}[form.name]
    text = said(form, written(name, {"p": "x"}))
    assert read(rules_of(form), text, named(name, parameters={}))[0] == [(name, {"p": "x"})]


def test_a_mistake_or_a_broken_call_does_not_take_the_next_one_along() -> None:
    one = "\n<function=f>\n<parameter=content>\nSee <parameter=x>.\n</parameter>\n"
    text = "".join(said(QWEN, f"{one}{end}") for end in ("", "</function>\n"))
    twice = [("f", {"content": "See <parameter=x>."})] * 2
    assert read(rules_of(QWEN), text, step=1) == (twice, "", "", [])
    broken, call = said(JSON, "{nonsense}"), said(JSON, in_json("f", A))
    assert read(rules_of(JSON), f"{broken}\n{broken}\n{call}", step=1) == (
        [("f", A)], f"{broken}\n{broken}\n", "", [UNREADABLE_CALL],
    )  # fmt: skip


@of_formats(
    # Long and short marks, one of several beginnings, and values that may hold an end.
    [one for one in FORMATS
     if one[0].name in ("json_tools", "qwen3_coder", "kimi_k3", "deepseek", "command-r")]
)  # fmt: skip
@pytest.mark.parametrize("before", ["", "<think>"])
def test_what_is_read_in_vain_stays_in_proportion(
    form: ToolFormat, written: object, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MOST_IN_VAIN", 16_000)  # as short as the text here
    read_so_far = 0

    def counted(text: str, tools: Any, is_lenient: bool) -> list[dict[str, Any]]:
        nonlocal read_so_far
        read_so_far += len(text)
        raise ValueError

    start = form.starts[:1]
    unit = form.begins[0] + start + "x" + form.ends[0]
    text = form.begins[0] + start + "x" * 4_000 + unit * (4_000 // len(unit))
    rules = rules_of(replace(form, parse=counted))
    calls, content, reasoning, warnings = read(rules, before + text, step=200)
    assert (calls, content + reasoning) == ([], text)
    assert read_so_far <= 2 * (channels.MOST_IN_VAIN + 5 * len(text))
    assert len(warnings) <= 4


def test_harmony_reads_a_string_that_holds_its_marks() -> None:
    arguments = {"path": "/a", "content": "ends <|end|> and <|call|> or <|start|>assistant"}
    header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    text = header + spelled(arguments)
    rules = harmony.harmony_rules()
    for more in ("", "<|call|>", "<|call|><|start|>assistant<|channel|>final<|message|>Done."):
        calls, content, _, warnings = read(rules, text + more, step=1, opening="<|start|>assistant")
        assert (calls, warnings) == ([("f", arguments)], [])
        assert content == ("Done." if "Done." in more else "")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("True", {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ("False", {"type": ["boolean", "null"]}, False),
        ("null", {"type": ["boolean", "null"]}, None),
        ("None", {"type": ["boolean", "null"]}, None),
        ("null", {"type": ["string", "null"]}, "null"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("2026-01-15", {"type": "integer"}, "2026-01-15"),
        ("0.5", {"type": "number"}, 0.5),
        ("nan", {"type": "number"}, "nan"),
        (" 7 ", {"type": "number"}, 7),
        ("True", {"type": "string"}, "True"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("1", {"const": 1}, 1),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("[1]", {"type": "string"}, "[1]"),
        ("[1]", {"$ref": "#/$defs/Numbers"}, [1]),
        ("[1]", {"$ref": "#/$defs/a~1b~01"}, "[1]"),
        ("[1]", {"allOf": [{"$ref": "#/$defs/Numbers"}]}, [1]),
        ("x", {"$ref": "#/$defs/Itself"}, "x"),
        ("x", {"$ref": "#/nowhere"}, "x"),
        ("12", None, 12),
        ("0123", None, "0123"),
        ('"x"', None, '"x"'),
        ("  x ", {}, "  x "),
        ("null", {}, None),
        ("true", {"type": "bool"}, True),
        ("[[", {"type": "list"}, "[["),
    ],
)  # fmt: skip
def test_a_text_becomes_a_value_of_the_type_that_its_schema_allows(
    text: str, schema: Any, value: Any
) -> None:
    root = {
        "$defs": {
            "Numbers": {"type": "array"},
            "a/b~1": {"type": "string"},
            "Itself": {"$ref": "#/$defs/Itself"},
        },
        "properties": {"a": schema},
    }
    seen = value_of(text, schema, root)
    assert (seen, type(seen)) == (value, type(value))


def test_calls_of_a_format_that_is_new_in_mlx_lm_are_not_read() -> None:
    assert format_of_mlx_lm("new", "<t>", "</t>") is UNKNOWN


@EVERY_FORMAT
def test_nonsense_of_any_length_is_text_soon(form: ToolFormat, written: object) -> None:
    for ballast in ("<", '{"a":', "f(x=", "</parameter>"):
        text = form.begins[0] + ballast * (5_000 // len(ballast))
        for more in ("", *form.ends):
            calls, content, _, warnings = read(rules_of(form), text + more, step=1250)
            assert (calls, content) == ([], text + more)
            assert set(warnings) == {UNREADABLE_CALL}


# ---------------------------------------------------------------- families, ids and lines
@pytest.mark.parametrize(
    ("vocabulary", "template", "name"),
    [
        (["<|python_tag|>"], "", "unknown"),
        ([], "tool_calls", "unknown"),
        ([], "Action:", "unknown"),
        ([], "```json", "unknown"),
        (["<|/tool_call|>"], "", "phi"),
        (["<function_calls>"], "", "unknown"),
        (["<|START_ACTION|>", "<|tool_call|>"], "Action: ```json", "command-a"),
        (["<｜tool▁calls▁begin｜>", "<|START_ACTION|>"], "<function_calls>", "deepseek"),
        (["<｜tool▁calls▁begin｜>", "｜DSML｜"], "", "dsml"),
        (["<｜tool▁calls▁begin｜>", "｜DSML｜"], "<｜tool▁calls▁begin｜>", "deepseek"),
        (["｜DSML｜"], "x", "dsml"),
        (["]<]minimax[>[", "<|tool_call|>"], "<tool_call>", "minimax-m3"),
        (["<|tool_call|>"], "<function_calls>", "granite"),
        (["<|python_tag|>"], "<function_calls> tool_calls", "olmo"),
        (["<|python_tag|>"], "tool_calls Action: ```json", "llama"),
    ],
)
def test_of_several_signs_the_surest_decides(
    vocabulary: list[str], template: str, name: str
) -> None:
    assert own_format(vocabulary, template).name == name


def test_ids_are_the_same_for_the_same_key_and_number() -> None:
    assert CallIds.OURS.make("f", 0, "k") == "call_c775e643826e1ed0602dbe77"
    assert CallIds.OURS.make("g", 0, "k") == CallIds.OURS.make("f", 0, "k")
    assert CallIds.OURS.make("f", 1, "k") != CallIds.OURS.make("f", 0, "k")
    assert CallIds.NINE.make("f", 0, "k") == "9fGq0ja93"
    assert CallIds.NUMBERED.make("f", 3, "k") == "functions.f:3"


def test_id_beside_a_function_in_the_form_of_openai_is_its_calls_own() -> None:
    [call] = JSON.parse(f'{{"id": "mine", "function": {in_json("f", A)}}}', {"f": {}}, False)
    assert call == {"id": "mine", "name": "f", "arguments": A}


def lines_read(reader: ToolCallReader, calls: Any, **more: Any) -> list[dict[str, Any]] | None:
    lines = reader.read("text", lambda text, tools, is_lenient: calls, **more)
    if lines is None:
        return None
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    return [json.loads(line) for line in lines]


def test_calls_are_lines_of_json_in_order() -> None:
    parameters = {"type": "object"}
    tools = [*named("f", parameters=parameters), {"function": {"name": "g"}}]
    reader = ToolCallReader(tools, 7)
    calls: list[dict[str, Any]] = [
        {"name": "f", "arguments": {"a": "é"}, "id": "mine"},
        {"name": "g", "arguments": {}, "id": 5},
    ]
    seen = []

    def parse(text: str, tools: Any, is_lenient: bool) -> list[dict[str, Any]]:
        seen.append((text, tools, is_lenient))
        return calls

    lines = reader.read("text", parse, is_lenient=True)
    assert seen == [("text", {"f": parameters, "g": {}}, True)]
    assert lines is not None
    assert lines[0] == (
        '{"id": "mine", "type": "function", "function": '
        '{"name": "f", "arguments": "{\\"a\\": \\"é\\"}"}}\n'
    )
    made = json.loads(lines[1])
    assert made["function"] == {"name": "g", "arguments": "{}"}
    assert made["id"] == CallIds.OURS.make("g", 1, "7")
    assert reader.count == 2


def test_an_id_that_is_taken_is_not_given_again() -> None:
    reader = ToolCallReader(named("f"), 7)
    mine = CallIds.OURS.make("f", 2, "7")
    call = {"name": "f", "arguments": {}}
    found = lines_read(reader, [call | {"id": mine}, call | {"id": mine}, call])
    assert found is not None
    assert [one["id"] for one in found] == [
        mine,
        CallIds.OURS.make("f", 1, "7"),
        CallIds.OURS.make("f", 3, "7"),  # the second number is the model's own already
    ]
    again = lines_read(reader, [call | {"id": mine}])
    assert again is not None
    assert again[0]["id"] not in [one["id"] for one in found]


F = {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    "calls",
    [[], None, 5, [{}], [F | {"name": ""}], [F | {"name": 5}], [F | {"name": "g"}],
     [{"name": "f"}], [F | {"arguments": []}], [F | {"arguments": "{}"}],
     [F | {"arguments": {"a": float("nan")}}], [F | {"arguments": {"a": "\ud800"}}],
     [F, F | {"name": ""}]],
)  # fmt: skip
def test_a_bad_call_counts_nothing(calls: Any) -> None:
    reader = ToolCallReader(named("f"), 7)
    assert lines_read(reader, calls) is None
    assert reader.count == 0
    assert lines_read(ToolCallReader(None, 7), [F]) is None


# ---------------------------------------------------------------- calls without markers
BARE_CALL = '{"name": "weather", "parameters": {}}'


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Rome"}',
        '{"name": "unknown", "parameters": {}}',
        '{"name": "weather"} is how to call it',
        "{" * 100_000,
        '{"name" 5}',
        "{}",
        "[1]",
        " " * 1000,
        "Look: weather()",
        f"{BARE_CALL}]",
    ],
    ids=lambda text: text[:20],
)
def test_json_that_is_no_call_is_content_without_delay(text: str) -> None:
    parser = ChannelParser(rules_of(LLAMA), "", ToolCallReader(TOOLS, seed=5))
    early, late = parser.add(text), parser.finish()
    assert seen_of(early + late) == ([], text, "", [])
    assert not late or not text.strip() or text == "{}"


@pytest.mark.parametrize(
    ("text", "how", "warnings"),
    [
        (BARE_CALL, {"tools": None}, []),
        (f'{BARE_CALL}; {{"name": "unknown", "parameters": {{}}}}', {}, []),
        ('{"type": "function", "name": "unknown", "parameters": {}}', {}, [UNREADABLE_CALL]),
        ('{"name": "weather", "param', {}, [UNREADABLE_CALL]),
    ],
    ids=["no tools", "one unknown tool", "an unknown tool", "half"],
)
def test_bare_json_is_a_call_only_if_it_is_whole_and_was_offered(
    text: str, how: dict[str, Any], warnings: list[str]
) -> None:
    assert read(rules_of(LLAMA), text, step=1, **how) == ([], text, "", warnings)


@pytest.mark.parametrize("form", [AnswerForm.JSON, AnswerForm.REGEX])
@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        (BARE_CALL, True),
        (f'{{"a": {BARE_CALL}}}', False),
        (f'["", {BARE_CALL}', False),
        ('{"parameters": 1}', False),
        ('{"name": "weather", "param', False),
    ],
)
def test_an_answer_of_a_form_is_a_bare_call_or_none(
    text: str, is_call: bool, form: AnswerForm
) -> None:
    calls, content, _, warnings = read(rules_of(LLAMA), text, step=3, form=form)
    assert (len(calls), content, warnings) == (int(is_call), "" if is_call else text, [])
    parser = ChannelParser(rules_of(LLAMA), "", ToolCallReader(TOOLS, seed=5), form=form)
    early = parser.add(text)
    assert bool(early) is ("{" in text[1:] and not is_call), "text that can be no call waits"


def ids_in(text: str, form: ToolFormat = MISTRAL) -> list[str]:
    pieces = pieces_of(rules_of(form), [said(form, text)])
    lines = "".join(p.text for p in pieces if p.channel is Channel.TOOL_CALL).split("\n")[:-1]
    return [json.loads(line)["id"] for line in lines]


def test_ids_fit_the_family_are_the_same_again_and_the_models_own_is_kept_once() -> None:
    text = '[{"name": "weather", "arguments": {}}, {"name": "time", "arguments": {}}]'
    found = ids_in(text)
    assert ids_in(text) == found
    own = ids_in("a[CALL_ID]Ab3dE6gH9[ARGS]{}b[CALL_ID]Ab3dE6gH9[ARGS]{}c[CALL_ID]short[ARGS]{}")
    assert own[0] == "Ab3dE6gH9"
    assert (len(set(found)), len(set(own))) == (2, 3)
    assert all(CallIds.NINE.fits(one) for one in [*found, *own])
    assert ids_in(IN_K2 * 2, KIMI) == ["functions.f:0", "functions.f:1"]


# ---------------------------------------------------------------- whatever a value is
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*MARKS, *(begin for form, _ in FORMATS for begin in form.begins)]),
        st.sampled_from(["null", "True", "0123", '{"a": "', "\\", "'", '"', "\r\n", "\n", "  ",
                         "🦊", "\x85", "x" * 5000, "f(", ")", "<", "call:f{", "a", "#", "\0"]),
        st.text(max_size=4),
    ),
    max_size=6,
).map("".join)  # fmt: skip
ROWS = st.recursive(
    st.one_of(TEXTS, st.integers(-9, 9), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=3,
)


@given(
    one=st.sampled_from(FORMATS),
    content=TEXTS,
    rows=st.lists(ROWS, max_size=2),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    is_thought=st.booleans(),
)
def test_any_value_comes_back_as_it_was_or_not_at_all(
    one: tuple[ToolFormat, Callable[..., str]],
    content: str,
    rows: list[Any],
    sizes: list[int],
    is_thought: bool,
) -> None:
    """Between tags and Gemma's quotes, a text of many marks may be no value that can be read."""
    form, written = one
    is_quoted = form.shows_its_end and "gemma" not in form.name
    if form.name == "minicpm5" and "]]>" in content:
        return
    arguments = {"content": content, **({"rows": rows} if is_quoted else {})}
    text = said(form, written("f", arguments))
    text = f"<think>{text}</think>" if is_thought else text
    for parts in ([text], cut_up(text, sizes)):
        calls, shown, _, warnings = seen_of(pieces_of(rules_of(form), parts))
        assert calls in ([("f", arguments)], [])
        assert calls or (warnings and shown == text) or is_thought
        assert calls or not is_quoted or is_thought
