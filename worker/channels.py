"""Which part of an answer its text belongs to: content, reasoning, or a tool call.

Models mark the parts with texts of their own (`<think>`, `<tool_call>` …). The markers are found
wherever the pieces of text are cut, and are never shown. No MLX here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxsup.protocol.states import Channel

from .stops import find_first, undecided
from .tool_calls import ToolCallParser, ToolCallReader

NORMAL = "normal"
REASONING = "reasoning"
TOOL = "tool"

_CHANNELS = {NORMAL: Channel.CONTENT, REASONING: Channel.REASONING, TOOL: Channel.TOOL_CALL}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRules:
    """How a model marks the parts of its answers.

    Attributes:
        transitions: of each state, the texts that end it and the state that each leads to;
            `normal`, `reasoning` and `tool` are shown, the text of any other state is not.
        initial: the state at the start where that is not the channel's; a header, for instance.
        parse_tool_call: makes a call of the text between the markers; raises what it likes.
    """

    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    initial: str | None = None
    parse_tool_call: ToolCallParser | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text of one channel; on `tool_call` it is one whole call, as a line of JSON."""

    channel: Channel
    text: str
    warning: str | None = None


class ChannelParser:
    """Sorts the text of one answer into channels.

    Args:
        rules: the model's.
        channel: that of the first token.
        calls: reads tool calls.
    """

    def __init__(self, rules: ChannelRules, channel: Channel, calls: ToolCallReader) -> None:
        self._rules = rules
        self._calls = calls
        by_channel = {shown: state for state, shown in _CHANNELS.items()}
        # Of each state: its markers, where each leads, and the characters that one may begin with.
        self._edges = {
            state: (list(targets), targets, {marker[0] for marker in targets})
            for state, edges in rules.transitions.items()
            if (targets := dict(edges))
        }
        self._state = rules.initial or by_channel[channel]
        self._held = ""
        self._call_marker = ""
        self._call_text: list[str] = []

    @property
    def channel(self) -> Channel:
        """Where text that comes now belongs."""
        shown = _CHANNELS.get(self._state, Channel.CONTENT)
        # A call is shown when it is whole, or as content when it never becomes one.
        return Channel.CONTENT if shown is Channel.TOOL_CALL else shown

    @property
    def has_calls(self) -> bool:
        """Whether the answer has made a tool call."""
        return self._calls.count > 0

    def add(self, text: str) -> list[Piece]:
        """What became certain with this text."""
        if not self._held:
            beginnings = self._edges[self._state][2] if self._state in self._edges else ()
            if not any(character in text for character in beginnings):
                return self._show(text)
        pieces: list[Piece] = []
        pending = self._held + text
        while self._state in self._edges:
            markers, targets, _ = self._edges[self._state]
            found = find_first(pending, markers)
            if found is None:
                break
            start, marker = found
            pieces += self._show(pending[:start])
            pieces += self._move(marker, targets[marker])
            pending = pending[start + len(marker) :]
        markers = self._edges[self._state][0] if self._state in self._edges else []
        certain = len(pending) - undecided(pending, markers)
        self._held = pending[certain:]
        return pieces + self._show(pending[:certain])

    def finish(self) -> list[Piece]:
        """What was still held back, when the answer is over; a call without its end is read."""
        held, self._held = self._held, ""
        pieces = self._show(held)
        return pieces + self._end_call("") if self._state == TOOL else pieces

    def _move(self, marker: str, state: str) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == TOOL:
            pieces = self._end_call(marker)
        if state == TOOL:
            self._call_marker, self._call_text = marker, []
        self._state = state
        return pieces

    def _show(self, text: str) -> list[Piece]:
        channel = _CHANNELS.get(self._state)
        if not text or channel is None:
            return []
        if channel is Channel.TOOL_CALL:
            self._call_text.append(text)
            return []
        return [Piece(channel=channel, text=text)]

    def _end_call(self, marker: str) -> list[Piece]:
        text, self._call_text = "".join(self._call_text), []
        lines = self._calls.read(text, self._rules.parse_tool_call)
        if lines is None:
            whole = self._call_marker + text + marker
            warning = "the model began a tool call that cannot be read; it stands in the text"
            return [Piece(channel=Channel.CONTENT, text=whole, warning=warning)] if whole else []
        return [Piece(channel=Channel.TOOL_CALL, text=line) for line in lines]
