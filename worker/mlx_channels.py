"""What mlx-lm's tokenizer knows of a model's chats: its markers, and how messages must look."""

from __future__ import annotations

import json
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlxsup.protocol.body import invalid

from .channels import NORMAL, REASONING, TOOL, ChannelRules


def channel_rules(tokenizer: TokenizerWrapper) -> ChannelRules:
    """The markers of a model, put together as mlx-lm's own server does (0.32.2)."""
    transitions: dict[str, list[tuple[str, str]]] = {}

    def add(state: str, marker: str | None, target: str) -> None:
        if marker:
            transitions.setdefault(state, []).append((marker, target))

    own = tokenizer.response_transitions
    if tokenizer.has_thinking:
        add(NORMAL, tokenizer.think_start, REASONING)
        add(REASONING, tokenizer.think_end, NORMAL)
    if tokenizer.has_tool_calling:
        # A format of its own that leads to calls says by itself where they begin.
        if TOOL not in {target for edges in own.values() for _, target in edges}:
            add(NORMAL, tokenizer.tool_call_start, TOOL)
        if tokenizer.has_thinking:
            add(REASONING, tokenizer.tool_call_start, TOOL)
        add(TOOL, tokenizer.tool_call_end, NORMAL)
    for marker in tokenizer.structural_markers:
        add(NORMAL, marker, NORMAL)
    for state, edges in own.items():
        for marker, target in edges:
            add(state, marker, target)
    return ChannelRules(
        transitions=transitions,
        initial=tokenizer.response_initial_state,
        parse_tool_call=tokenizer.tool_parser,
    )


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates take it: content that is text, arguments of calls that are maps.

    Raises:
        RemoteError: `invalid_request`; its content is something else.
    """
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(content):
            content = "".join(texts)
    calls = message.get("tool_calls")
    if content is None and isinstance(calls, list) and calls:
        content = ""
    if not isinstance(content, str):
        raise invalid("messages", "content that is text", content)
    plain = message | {"content": content}
    if isinstance(calls, list):
        plain["tool_calls"] = [_with_plain_arguments(call) for call in calls]
    return plain


def _with_plain_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            try:
                return call | {"function": function | {"arguments": json.loads(arguments)}}
            except ValueError:
                return call
    return call
