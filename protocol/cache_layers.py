"""What the layers of a model keep for each row: measured by workers, planned with by the daemon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from .message import Record, record


@record
class CacheLayers(Record):
    """Layers that keep equally large caches.

    Attributes:
        layers: how many there are.
        token_bytes: bytes of keys and values that one layer keeps per token of a row; 0 if it
            keeps a state instead.
        row_bytes: bytes that one layer keeps per row, however long the row is.
        window: a layer keeps at most this many tokens, besides those of the chunk that it reads;
            None: all of them.
    """

    layers: int
    token_bytes: int = 0
    row_bytes: int = 0
    window: int | None = None

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the group that a file or another process names.

        Raises:
            ValueError, TypeError, LookupError: it is none.
        """
        window = value["window"]
        return cls(
            layers=size_of_json(value["layers"]),
            token_bytes=size_of_json(value["token_bytes"]),
            row_bytes=size_of_json(value["row_bytes"]),
            window=None if window is None else size_of_json(window),
        )


def size_of_json(value: object) -> int:
    """Return a size as it was read.

    Raises:
        ValueError: it is no whole number from 0.
    """
    if type(value) is not int or value < 0:
        raise ValueError("not a size")
    return value
