"""Sorts an answer's text into its parts: content, reasoning, and tool calls.

Models mark the parts with their own texts (`<think>`, `<tool_call>` …). The markers are found
wherever the pieces of text are cut, and are never shown. No MLX here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlxsup.protocol.states import Channel

from .bare_calls import BareCallWatch
from .stops import find_first, undecided
from .tool_calls import CallIds, ToolCallParser, ToolCallReader

NORMAL = "normal"
REASONING = "reasoning"
TOOL = "tool"
HEADER = "header"

_CHANNELS = {NORMAL: Channel.CONTENT, REASONING: Channel.REASONING, TOOL: Channel.TOOL_CALL}
_PLAIN = {NORMAL: Channel.CONTENT, REASONING: Channel.REASONING}

UNREADABLE_CALL = "the model began a tool call that cannot be read; it is left in the text"
BROKEN_HEADER = "the model broke the format of its answers; what it wrote is left in the text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The text before a part that says what the part is; never shown.

    Attributes:
        end: the marker after it.
        read: takes the header so far, from the marker that began it, and whether the answer
            must have a format; returns the state that the header leads to, or None as soon as the
            text cannot be a header. It then stays None, whatever follows.
        never_shown: markers of headers that are left out of a call that cannot be read.
    """

    end: str
    read: Callable[[str, bool], str | None]
    never_shown: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRules:
    """How a model marks the parts of its answers.

    Attributes:
        transitions: for each state, the texts that end it and the state that each leads to;
            `normal`, `reasoning` and `tool` are shown, the text of any other state is not.
        initial: the state before the opening if it is not `normal`.
        header: how to read the text of the state `header`; None: markers alone end that state.
        parse_tool_call: makes a call of the text between the markers; may raise anything. For a
            call that a header announces, it gets the header, too.
        call_ids: what the ids of calls look like.
        has_bare_calls: whether a whole answer of JSON is a call if it names a tool.
        needs_tools: whether the markers of calls are ordinary text in a request without tools.
        needs_ends: whether a call only counts with the marker that ends it, because the parser
            would also make a call of half a call.
    """

    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    initial: str | None = None
    header: Header | None = None
    parse_tool_call: ToolCallParser | None = None
    call_ids: CallIds = CallIds.OURS
    has_bare_calls: bool = False
    needs_tools: bool = False
    needs_ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text of one channel; on `tool_call` it is one complete call, as a line of JSON."""

    channel: Channel
    text: str
    warning: str | None = None


class ChannelParser:
    """Sorts the text of one answer into channels.

    Args:
        rules: the model's rules.
        opening: the end of the prompt that opened the answer, for example `<think>`; it is read as
            if the model had written it, and not shown.
        calls: reads tool calls.
        has_form: whether the answer must have a format: then its content is nothing else.
    """

    def __init__(
        self, rules: ChannelRules, opening: str, calls: ToolCallReader, *, has_form: bool = False
    ) -> None:
        self._rules = rules
        self._calls = calls
        self._has_form = has_form
        has_calls = bool(calls.names) or not rules.needs_tools
        # For each state: its markers, where each leads, and the characters that one may begin with.
        self._edges = {
            state: (list(targets), targets, {marker[0] for marker in targets})
            for state, edges in rules.transitions.items()
            if (targets := {text: to for text, to in edges if has_calls or to != TOOL})
        }
        if rules.header is not None:
            end = rules.header.end
            self._edges[HEADER] = ([end], {end: HEADER}, {end[0]})
        self._state = rules.initial or NORMAL
        self._held = ""
        self._is_broken = False  # said once
        self._header = ""
        self._header_from = 0  # the text before it was a marker, or the prompt's
        self._call_head = ""  # belongs to the call; not shown if the call cannot be read
        self._call_marker = ""
        self._call_text: list[str] = []
        self._bare: BareCallWatch | None = None
        if opening:
            self.add(opening)
            self._header_from = len(self._header)
        if rules.has_bare_calls and calls.names and not has_form:
            self._bare = BareCallWatch(calls.names)

    @property
    def is_in_content(self) -> bool:
        """Whether text that comes now is content, and not a header."""
        return self._state == NORMAL

    @property
    def channel(self) -> Channel:
        """The channel of text that comes now."""
        shown = _CHANNELS.get(self._state, Channel.CONTENT)
        # A call is shown once it is complete, or as content if it never becomes one.
        return Channel.CONTENT if shown is Channel.TOOL_CALL else shown

    @property
    def has_calls(self) -> bool:
        """Whether the answer contains a tool call."""
        return self._calls.count > 0

    def plain_channel(self, text: str) -> Channel | None:
        """The channel of a text that `add` would give as one piece and that would change nothing
        else; None if it might do more. For an empty text, the channel that it would be in."""
        if self._held or self._bare is not None:
            return None
        edges = self._edges.get(self._state)
        if edges is not None:
            for character in edges[2]:
                if character in text:
                    return None
        return _PLAIN.get(self._state)

    def add(self, text: str) -> list[Piece]:
        """The pieces that became certain with this text."""
        pieces: list[Piece] = []
        pending, self._held = self._held + text, ""
        while pending:
            if self._state == HEADER and self._rules.header is not None:
                pending, shown = self._read_header(pending)
            else:
                pending, shown = self._read_part(pending)
            pieces += shown
        return pieces

    def finish(self) -> list[Piece]:
        """The pieces still held back when the answer is over; a call without its end is read if
        its format shows whether it is complete."""
        held, self._held = self._held, ""
        pieces = self._show(held)
        if self._state == TOOL:
            pieces += self._end_call("", is_cut=self._rules.needs_ends)
        return pieces + self._end_bare()

    def _read_part(self, pending: str) -> tuple[str, list[Piece]]:
        """Up to the next marker: what is left to read, and what is shown."""
        if self._state not in self._edges:
            return "", self._show(pending)
        markers, targets, beginnings = self._edges[self._state]
        if not any(character in pending for character in beginnings):
            return "", self._show(pending)
        found = find_first(pending, markers)
        if found is None:
            certain = len(pending) - undecided(pending, markers)
            self._held = pending[certain:]
            return "", self._show(pending[:certain])
        start, marker = found
        pieces = self._show(pending[:start])
        return pending[start + len(marker) :], pieces + self._move(marker, targets[marker])

    def _read_header(self, pending: str) -> tuple[str, list[Piece]]:
        """The same for a header; text that is not one is read once more, as content."""
        assert self._rules.header is not None
        end = self._rules.header.end
        at = pending.find(end)
        if at >= 0:
            certain, rest = at, pending[at + len(end) :]
        else:
            certain, rest = len(pending) - undecided(pending, [end]), ""
        header = self._header + pending[:certain]
        state = self._rules.header.read(header, self._has_form)
        if state is None:
            stray = header[self._header_from :] + pending[certain:]
            self._state = NORMAL
            warning = None if self._is_broken else BROKEN_HEADER
            self._is_broken = True
            return stray, [Piece(channel=Channel.CONTENT, text="", warning=warning)]
        self._header = header
        if at < 0:
            self._held = pending[certain:]
            return "", []
        self._state = state
        self._call_head, self._call_marker, self._call_text = header + end, "", []
        return rest, []

    def _move(self, marker: str, state: str) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == TOOL:
            # After a header no marker is ever shown.
            pieces = self._end_call("" if self._call_head else marker)
        elif state != self._state:
            pieces = self._end_bare()
        if state == TOOL:
            self._call_head, self._call_marker, self._call_text = "", marker, []
        elif state == HEADER:
            self._header, self._header_from = marker, len(marker)
        self._state = state
        return pieces

    def _show(self, text: str) -> list[Piece]:
        channel = _CHANNELS.get(self._state)
        if not text or channel is None:
            return []
        if channel is Channel.TOOL_CALL:
            self._call_text.append(text)
            return []
        if channel is Channel.CONTENT and self._bare is not None:
            text = self._bare.add(text)
            if not self._bare.is_undecided:
                self._bare = None
        return [Piece(channel=channel, text=text)] if text else []

    def _end_call(self, marker: str, *, is_cut: bool = False) -> list[Piece]:
        text, self._call_text = "".join(self._call_text), []
        parse = None if is_cut else self._rules.parse_tool_call
        lines = self._calls.read(self._call_head + text, parse, self._rules.call_ids)
        if lines is not None:
            return [Piece(channel=Channel.TOOL_CALL, text=line) for line in lines]
        if self._call_head and self._rules.header is not None:
            for inner in self._rules.header.never_shown:
                text = text.replace(inner, "")
        whole = self._call_marker + text + marker
        if not whole and not self._call_head:
            return []
        return [Piece(channel=Channel.CONTENT, text=whole, warning=UNREADABLE_CALL)]

    def _end_bare(self) -> list[Piece]:
        """Decides about content that might have been a call: it is one, or stays text."""
        bare, self._bare = self._bare, None
        if bare is None or not bare.text:
            return []
        if not bare.is_call_like:
            return [Piece(channel=Channel.CONTENT, text=bare.text)]
        parse = self._rules.parse_tool_call
        lines = self._calls.read(bare.text, parse, self._rules.call_ids, are_known=True)
        if lines is not None:
            return [Piece(channel=Channel.TOOL_CALL, text=line) for line in lines]
        return [Piece(channel=Channel.CONTENT, text=bare.text, warning=UNREADABLE_CALL)]
