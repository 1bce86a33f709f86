"""The harmony format, in which gpt-oss answers: each part has a header that says what it is.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

`analysis` is reasoning, `final` is content, and a part with a recipient is a tool call whatever its
channel. `commentary` without one is what the model says to the user before it calls, so it is
content; in an answer with a format, whose content is nothing else, it is reasoning.

Text that is no header is shown at once, with a warning: a model that leaves its format must not
fall silent.
"""

from __future__ import annotations

import re
from typing import Any

from .call_grammars import CallForm
from .channels import HEADER, NORMAL, REASONING, TOOL, ChannelRules, Header
from .tool_calls import Tools
from .tool_formats import ToolFormat, json_values

BEGINS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>")
"""After each of these, wherever it occurs, comes a header, or nothing."""

INSIDE = ("<|message|>", "<|constrain|>")
CALL_END = "<|call|>"
ENDS = ("<|return|>", CALL_END)
"""These end the answer."""

CHANNELS = ("analysis", "commentary", "final")
ROLES = ("assistant", "user", "system", "developer", "tool")
NO_RECIPIENTS = ("", "user", "assistant", "all")

MAX_WORD = 200
MAX_HEADER = 512
_MARKER = re.compile(r"(<\|(?:start|end|return|call|channel|constrain)\|>)")
_HALF_MARKER = re.compile(r"<(?:\|\w{0,9}\|?)?$")
_CONTENT_TYPE = re.compile(r"[\w/+.-]{1,40}")
_OPENING = re.compile(r"<\|start\|>assistant[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*$")


def harmony_rules() -> ChannelRules:
    """Return the rules by which gpt-oss marks the parts of its answers."""
    transitions = {state: [(marker, HEADER) for marker in BEGINS] for state in (NORMAL, REASONING)}
    for state, edges in transitions.items():
        edges += [(marker, state) for marker in INSIDE]
    return ChannelRules(
        transitions=transitions | {TOOL: [(marker, HEADER) for marker in BEGINS]},
        header=Header(end="<|message|>", read=read_header, called=called_in, never_shown=INSIDE),
        tool_format=ToolFormat(
            name="harmony",
            parse=parse_call,
            forms=(CallForm(begin=("",), one=("$plain\n$arguments",)),),
        ),
    )


def opening_of(prompt: str) -> str:
    """Return the header, complete or not, with which the caller of a raw prompt opened the
    answer."""
    has_body = prompt.endswith("<|message|>")
    found = _OPENING.search(prompt.removesuffix("<|message|>"))
    if found is None or read_header(found[0], False) is None:
        return ""
    return found[0] + ("<|message|>" if has_body else "")


def read_header(header: str, has_form: bool) -> str | None:
    """See `Header.read`."""
    words = _words(header)
    if words is None:
        return None
    channel, recipient = words
    if recipient not in NO_RECIPIENTS:
        return TOOL
    if channel == "analysis" or (has_form and channel != "final"):
        return REASONING
    return NORMAL


def called_in(header: str) -> str:
    """See `Header.called`."""
    words = _words(header.removesuffix("<|message|>"))
    return f"{words[1].removeprefix('functions.')}\n" if words else ""


def parse_call(text: str, tools: Tools, is_lenient: bool) -> list[dict[str, Any]]:
    """Read the call in a header and the body after it.

    Raises:
        ValueError: it is not a call.
    """
    header, _, body = text.partition("<|message|>")
    words = _words(header)
    if words is None or words[1] in NO_RECIPIENTS:
        raise ValueError("no recipient")
    values = json_values(body, is_lenient=is_lenient)
    if len(values) != 1:
        raise ValueError("no map of arguments")
    return [{"name": words[1].removeprefix("functions."), "arguments": values[0]}]


def _words(header: str) -> tuple[str, str] | None:
    """Return a header's channel and recipient, the last word perhaps cut off; None if it is not
    one."""
    if len(header) > MAX_HEADER:
        return None
    channel = recipient = ""
    marker: str | None = None
    for part in _MARKER.split(_HALF_MARKER.sub("", header)):
        if _MARKER.fullmatch(part):
            marker = part
            continue
        words = part.split()
        if words and marker == "<|start|>":
            if not _is_role(words.pop(0)):
                return None
        elif words and marker == "<|channel|>":
            channel = words.pop(0)
            if not any(known.startswith(channel) for known in CHANNELS):
                return None
        if len(words) > 2 or (
            words and marker not in ("<|start|>", "<|channel|>", "<|constrain|>")
        ):
            return None
        for word in words:
            if len(word) > MAX_WORD:
                return None
            if word.startswith("to="):
                recipient = word[3:]
            elif (
                marker == "<|start|>" and not "to=".startswith(word)
            ) or not _CONTENT_TYPE.fullmatch(word):
                return None
    return channel, recipient


def _is_role(word: str) -> bool:
    is_tool = word.startswith("functions.") and len(word) <= MAX_WORD
    return is_tool or any(role.startswith(word) for role in (*ROLES, "functions."))
