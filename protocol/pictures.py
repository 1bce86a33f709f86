"""Pictures in the messages of a chat: which parts they are, and how many a request may have.

A picture is a part `{"type": "image", "data": bytes}` of a content; the bytes are an encoded file.
Only a worker opens them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import invalid, unfit
from .text import size_text

MAX_IMAGE_BYTES = 20 * 1024 * 1024
"""Of one picture; those of a request together are bounded by `codec.MAX_BODY_BYTES`."""

MAX_IMAGES = 50
"""Of one request."""

PICTURE_ROLES = frozenset({"user", "tool", "function"})
"""The roles whose messages may have pictures."""


VISION_TYPES = frozenset({
    "gemma3", "mistral3", "pixtral",
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe",
})  # fmt: skip
"""The model types that were shown to answer alike alone, in company and resumed.

Not qwen3_vl_moe: mlx-vlm 0.7.10 cuts its masks by the tokens of the longest row, so that a batch of
which all rows are padded fails.
"""


def declares_vision(config: Mapping[str, Any]) -> bool:
    """True if a config.json has a vision tower of a type that is known here, and no code of its
    own."""
    kind = config.get("model_type")
    return (
        isinstance(kind, str)
        and kind in VISION_TYPES
        and isinstance(config.get("vision_config"), dict)
        and "model_file" not in config
    )


def is_picture(part: object) -> bool:
    """True if a part of a content is a picture with its bytes."""
    return isinstance(part, dict) and part.get("type") == "image" and "data" in part


def pictures_of(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each picture of a chat: its place, the role of its message, and the part."""
    for place, message in enumerate(messages):
        parts = message.get("content")
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            if is_picture(part):
                at = part.get("at") or f"messages[{place}].content[{number}]"
                yield str(at)[:64], message["role"], part


def check_pictures(messages: Sequence[dict[str, Any]]) -> None:
    """Raise if a picture of a chat is in the wrong place, is no bytes, or is too large.

    Raises:
        RemoteError: `invalid_request`, which names the place.
    """
    count = 0
    for at, role, part in pictures_of(messages):
        count += 1
        data = part["data"]
        if role not in PICTURE_ROLES:
            raise unfit(
                at,
                f"{at}: a picture must be in a message of the user or of a tool, not of the {role}",
            )
        if not isinstance(data, bytes):
            raise invalid(at, "the bytes of a picture", data, subject=f"data of {at}")
        if not 0 < len(data) <= MAX_IMAGE_BYTES:
            shown = size_text(len(data)) if data else "an empty file"
            expected = f"a picture of at most {size_text(MAX_IMAGE_BYTES)}"
            raise invalid(at, expected, shown=shown, subject=at)
    if count > MAX_IMAGES:
        expected = f"a chat with at most {MAX_IMAGES} pictures"
        raise invalid("messages", expected, shown=f"one with {count}")
