"""Values of arguments that a reader of tool calls might cut, change or take for the end; cuts."""

from __future__ import annotations

MARKS = [
    "</parameter>", "</function>", "</tool_call>", "</invoke>", "</minimax:tool_call>",
    "</arg_value>", "</param>", "</longcat_arg_value>", "</longcat_tool_call>",
    "</atem:parameter>", "</atem:invoke>", "</atem:function_calls>", "<tool_call|>",
    "<end_function_call>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|/tool_call|>", "<|END_ACTION|>",
    "</function_calls>", "<|close|>argument<|sep|>", "<|close|>call<|sep|>",
    "<|close|>tools<|sep|>", "</think>", "```", '<|"|>', "<escape>", "]]>", "}", "]}", '"}',
]  # fmt: skip

EACH_MARK = [*MARKS, *(f"A line with {mark} here.\nTail stays." for mark in MARKS)]
HOSTILE = [
    "", " ", "    indented\n  two", "tail  ", "\n\nlines\n\n", "null", "None", "True", "false",
    "0123",
    "1e5",
    '{"a": "b}"}', "[1, 2]", '"quoted"', "it's \\ back\\n", 
    "crlf\r\nnext", "👩‍👩‍👧 ünï", "\t", "a,b:c=d", "<b>&amp;</b>",
    "2026-01-15", "]<]minimax[>[<item>1]<]minimax[>[</item>", *EACH_MARK,
    "".join(MARKS) + "\nTail stays.", "\n".join(MARKS) + "\nTail stays.",
]  # fmt: skip


def cut_up(text: str, sizes: list[int]) -> list[str]:
    """Return a text in parts of these sizes, again and again."""
    parts: list[str] = []
    while text:
        size = sizes[len(parts) % len(sizes)]
        parts.append(text[:size])
        text = text[size:]
    return parts
