"""The content of a message, as the daemon takes it: a text, or parts if there is more than text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from .failure import bad_value
from .fields import check_count
from .pictures import is_picture, read_picture

Message = dict[str, Any]
Part = str | dict[str, Any]
"""A text, or something else: what the model does not take of it, the worker says."""

BETWEEN_TEXTS = "\n"
"""Parts of a text are paragraphs; a chat template takes one text."""

MEDIA = {
    "input_audio": "audio", "file": "file", "input_file": "file", "container_upload": "file",
    "video_url": "video", "document": "document",
}  # fmt: skip
"""The parts of each API that no model takes, with the daemon's name for them."""


def read_text(values: Mapping[str, Any], name: str, path: str) -> str:
    """Return the text that a field of a part has.

    Raises:
        Failure: it has none; `param` names the field.
    """
    value = values.get(name)
    if not isinstance(value, str):
        raise bad_value(f"{path}.{name}", "text", value)
    return value


def read_parts(
    content: Any, path: str, read: Callable[[Any, str], Sequence[Part]], things: str = "parts"
) -> list[Part]:
    """Return the parts of something that is a text, or a list of parts; None is no text.

    Args:
        content: of a message.
        path: of it in the request.
        read: returns what a part, at its path, stands for.
        things: the word for parts.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_value(path, f"text or a list of {things}", content)
    check_count(content, path, things)
    return [one for place, part in enumerate(content) for one in read(part, f"{path}[{place}]")]


def media_part(part: Any, path: str) -> dict[str, Any] | None:
    """Return a part that is no text: a picture, or a mark that says what was there and where; None
    for a text.

    Raises:
        Failure: a picture is none.
    """
    if is_picture(part):
        return read_picture(part, path)
    kind = part.get("type") if isinstance(part, dict) else None
    known = MEDIA.get(kind) if isinstance(kind, str) else None
    return {"type": known, "at": path} if known else None


def join_parts(parts: Sequence[Part], between: str = BETWEEN_TEXTS) -> str | list[dict[str, Any]]:
    """Return the content that has these parts; neighbouring texts become one."""
    content: list[dict[str, Any]] = []
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if is_text:
            content.append({"type": "text", "text": between.join(map(str, run))})
        else:
            content += [part for part in run if isinstance(part, dict)]
    match content:
        case []:
            return ""
        case [{"type": "text", "text": str(text)}]:
            return text
    return content
