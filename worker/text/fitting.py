"""Makes a chat fit the model's template: as given if the template takes it, else changed, and said.

A template is the model's program, and the client often cannot mend what it has sent: the same
messages come again with every turn. So a chat that a template refuses, or of which it leaves a
message out, is changed as little as possible. No MLX here.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from .chat_messages import with_text_arguments

Message = dict[str, Any]
Render = Callable[[list[Message]], str]
"""Renders messages with a template; raises anything if that refuses them."""

BETWEEN_TEXTS = "\n\n"

MOST_S = 10.0
"""No further attempt begins after so many seconds: a template may be slow."""

MOST_SEARCHES = 32
"""Messages that are looked for in all of a prompt, because they are not where they should be."""

_WORDS = re.compile(r"\w+(?: \w+)*")
_SEARCHED = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A chat as the template took it.

    Attributes:
        messages: as they were rendered.
        rendered: what the template made of them.
        changes: what was changed, a phrase each.
    """

    messages: list[Message]
    rendered: str
    changes: tuple[str, ...] = ()


def fit(
    messages: list[Message], render: Render, clock: Callable[[], float] = time.monotonic
) -> Fitted:
    """Render a chat, changed if it must be.

    Steps are added until the template takes the chat and shows every message of it; then each that
    turns out not to be needed is left out again. So there are at most twice as many attempts as
    steps. If nothing helps, a chat of which the template shows a part stays as it is.

    Args:
        messages: as `plain_messages` makes them.
        render: has the template render them.
        clock: monotonic seconds.

    Raises:
        Exception: what the template raised for the chat as given; nothing helped.
    """
    attempts = _Attempts(render, clock)
    as_given = attempts.make(messages)
    if as_given.problem is None:
        return Fitted(messages=messages, rendered=as_given.rendered)
    for count in range(1, len(STEPS) + 1):
        steps: Sequence[Step] = STEPS[:count]
        if attempts.make(_changed(messages, steps)).problem is not None:
            continue
        for step in reversed(STEPS[:count]):
            fewer = [one for one in steps if one is not step]
            if attempts.make(_changed(messages, fewer)).problem is None:
                steps = fewer
        changed = _changed(messages, steps)
        return Fitted(
            messages=changed,
            rendered=attempts.make(changed).rendered,
            changes=tuple(step.says for step in steps),
        )
    if isinstance(as_given.problem, Exception):
        raise as_given.problem
    return Fitted(messages=messages, rendered=as_given.rendered, changes=(as_given.problem,))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One rendering of a chat, and its fault."""

    rendered: str
    problem: Exception | str | None


class _Attempts:
    """The renderings of one chat in several forms, each made once."""

    def __init__(self, render: Render, clock: Callable[[], float]) -> None:
        self._render = render
        self._clock = clock
        self._ends_at = clock() + MOST_S
        self._made: list[tuple[list[Message], _Attempt]] = []

    def make(self, messages: list[Message]) -> _Attempt:
        """Render messages, unless they were rendered before or there is no time."""
        for before, made in self._made:
            if before == messages:
                return made
        if self._made and self._clock() > self._ends_at:
            return _Attempt("", "no time was left")
        try:
            rendered = self._render(messages)
            made = _Attempt(rendered, _left_out(messages, rendered))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a template raises is its refusal
            made = _Attempt("", error)
        self._made.append((messages, made))
        return made


@dataclass(frozen=True, slots=True)
class Step:
    """One way to change a chat.

    Attributes:
        says: what it changes.
        change: makes other messages; equal ones if there is nothing to change.
    """

    says: str
    change: Callable[[list[Message]], list[Message]]


def _changed(messages: list[Message], steps: Sequence[Step]) -> list[Message]:
    for step in steps:
        messages = step.change(messages)
    return messages


# ---------------------------------------------------------------- what a template leaves out


def _left_out(messages: Sequence[Message], rendered: str) -> str | None:
    """Return what to say if a message is not in a prompt; None if all are.

    Words of each are looked for, because templates trim and escape. Those of the assistant are not:
    many templates leave out its thoughts, or its text beside a call.
    """
    at = searches = 0
    for message in messages:
        if message["role"] == "assistant":
            continue
        words = _words(message["content"])
        found = rendered.find(words, at) if words else at
        if found < 0 and searches < MOST_SEARCHES:  # some templates show a system text at the end
            searches += 1
            if rendered.find(words, 0, at) < 0:
                return "the template does not show every message"
        elif found >= 0:
            at = found + len(words)
    return None


def _words(text: str) -> str:
    """Return the longest run of words in the beginning of a text, without what might be escaped."""
    return max(_WORDS.findall(text[:_SEARCHED]), key=len, default="")


# ---------------------------------------------------------------- the form of messages

_PROBE = "Antananarivo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form in which a template reads messages: the same chat, written in another way.

    Attributes:
        has_parts: whether a content is a list of parts.
        has_text_arguments: whether the arguments of a call are JSON.
    """

    has_parts: bool = False
    has_text_arguments: bool = False

    def of(self, messages: list[Message]) -> list[Message]:
        """Return the messages in this form."""
        if self.has_text_arguments:
            messages = with_text_arguments(messages)
        if self.has_parts:
            return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return messages


def render_or_nothing(render: Render, messages: list[Message]) -> str:
    """Return what a template makes of messages; nothing if it refuses them."""
    try:
        return render(messages)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  whatever a template raises is its refusal
        return ""


def find_form(render: Render, call_id: str) -> Form:
    """Find out what form a template reads, from what it makes of a few words.

    Args:
        render: has the template render messages.
        call_id: one that it takes.
    """

    def rendered(form: Form, *messages: Message) -> str:
        return render_or_nothing(render, form.of(list(messages)))

    asked = {"role": "user", "content": _PROBE}
    function = {"name": "probe", "arguments": {"key": _PROBE}}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    has_parts = _PROBE not in rendered(Form(), asked) and _PROBE in rendered(
        Form(has_parts=True), asked
    )
    as_map = rendered(Form(has_parts=has_parts), asked, called)
    text_form = Form(has_parts=has_parts, has_text_arguments=True)
    # Inserted into text as it is, a map is no JSON.
    is_text = (not as_map or f"'key': '{_PROBE}'" in as_map) and rendered(text_form, asked, called)
    return text_form if is_text else Form(has_parts=has_parts)


# ---------------------------------------------------------------- the steps


def _system_first(messages: list[Message]) -> list[Message]:
    texts = [m["content"] for m in messages if m["role"] == "system" and m["content"]]
    others = [message for message in messages if message["role"] != "system"]
    return [*([{"role": "system", "content": BETWEEN_TEXTS.join(texts)}] if texts else ()), *others]


def _users_role(messages: list[Message]) -> list[Message]:
    changed = []
    for place, message in enumerate(messages):
        role, text = message["role"], message["content"]
        if role not in ("user", "assistant"):
            if role == "tool":
                text = f"Result of {message.get('name') or 'the tool'}:\n{text}"
            elif place and messages[place - 1]["role"] != "system":
                text = f"{role}: {text}"
            message = {"role": "user", "content": text}
        changed.append(message)
    return changed


def _one_call_each(messages: list[Message]) -> list[Message]:
    changed: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            changed.append(message)
            continue
        results: dict[str, list[Message]] = {}
        while place < len(messages) and messages[place]["role"] == "tool":
            call_id = str(messages[place].get("tool_call_id"))
            results.setdefault(call_id, []).append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            changed.append(
                message | {"tool_calls": [call]}
                if number == 0
                else {"role": "assistant", "content": "", "tool_calls": [call]}
            )
            changed += results.pop(str(call.get("id")) if isinstance(call, dict) else "", [])
        changed += chain.from_iterable(results.values())
    return changed


def _map_arguments(messages: list[Message]) -> list[Message]:
    return [
        message | {"tool_calls": [_with_map(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_map(call: Any) -> Any:
    match call:
        case {"function": {"name": _, **rest} as function} if not isinstance(
            given := rest.get("arguments"), dict
        ):
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            arguments = {"text": text} if given is not None and text.strip() else {}
            return call | {"function": function | {"arguments": arguments}}
    return call


def _one_text_beside_calls(messages: list[Message]) -> list[Message]:
    changed = []
    for message in messages:
        thought, text = message.get("reasoning_content"), message["content"]
        if message.get("tool_calls") and isinstance(thought, str) and thought and text:
            message = message | {"content": BETWEEN_TEXTS.join((thought, text))}
            del message["reasoning_content"]
        changed.append(message)
    return changed


def _user_first(messages: list[Message]) -> list[Message]:
    place = next((n for n, m in enumerate(messages) if m["role"] != "system"), None)
    if place is None or messages[place]["role"] != "assistant":
        return messages
    return [*messages[:place], {"role": "user", "content": ""}, *messages[place:]]


def _joined_neighbours(messages: list[Message]) -> list[Message]:
    changed: list[Message] = []
    for role, run in groupby(messages, key=lambda message: message["role"]):
        turns = list(run)
        if role == "tool" or len(turns) == 1:
            changed += turns
            continue
        whole: Message = {"role": role}
        for name in ("content", "reasoning_content"):
            texts = [turn[name] for turn in turns if turn.get(name)]
            if texts or name == "content":
                whole[name] = BETWEEN_TEXTS.join(texts)
        calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
        changed.append(whole | ({"tool_calls": calls} if calls else {}))
    return changed


STEPS = (
    Step("system messages were joined and put first", _system_first),
    Step("parallel calls were split into one message each", _one_call_each),
    Step("call arguments that are not objects were wrapped in one", _map_arguments),
    Step("reasoning next to a call was joined with the text", _one_text_beside_calls),
    Step("an empty user message was put first", _user_first),
    Step("messages of other roles were sent as user messages", _users_role),
    Step("neighbouring messages of one role were joined", _joined_neighbours),
)
"""In the order in which they are tried and applied; the last but one changes the most, and the last
joins what the others leave."""
