"""Messages as chat templates take them: text, maps, and the ids and names that belong together.

No MLX here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError, invalid
from mlxsup.protocol.pictures import is_picture, pictures_of

from .tool_calls import CallIds

_OpenCall = tuple[Any, dict[str, Any]]
"""The id that a client gave to a call, and the call as the template gets it."""


_ROLES = {"developer": "system", "function": "tool"}
"""The roles that few templates know, and what the others call them."""

_SYSTEM = ("system", "developer")

PICTURE = "\ue002picture\ue003"
"""Stands for each picture in the text of a message that a template gets."""

BREAK = "\ue004\ue005"
"""Stands in a special token that a user or a tool wrote: the prompt is tokenised in pieces there,
so that the token becomes text, and ends or begins no turn."""

_MEDIA = re.compile(r"(?:input_)?(image|audio|video|file|document)(?:_url)?")
_PLURALS = {"audio": "audio"}


def with_picture_marks(
    messages: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[tuple[str, bytes]]]:
    """Return the messages with `PICTURE` as the text of each picture, and the place and the file of
    each."""
    found = [(at, part["data"]) for at, _, part in pictures_of(messages)]
    marked = []
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list) and any(map(is_picture, parts)):
            mark = {"type": "text", "text": PICTURE}
            parts = [mark if is_picture(part) else part for part in parts]
            message = message | {"content": parts}
        marked.append(message)
    return marked, found


def without_media(
    messages: Sequence[dict[str, Any]], hint: str = "send text"
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the messages with a mark for each image, file and the like, and what was changed.

    In the client's last message such a part is what the request is about; in earlier ones and in
    results of tools it comes again with every turn, and the client cannot take it back.

    Args:
        messages: of the client.
        hint: what the client may do about an image.

    Raises:
        RemoteError: `invalid_request`; the last message is the user's, and has one.
    """
    others = ("assistant", *_SYSTEM)
    last = max((n for n, one in enumerate(messages) if one["role"] not in others), default=-1)
    changed: dict[str, None] = {}
    shown = []
    for place, message in enumerate(messages):
        parts = message.get("content")
        if isinstance(parts, list) and any(map(_media, parts)):
            content = []
            for number, part in enumerate(parts):
                if (kind := _media(part)) is None:
                    content.append(part)
                    continue
                if place == last and message["role"] == "user":
                    path = part.get("at") or f"messages[{place}].content[{number}]"
                    raise RemoteError(
                        ErrorCode.INVALID_REQUEST,
                        f"{path}: this model does not take {_PLURALS.get(kind, kind + 's')}; "
                        + (hint if kind == "image" else "send text"),
                        detail={"parameter": path},
                    )
                mark = f"[{kind}: not shown]"
                changed[f"what the model does not take was given as {mark}"] = None
                content.append({"type": "text", "text": mark})
            message = message | {"content": content}
        shown.append(message)
    return shown, tuple(changed)


def _media(part: Any) -> str | None:
    """Return what a part is that is not text; None if it is text, or nothing known."""
    kind = part.get("type") if isinstance(part, dict) else None
    found = _MEDIA.fullmatch(kind) if isinstance(kind, str) else None
    return found[1] if found else None


def plain_messages(
    messages: Sequence[dict[str, Any]], ids: CallIds = CallIds.OURS
) -> list[dict[str, Any]]:
    """Messages with content that is text, calls with ids and arguments that are maps, and results
    with the id and the name of what they answer.

    An id of another family's form is replaced, in the call and in its result, by one that the
    model's template takes.

    Raises:
        RemoteError: `invalid_request`; a content is something else.
    """
    plain = [_with_text(message) for message in messages]
    open_calls: list[_OpenCall] = []
    number = 0
    for place, message in enumerate(plain):
        calls = message.get("tool_calls")
        if isinstance(calls, list) and all(map(_is_call, calls)):
            named = [_with_id(call, ids, number + nth) for nth, call in enumerate(calls)]
            open_calls = list(zip([call.get("id") for call in calls], named, strict=True))
            number += len(calls)
            plain[place] = message | {"tool_calls": named}
        elif message["role"] == "tool":
            plain[place] = _answered(message, open_calls)
    return plain


def without_special_tokens(
    messages: Sequence[dict[str, Any]], broken: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Return the messages with `BREAK` in each special token that a user or a tool wrote.

    Those of the system and the assistant stay: some templates and models switch modes by them.

    Args:
        messages: as `plain_messages` makes them.
        broken: puts the breaks into a text.
    """
    return [
        message | {"content": broken(message["content"])}
        if message["role"] in ("user", "tool")
        else message
        for message in messages
    ]


def text_of_messages(body: RequestBody) -> str:
    """Return the text that a model without a chat template continues: the messages' texts, as
    paragraphs.

    Raises:
        RemoteError: `invalid_request`; the request wants a template, or there is no text.
    """
    if not body.messages_as_text:
        problem, parameter = ": send prompt instead of messages", "messages"
    elif body.chat_template_kwargs:
        problem, parameter = ", which chat_template_kwargs are for", "chat_template_kwargs"
    elif body.offered_tools:
        problem, parameter = ", which tools are shown with", "tools"
    else:
        texts = [message["content"] for message in plain_messages(body.messages or ())]
        return "\n\n".join(text for text in texts if text)
    raise RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"this model has no chat template{problem}",
        detail={"parameter": parameter},
    )


def with_text_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with arguments as JSON: some templates insert them into text as they
    are."""
    result = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = message | {"tool_calls": [_with_text_arguments(call) for call in calls]}
        result.append(message)
    return result


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(content):
            content = "".join(texts)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise invalid("messages", "text", content, subject="the content of a message")
    role = message["role"]
    plain = message | {"role": _ROLES.get(role, role), "content": content}
    calls = plain.get("tool_calls")
    if calls is None or calls == []:
        # Templates ask whether the key is there.
        plain.pop("tool_calls", None)
    elif isinstance(calls, list):
        plain["tool_calls"] = [_with_plain_arguments(call) for call in calls]
    return plain


def _with_plain_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            try:
                value = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                return call
            return call | {"function": function | {"arguments": value}}
    return call


def _with_text_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": arguments} as function} if not isinstance(arguments, str):
            text = json.dumps(arguments, ensure_ascii=False)
            return call | {"function": function | {"arguments": text}}
    return call


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def _with_id(call: dict[str, Any], ids: CallIds, number: int) -> dict[str, Any]:
    """Give a call an id that the template takes: the same given id always becomes the same."""
    typed, given = {"type": "function"} | call, call.get("id")
    if ids.fits(given):
        return typed
    name = str(call["function"].get("name", ""))
    if isinstance(given, str) and given and ids is not CallIds.NUMBERED:
        return typed | {"id": ids.make(name, 0, given)}
    return typed | {"id": ids.make(name, number, "call")}


def _answered(message: dict[str, Any], calls: list[_OpenCall]) -> dict[str, Any]:
    """Give a result the id and the name of its call: the one it names by its id, or else the next
    in line, of those of its own name if it has one."""
    given, name = message.get("tool_call_id"), message.get("name")
    fitting = [open_call for open_call in calls if given in (None, open_call[0])]
    named = [open_call for open_call in fitting if open_call[1]["function"].get("name") == name]
    found = next(iter([*named, *fitting]), None)
    if found is None:
        return message
    calls.remove(found)
    call = found[1]
    return {"name": call["function"].get("name")} | message | {"tool_call_id": call["id"]}
