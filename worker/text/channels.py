"""Sorts an answer's text into its parts: content, reasoning, and tool calls.

Models mark the parts with their own texts (`<think>`, `<tool_call>` …). The markers are found
wherever the pieces of text are cut, and are never shown. No MLX here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlxsup.protocol.states import AnswerForm, Channel
from mlxsup.protocol.tool_choice import UNREADABLE_CALL

from .bare_calls import BareCallWatch
from .stops import find_first, undecided
from .tool_calls import ToolCallReader
from .tool_formats import UNKNOWN, ToolFormat, parse_json_calls

NORMAL = "normal"
REASONING = "reasoning"
TOOL = "tool"
HEADER = "header"

_PLAIN = {NORMAL: Channel.CONTENT, REASONING: Channel.REASONING}

BROKEN_HEADER = "the model broke its own output format, so its output is left in the text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The text before a part that says what the part is; never shown.

    Attributes:
        end: the marker after it.
        read: takes the header so far, from the marker that began it, and whether the answer
            must have a format; returns the state that the header leads to, or None as soon as the
            text cannot be a header. It then stays None, whatever follows.
        called: takes the header of a call; returns the name of the function, and a line break.
        never_shown: markers of headers that are left out of a call that cannot be read.
    """

    end: str
    read: Callable[[str, bool], str | None]
    called: Callable[[str], str] = str
    never_shown: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRules:
    """How a model marks the parts of its answers.

    Attributes:
        transitions: for each state, the texts that end it and the state that each leads to;
            `normal`, `reasoning` and `tool` are shown, the text of any other state is not.
        initial: the state before the opening if it is not `normal`.
        header: how to read the text of the state `header`; None: markers alone end that state.
        tool_format: how it writes calls; of their markers those of `transitions` count.
    """

    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    initial: str | None = None
    header: Header | None = None
    tool_format: ToolFormat = UNKNOWN

    @property
    def call_marks(self) -> list[str]:
        """Return the markers that begin a call in the content."""
        return [marker for marker, to in self.transitions.get(NORMAL, ()) if to == TOOL]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text of one channel; on `tool_call` it is one call, as a line of JSON.

    Attributes:
        is_cut: whether it is a call whose arguments end where the answer was cut.
    """

    channel: Channel
    text: str
    warning: str | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunCall:
    """A call whose end has not come.

    Attributes:
        identity: equal for the same call alone.
        text: so far, behind the mark that began it; for a call that a header announces, what
            `Header.called` returns comes first.
        is_bare: true if no mark began it.
    """

    identity: object
    text: str
    is_bare: bool = False


MOST_BROKEN_CALLS = 32
"""After so many calls that cannot be read, markers are text."""

MOST_BLANKS = 512
"""Characters between a marker and what shows whether a call begins."""

MOST_READ_AGAIN = 300_000
"""After so many characters were read once more because of such calls, markers are text."""

MOST_ENDS = 64
"""Of a call's end markers that are tried."""

MOST_IN_VAIN = 400_000
"""Characters of an answer that may be read in vain while it comes, and again when it is over; four
readings of the call itself come on top. What would need more is decided at the end, or is text."""


PART = 4096
"""Characters that are read at once: each marker is looked for in all of them."""


def _in_parts(text: str) -> list[str]:
    """Return a text in parts, the last one first."""
    return [text[at : at + PART] for at in range(0, len(text), PART)][::-1]


class _OpenCall:
    """A call that has begun and may still become whole, or turn out to be text.

    Attributes:
        origin: the state in which it began.
        markers: those that may end it.
        marker: what began it; empty after a header.
        head: the header before it, which belongs to it.
        lines: the calls that end right before it, in the same thought.
        before: their text, from the first marker to this one.
        ends: of each marker that may end it, where it begins and ends in the text, and the state
            it leads to.
        length: of its text.
        is_at_its_end: whether nothing but white space has come since the last of these markers.
    """

    def __init__(self, origin: str, markers: list[str], marker: str, head: str) -> None:
        self.origin = origin
        self.markers = markers
        self.marker = marker
        self.head = head
        self.lines: list[str] = []
        self.before = ""
        self.ends: list[tuple[int, int, str]] = []
        self.is_at_its_end = False
        self.length = 0
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Return everything after the marker, with the markers that may end it."""
        return "".join(self._parts)

    def add(self, text: str) -> None:
        """Append text."""
        self._parts.append(text)
        self.length += len(text)
        self.is_at_its_end = self.is_at_its_end and not text.strip()

    def add_end(self, marker: str, target: str) -> None:
        """Append a marker that may end it."""
        self.ends.append((self.length, self.length + len(marker), target))
        self.add(marker)
        self.is_at_its_end = True


class ChannelParser:
    """Sorts the text of one answer into channels.

    Args:
        rules: the model's rules.
        opening: the end of the prompt that opened the answer, for example `<think>`; it is read as
            if the model had written it, and not shown.
        calls: reads tool calls.
        form: what its content must look like, if it must be nothing else.
    """

    def __init__(
        self,
        rules: ChannelRules,
        opening: str,
        calls: ToolCallReader,
        *,
        form: AnswerForm = AnswerForm.TEXT,
    ) -> None:
        self._rules = rules
        self._tool_format = rules.tool_format
        self._calls = calls
        self._form = form
        has_calls = bool(calls.names) and form not in (AnswerForm.JSON, AnswerForm.CALL)
        self._may_begin_call = False
        # For each state: its markers, where each leads, and the characters that one may begin with.
        self._edges = {
            state: (list(targets), targets, {marker[0] for marker in targets})
            for state, edges in rules.transitions.items()
            if (targets := {text: to for text, to in edges if has_calls or to != TOOL})
        }
        self._unmarked: frozenset[str] = frozenset()
        if (unmarked := rules.tool_format.unmarked) and has_calls:
            self._unmarked = frozenset(unmarked.format(name) for name in calls.names)
            targets = dict(rules.transitions.get(NORMAL, ())) | dict.fromkeys(self._unmarked, TOOL)
            self._edges[NORMAL] = (list(targets), targets, {marker[0] for marker in targets})
        if rules.header is not None:
            end = rules.header.end
            self._edges[HEADER] = ([end], {end: HEADER}, {end[0]})
        self._state = rules.initial or NORMAL
        self._held = ""
        self._is_broken = self._has_warned = False  # each is said once
        self._header = ""
        self._header_from = 0  # the text before it was a marker, or the prompt's
        self._call: _OpenCall | None = None
        self._broken_calls = 0
        self._read_again = 0  # characters, because a call before them was none
        self._in_vain = {False: 0, True: 0}  # characters, by whether the answer was over
        self._bare: BareCallWatch | None = None
        if opening:
            self.add(opening)
            self._header_from = len(self._header)
        if form in (AnswerForm.JSON, AnswerForm.CALL) and rules.header is None:
            self._edges.pop(NORMAL, None)  # a marker in the content is a part of a string
            if form is AnswerForm.JSON and calls.names and (marks := rules.call_marks):
                self._may_begin_call = True  # but at its beginning
                beginnings = {mark[0] for mark in marks}
                self._edges[NORMAL] = (marks, dict.fromkeys(marks, TOOL), beginnings)
        if (rules.tool_format.has_bare_calls and calls.names) or form is AnswerForm.CALL:
            self._bare = BareCallWatch(calls.names, is_call=form is AnswerForm.CALL)

    @property
    def is_in_content(self) -> bool:
        """True if text that comes now is content, and not a header."""
        return self._state == NORMAL

    @property
    def channel(self) -> Channel:
        """Return the channel of text that comes now."""
        # A call is shown once it is complete, or as content if it never becomes one.
        return _PLAIN.get(self._state, Channel.CONTENT)

    @property
    def begun_call(self) -> BegunCall | None:
        """Return the call in the content that has begun and may still become whole."""
        call, bare = self._call, self._bare
        if call is not None and call.origin == NORMAL:
            head = call.head and self._rules.header and self._rules.header.called(call.head)
            return BegunCall(identity=call, text=f"{head or ''}{call.text}{self._held}")
        if bare is not None and bare.is_call_like:
            return BegunCall(identity=(bare, bare.begun), text=bare.latest, is_bare=True)
        return None

    def plain_channel(self, text: str) -> Channel | None:
        """Return the channel of a text that `add` would give as one piece and that would change
        nothing else; None if it might do more. For an empty text, return the channel that it would
        be in."""
        if self._held or (self._bare is not None and not self._bare.is_plain(text)):
            return None
        if self._may_begin_call and self._state == NORMAL:
            return None
        edges = self._edges.get(self._state)
        if edges is not None:
            for character in edges[2]:
                if character in text:
                    return None
        return _PLAIN.get(self._state)

    def add(self, text: str) -> list[Piece]:
        """Add a text; return the pieces that became certain with it."""
        pieces: list[Piece] = []
        parts = _in_parts(text)
        while parts:
            pending, self._held = self._held + parts.pop(), ""
            if self._state == HEADER and self._rules.header is not None:
                rest, shown = self._read_header(pending)
            elif self._call is not None:
                rest, shown = self._read_call(self._call, pending)
            else:
                rest, shown = self._read_part(pending)
            parts += _in_parts(rest)
            pieces += shown
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces still held back when the answer is over; read a call without its end if
        its format shows whether it is complete.

        Args:
            is_cut: whether the model would have written more, perhaps the rest of a value.
        """
        pieces: list[Piece] = []
        while True:
            held, self._held = self._held, ""
            if self._call is None:
                return pieces + self._show(held) + self._end_bare(is_cut=is_cut)
            self._call.add(held)
            rest, shown = self._settle(self._call, is_cut)
            pieces += shown + self.add(rest)

    def _read_part(self, pending: str) -> tuple[str, list[Piece]]:
        """Read up to the next marker; return what is left to read, and what is shown."""
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
        if start and self._may_begin_call and self._state == NORMAL:
            return "", self._show(pending)
        pieces = self._show(pending[:start])
        return pending[start + len(marker) :], pieces + self._move(marker, targets[marker])

    def _read_header(self, pending: str) -> tuple[str, list[Piece]]:
        """Read a header; return what `_read_part` does. Text that is no header is read again, as
        content."""
        assert self._rules.header is not None
        end = self._rules.header.end
        at = pending.find(end)
        if at >= 0:
            certain, rest = at, pending[at + len(end) :]
        else:
            certain, rest = len(pending) - undecided(pending, [end]), ""
        header = self._header + pending[:certain]
        state = self._rules.header.read(header, self._form is not AnswerForm.TEXT)
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
        if state == TOOL:
            self._open_call(NORMAL, head=header + end)
        return rest, []

    def _move(self, marker: str, state: str) -> list[Piece]:
        # What might have been a call without markers was an example for what follows.
        pieces = self._end_bare(is_text=True) if self._state == NORMAL != state else []
        if state == TOOL:
            if self._broken_calls >= MOST_BROKEN_CALLS or self._read_again >= MOST_READ_AGAIN:
                return [*pieces, *self._show(marker)]
            if marker in self._unmarked:
                self._open_call(self._state).add(marker)
            else:
                self._open_call(self._state, marker)
        self._enter(state, marker)
        return pieces

    def _show(self, text: str) -> list[Piece]:
        channel = _PLAIN.get(self._state)
        if not text or channel is None:
            return []
        if channel is Channel.CONTENT and self._may_begin_call:
            self._may_begin_call = False
            del self._edges[NORMAL]  # from here, a marker is a part of a string
        if channel is Channel.CONTENT and self._bare is not None:
            text = self._bare.add(text)
            if text and self._form is not AnswerForm.TEXT:  # it is no call, so all is the answer
                text, self._bare = text + self._bare.text, None
        return [Piece(channel=channel, text=text)] if text else []

    # ---------------------------------------------------------------- calls

    def _open_call(self, origin: str, marker: str = "", head: str = "") -> _OpenCall:
        """Begin a call, and return it."""
        ends = self._edges[TOOL][0] if TOOL in self._edges else []
        outer = self._edges[origin][1] if origin in self._edges and not head else {}
        # What ends the thought ends the call in it; another call may end this one.
        others = [
            text
            for text, to in outer.items()
            if (to == TOOL or (origin == REASONING and to != REASONING))
            and text not in ends
            and text not in self._unmarked
        ]
        self._call = _OpenCall(origin, [*ends, *others], marker, head)
        return self._call

    def _read_call(self, call: _OpenCall, pending: str) -> tuple[str, list[Piece]]:
        """Read on to what may end the call: what is left to read, and what is shown."""
        if not call.length and not call.head and self._tool_format.starts:
            first = pending.lstrip()[:1]
            if not first and len(pending) <= MOST_BLANKS:
                self._held = pending
                return "", []
            if first not in self._tool_format.starts:
                left, pieces = self._give_up(call, is_cut=True)
                return left + pending, pieces
        found = find_first(pending, call.markers)
        if found is None:
            certain = len(pending) - undecided(pending, call.markers)
            call.add(pending[:certain])
            self._held = pending[certain:]
            return "", []
        start, marker = found
        call.add(pending[:start])
        rest = pending[start + len(marker) :]
        ends = self._edges[TOOL][1] if TOOL in self._edges else {}
        if marker in ends:
            call.add_end(marker, ends[marker])
            is_over = self._tool_format.shows_its_end and call.origin != REASONING
            if is_over and len(call.ends) <= MOST_ENDS:
                lines = self._read(call, -1, is_lenient=False)
                if lines is not None:
                    return rest, self._end_call(call, lines, ends[marker], marker)
            return rest, []
        outer = self._edges[call.origin][1]
        if call.is_at_its_end:
            # A value between tags may hold whole calls: a mistake in it is judged at the end.
            may_be_lenient = self._tool_format.shows_its_end or outer[marker] != TOOL
            for is_lenient in (False, True)[: 1 + may_be_lenient]:
                if (lines := self._read(call, -1, is_lenient=is_lenient)) is None:
                    continue
                if call.origin == REASONING and outer[marker] == TOOL:
                    following = self._open_call(REASONING, marker)
                    following.lines = call.lines + lines
                    following.before = call.before + call.marker + call.text
                    return rest, []
                return marker + rest, self._end_call(call, lines, self._after(call, -1), "")
        if outer[marker] != TOOL:  # the thought is over, and the call in it was none
            left, pieces = self._give_up(call, is_cut=False)
            return left + marker + rest, pieces
        call.add(marker)
        return rest, []

    def _settle(self, call: _OpenCall, is_cut: bool) -> tuple[str, list[Piece]]:
        """Decide about a call when the answer is over: the text after it, and what is shown."""
        numbers = range(len(call.ends) - 1, -1, -1)[:MOST_ENDS]
        if call.origin == REASONING:
            numbers = numbers[: call.is_at_its_end]
        if is_cut and not self._tool_format.shows_its_end:
            numbers = numbers[:0]  # what looks like its end may be in the middle of a value
        for is_lenient in (False, True):
            # A call that began without a marker may lack the one at its end, too.
            ends_itself = not (call.marker or is_cut or is_lenient)
            if self._tool_format.shows_its_end or TOOL not in self._edges or ends_itself:
                lines = self._read(call, None, is_lenient=is_lenient, is_over=True)
                if lines is not None:
                    return "", self._end_call(call, lines, NORMAL, "")
            for number in self._in_order(call, numbers) if is_lenient else numbers:
                lines = self._read(call, number, is_lenient=is_lenient, is_over=True)
                if lines is not None:
                    begin, end, _ = call.ends[number]
                    state, marker = self._after(call, number), call.text[begin:end]
                    return call.text[end:], self._end_call(call, lines, state, marker)
        return self._give_up(call, is_cut=is_cut)

    def _in_order(self, call: _OpenCall, numbers: range) -> list[int]:
        """Return the ends of a call with a mistake, the likeliest first: before another call, or
        before nothing; otherwise the last one."""
        text = call.text
        begins = tuple(self._begins(call.origin))
        clear = [
            number
            for number in reversed(numbers)
            if not (rest := text[call.ends[number][1] :].lstrip()) or rest.startswith(begins)
        ]
        return [*clear, *(number for number in numbers if number not in clear)]

    def _read(
        self, call: _OpenCall, number: int | None, *, is_lenient: bool, is_over: bool = False
    ) -> list[str] | None:
        """Return the calls in the text before one of its ends, or in all of it."""
        length = call.length if number is None else call.ends[number][0]
        if self._in_vain[is_over] > MOST_IN_VAIN + 4 * length:
            return None
        lines = self._calls.read(
            call.head + call.text[:length],
            self._tool_format.parse,
            self._tool_format.call_ids,
            is_lenient=is_lenient,
        )
        if lines is None:
            self._in_vain[is_over] += length
        return lines

    def _after(self, call: _OpenCall, number: int) -> str:
        """Return the state after the call: the thought goes on in which it began."""
        return REASONING if call.origin == REASONING else call.ends[number][2]

    def _end_call(self, call: _OpenCall, lines: list[str], state: str, marker: str) -> list[Piece]:
        self._call = None
        self._may_begin_call = False  # the answer is one of calls, in which others may follow
        self._enter(state, marker)
        return [Piece(channel=Channel.TOOL_CALL, text=line) for line in call.lines + lines]

    def _enter(self, state: str, marker: str) -> None:
        self._state = state
        if state == HEADER:
            self._header, self._header_from = marker, len(marker)

    def _give_up(self, call: _OpenCall, *, is_cut: bool) -> tuple[str, list[Piece]]:
        """Make text of a call that cannot be read: what must be read once more, and what is shown.

        In a thought it was a thought, so that only its marker is none.

        Args:
            call: the call.
            is_cut: whether the end of its text is missing, so that its last value may hold whatever
                looks like another call.
        """
        self._call = None
        text = call.text
        self._broken_calls += bool(text)
        if call.origin == REASONING:
            self._state = REASONING
            whole = call.before + call.marker + text
            first = self._first_marker(whole)
            self._read_again += len(whole)
            return whole[len(first) :], [Piece(channel=Channel.REASONING, text=first)]
        begin, end, state = self._own_end(call, is_cut)
        self._enter(state, text[begin:end])
        self._read_again += len(text) - end
        if call.head and self._rules.header is not None:
            shown = text[:begin]  # after a header no marker is ever shown
            for inner in self._rules.header.never_shown:
                shown = shown.replace(inner, "")
        else:
            shown = call.marker + text[:end]
        if not shown and not call.head:
            return text[end:], []
        return text[end:], [self._unreadable(shown)]

    def _unreadable(self, text: str) -> Piece:
        """Return the text of a call that cannot be read; an answer says once that it has any."""
        warning = None if self._has_warned else UNREADABLE_CALL
        self._has_warned = True
        return Piece(channel=Channel.CONTENT, text=text, warning=warning)

    def _first_marker(self, text: str) -> str:
        """Return the marker that begins a thought's first call."""
        return max((one for one in self._begins(REASONING) if text.startswith(one)), key=len)

    def _begins(self, origin: str) -> list[str]:
        """Return the markers that begin a call."""
        edges = self._rules.transitions.get(origin, ())
        return [marker for marker, to in edges if to == TOOL]

    def _own_end(self, call: _OpenCall, is_cut: bool) -> tuple[int, int, str]:
        """Return the end that belongs to a call that cannot be read, not to one in its values;
        the end of its text if there is none."""
        begins, text, depth, at = self._begins(call.origin), call.text, 1, 0
        for begin, end, state in () if is_cut else call.ends:
            depth += sum(text.count(marker, at, begin) for marker in begins) - 1
            if not depth:
                return begin, end, state
            at = end
        return len(text), len(text), NORMAL

    def _end_bare(self, *, is_text: bool = False, is_cut: bool = False) -> list[Piece]:
        """Decide about content that might have been a call: it is one, or stays text."""
        bare, self._bare = self._bare, None
        if bare is None or not bare.text:
            return []
        if is_text or not bare.is_call_like:
            return [Piece(channel=Channel.CONTENT, text=bare.text)]
        is_call = self._form is AnswerForm.CALL
        parse = parse_json_calls if is_call else self._tool_format.parse
        lines = self._calls.read(bare.text, parse, self._tool_format.call_ids)
        if lines is not None:
            return [Piece(channel=Channel.TOOL_CALL, text=line) for line in lines]
        line = self._calls.read_cut(bare.text, self._tool_format.call_ids) if is_cut else None
        if is_call and line is not None:
            return [Piece(channel=Channel.TOOL_CALL, text=line, is_cut=True)]
        if self._form in (AnswerForm.REGEX, AnswerForm.JSON):  # it is what was asked for
            return [Piece(channel=Channel.CONTENT, text=bare.text)]
        return [self._unreadable(bare.text)]
