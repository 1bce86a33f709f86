"""Short names for models, made from those of their repositories."""

from __future__ import annotations

import re
from collections.abc import Collection

MAX_LENGTH = 64

_DROPPED = re.compile(
    r"instruct|it|chat|mlx|hf|gguf|dwq|qat|\d+bits?|(bf|fp|f|q|mxfp|nvfp|int)\d+|model"
)
"""Words of a repository's name that tell nobody apart who has one of a kind."""

_UNUSABLE = re.compile(r"[^a-z0-9._-]+")


def short_name(title: str, taken: Collection[str]) -> str:
    """A name that is free and easy to type: `qwen3-0.6b` for `mlx-community/Qwen3-0.6B-4bit`.

    Args:
        title: OWNER/NAME, or the name of a folder.
        taken: names that other models have, in lower case.
    """
    whole = _usable(title.rstrip("/").rpartition("/")[2])
    words = whole.split("-")
    short = "-".join([words[0], *(word for word in words[1:] if not _DROPPED.fullmatch(word))])
    for name in (short, whole, _usable(title.replace("/", "-"))):
        if name not in taken:
            return name
    number = 2
    while (name := f"{whole[: MAX_LENGTH - 6]}-{number}") in taken:
        number += 1
    return name


def _usable(text: str) -> str:
    """The text in lower case, with the characters that a model's name may have."""
    usable = _UNUSABLE.sub("-", text.lower()).strip("._-")[:MAX_LENGTH].rstrip("._-")
    return usable or "model"
