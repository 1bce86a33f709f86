"""The rows of a `Step` as they travel: what the supervisor decides by is plain, and what only
clients read is a `DeltaBody` that stays packed.

The supervisor trusts no worker: it checks everything that it reads and counts, and of a body
nothing but that it is there, because the client checks the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from .codec import Form, read_part, to_map, undecodable
from .ids import RequestKey
from .states import FinishReason, PauseReason, RowState

BYTES_PER_TOKEN = 4
REQUIRED = frozenset({"key", "tokens", "body"})


@dataclass(slots=True, kw_only=True)
class Row(ABC):
    """The part that the supervisor reads of one step's work for one row in one channel.

    Attributes:
        key: the request this belongs to.
        tokens: new token ids, packed; empty for a row that only ended.
        warning: a sentence for people, shown with the result.
        finish: set on the row's last delta; by then the row has left the batch.
        paused: set on the last delta of a row that was paused; it has left the batch, too.
        pause_reason: why it was paused unasked: `memory`.
        prefill_s: from insert to the first token; set with the first token.
        cached_tokens: of the prompt, taken from a cache; set with the first token.
        is_prompt: whether this is a piece of the prompt, which has no tokens of the answer.
    """

    key: RequestKey
    tokens: bytes = b""
    warning: str | None = None
    finish: FinishReason | None = None
    paused: RowState | None = None
    pause_reason: PauseReason | None = None
    prefill_s: float | None = None
    cached_tokens: int = 0
    is_prompt: bool = False

    @property
    @abstractmethod
    def body(self) -> bytes:
        """Return what the client is shown, packed by `delta.pack_body`; empty: nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class PackedRow(Row):
    """A row of a `Step` that has arrived; not frozen, because one is made for every token.

    It travels as a list of `key`, `tokens` and `body`, and a map if there is more to say.
    """

    body: bytes = b""

    def __eq__(self, other: object) -> bool:
        """Compare rows by their fields, in whichever way they were made."""
        if not isinstance(other, PackedRow):
            return NotImplemented
        return all(getattr(self, one.name) == getattr(other, one.name) for one in fields(PackedRow))


NEWS = tuple(one.name for one in fields(Row) if one.name not in REQUIRED)
"""The fields in the map at the end of a row."""


class PlainRow(PackedRow):
    """A row that only has new tokens, as nearly all: three fields are written and not eleven.

    A worker makes one for a plain token, and the supervisor for one that has arrived.
    """

    __slots__ = ()
    warning = finish = paused = pause_reason = prefill_s = None
    cached_tokens = 0
    is_prompt = False

    def __init__(self, key: Any, tokens: bytes, body: bytes) -> None:
        self.key = key
        self.tokens = tokens
        self.body = body


def pack_rows(rows: Sequence[Row]) -> list[Any]:
    """Return the rows as msgpack packs them."""
    packed = []
    for row in rows:
        plain: list[Any] = [row.key, row.tokens, row.body]
        if type(row) is not PlainRow:
            more = to_map(row, Row)
            if news := {name: more[name] for name in NEWS if name in more}:
                plain.append(news)
        packed.append(plain)
    return packed


def read_rows(value: Any, path: str) -> list[PackedRow]:
    """Return the rows of a message that has arrived.

    Raises:
        DecodeError: something is wrong with one of them.
    """
    if type(value) is not list:
        raise undecodable(f"{path} must be a list")
    rows: list[PackedRow] = []
    for item in value:
        if type(item) is list and len(item) == 3:
            key, tokens, body = item
            is_typed = type(key) is int and type(tokens) is type(body) is bytes
            if is_typed and body and not len(tokens) % BYTES_PER_TOKEN:
                rows.append(PlainRow(key, tokens, body))
                continue
        rows.append(_read_row(item, path))
    return rows


def _read_row(item: Any, path: str) -> PackedRow:
    """Return a row with a map; raise if something is wrong with it."""
    if type(item) is not list or not 3 <= len(item) <= 4:
        raise undecodable(f"{path} must be lists of key, tokens, body, and a map if there is more")
    key, tokens, body, more = *item[:3], item[3] if len(item) == 4 else {}
    if type(more) is not dict or more.keys() & REQUIRED:
        raise undecodable(f"{path} must be a map of the other fields at the end of a list")
    row = read_part(PackedRow, {"key": key, "tokens": tokens, "body": body, **more}, path)
    if len(row.tokens) % BYTES_PER_TOKEN:
        raise undecodable(f"{path}.tokens must be {BYTES_PER_TOKEN} bytes for each token")
    if row.tokens and not row.body:
        raise undecodable(f"{path}.body is empty, though there are tokens")
    return row


Rows = Annotated[Sequence[Row], Form(read_rows, pack_rows)]
"""As `Step` has them."""
