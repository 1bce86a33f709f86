"""The memory that layers keep for each row: measured by workers, planned with by the daemon."""

from __future__ import annotations

from .codec import Size
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

    layers: Size
    token_bytes: Size = 0
    row_bytes: Size = 0
    window: Size | None = None
