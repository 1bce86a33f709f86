"""The content of a message, as the daemon takes it: a text, or parts if there is more than text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
Part = str | dict[str, Any]
"""A text, or something else: what the model does not take of it, the worker says."""

BETWEEN_TEXTS = "\n"
"""Parts of a text are paragraphs; a chat template takes one text."""

MEDIA = {
    "image": "image", "image_url": "image", "input_image": "image", "input_audio": "audio",
    "file": "file", "input_file": "file", "container_upload": "file", "video_url": "video",
    "document": "document",
}  # fmt: skip
"""The parts of each API that are no text, with the daemon's name for them."""


def media_part(kind: Any, path: str) -> dict[str, Any] | None:
    """Return a part that says what was there and where, without its data; None for a text."""
    known = MEDIA.get(kind) if isinstance(kind, str) else None
    return {"type": known, "at": path} if known else None


def join_parts(parts: Sequence[Part], between: str = BETWEEN_TEXTS) -> str | list[dict[str, Any]]:
    """Return the content that has these parts."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return between.join(texts)
    content: list[dict[str, Any]] = []
    for part in parts:
        if content and between:
            content.append({"type": "text", "text": between})
        content.append({"type": "text", "text": part} if isinstance(part, str) else part)
    return content
