"""The responses that are kept, so that others can continue them: in memory only, the latest ones,
and those of each key for itself."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from .. import limits
from ..failure import Failure, bad_field, bad_value, check_choice

INPUT_ITEMS = 20
MOST_INPUT_ITEMS = 100
"""The number of an input's items that are listed by default, and at most."""


class Item(NamedTuple):
    """An item of an input.

    Attributes:
        id: as the request has it; empty if it has none.
        json: of the item.
    """

    id: str
    json: bytes


class Recalled(NamedTuple):
    """The items that a request refers to, each list in JSON.

    Attributes:
        history: the items of the conversation that it continues.
        referred: the items that its input has ids of, in their order.
    """

    history: bytes = b"[]"
    referred: bytes = b"[]"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """One response.

    Attributes:
        id: of the response.
        previous: the id of the response that it continues; empty for none.
        json: the response as it was sent.
        inputs: the JSON of the items of its own input, by their ids.
        outputs: the same of its output.
        has_failed: true if it cannot be continued.
    """

    id: str
    previous: str
    json: bytes
    inputs: Mapping[str, bytes]
    outputs: Mapping[str, bytes]
    has_failed: bool

    @property
    def size(self) -> int:
        """Return the bytes that it counts: at least `LEAST_KEPT_BYTES`, so that there are few."""
        items = sum(
            len(id) + len(data) + limits.KEPT_ITEM_BYTES
            for some in (self.inputs, self.outputs)
            for id, data in some.items()
        )
        return max(len(self.json) + items, limits.LEAST_KEPT_BYTES)


@dataclass(slots=True)
class _Owner:
    """The responses of one key.

    Attributes:
        responses: by their ids, the one that was used last at the end.
        places: for the id of each item, the id of its response.
        size: of all of them.
    """

    responses: dict[str, KeptResponse] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    size: int = 0

    def add(self, kept: KeptResponse) -> None:
        self.responses[kept.id] = kept
        self.places |= dict.fromkeys([*kept.inputs, *kept.outputs], kept.id)
        self.size += kept.size

    def remove(self, id: str) -> None:
        kept = self.responses.pop(id)
        self.size -= kept.size
        for item in (*kept.inputs, *kept.outputs):
            if self.places.get(item) == id:
                del self.places[item]


class KeptResponses:
    """All that are kept. If there are too many, the key that has most loses the one that it has
    not used for longest: no key can push out what others have.
    """

    def __init__(self, most_bytes: int = limits.MAX_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._owners: dict[str, _Owner] = {}  # by the digests of their keys

    def keep(self, key: str, kept: KeptResponse) -> None:
        """Keep a response, as long as there is room."""
        self._owners.setdefault(key, _Owner()).add(kept)
        while sum(owner.size for owner in self._owners.values()) > self._most_bytes:
            heaviest = max(self._owners, key=lambda one: self._owners[one].size)
            self._remove(heaviest, next(iter(self._owners[heaviest].responses)))

    def find(self, key: str, id: str) -> KeptResponse:
        """Return a response.

        Raises:
            Failure: it is not kept for this key.
        """
        owner = self._owners.get(key)
        if owner is None or id not in owner.responses:
            raise _not_kept(f"response {id[:100]}", "response_not_found", "")
        return owner.responses[id]

    def remove(self, key: str, id: str) -> None:
        """Forget a response."""
        self.find(key, id)
        self._remove(key, id)

    def retain(self, keys: Collection[str]) -> None:
        """Forget the responses of all other keys."""
        for key in self._owners.keys() - keys:
            del self._owners[key]

    def recall(self, key: str, previous: str, references: Iterable[tuple[int, str]]) -> Recalled:
        """Return what a request refers to.

        Args:
            key: of the request.
            previous: the response that it continues; empty for none.
            references: the ids of items, each with its place in the input.

        Raises:
            Failure: some of it is not kept for this key, or is too long.
        """
        history: list[bytes] = []
        for one in self._chain(key, previous):
            history += [*one.inputs.values(), *one.outputs.values()]
        referred = [self._item(key, id, f"input[{place}].id") for place, id in references]
        length = sum(map(len, history)) + sum(map(len, referred))
        if length > limits.MAX_BODY_BYTES:
            size = limits.MAX_BODY_BYTES // 2**20
            raise Failure(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                (
                    f"the conversation that this request continues exceeds {size} MiB; start a new "
                    "one"
                ),
                code="request_too_large",
                param="previous_response_id" if previous else "input",
            )
        return Recalled(_list(history), _list(referred))

    def _chain(self, key: str, last: str) -> list[KeptResponse]:
        """Return the responses of a conversation from its first; they count as used now."""
        owner, id = self._owners.get(key, _Owner()), last
        chain: list[KeptResponse] = []
        while id:
            if (kept := owner.responses.get(id)) is None:
                before = f", which {chain[-1].id} continues," if chain else ""
                what = f"response {id[:100]}{before}"
                raise _not_kept(what, "previous_response_not_found", "previous_response_id")
            if kept.has_failed:
                message = f"previous_response_id: {id} has failed; continue an earlier response"
                raise bad_field("previous_response_id", message)
            chain.append(kept)
            id = kept.previous
        chain.reverse()
        for kept in chain:
            owner.responses[kept.id] = owner.responses.pop(kept.id)
        return chain

    def _item(self, key: str, id: str, param: str) -> bytes:
        owner = self._owners.get(key, _Owner())
        kept = owner.responses.get(owner.places.get(id, ""))
        if kept is None:
            raise _not_kept(f"item {id[:100]}", "item_not_found", param)
        return kept.outputs[id] if id in kept.outputs else kept.inputs[id]

    def _remove(self, key: str, id: str) -> None:
        self._owners[key].remove(id)
        if not self._owners[key].responses:
            del self._owners[key]


def named(items: Sequence[Item], name: str) -> dict[str, bytes]:
    """Return items by their ids; one that has none gets one with the name of its request."""
    found: dict[str, bytes] = {}
    for place, (id, data) in enumerate(items):
        if not id:
            id = f"item_{name}_{place}"
            data = b'{"id":"%b",%b' % (id.encode(), data[1:])
        found[id] = data
    return found


def list_items(items: Mapping[str, bytes], query: Mapping[str, str]) -> bytes:
    """Return a page of a list of items, in JSON."""
    ids = list(items)
    if check_choice("order", ("asc", "desc"), query.get("order", "desc")) == "desc":
        ids.reverse()
    if after := query.get("after"):
        if after not in items:
            raise bad_field("after", "after must be the id of an item of this input")
        ids = ids[ids.index(after) + 1 :]
    limit = query.get("limit", str(INPUT_ITEMS))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST_INPUT_ITEMS):
        raise bad_value(
            "limit", f"an integer from 1 to {MOST_INPUT_ITEMS}", limit, shown=limit[:40]
        )
    page = ids[: int(limit)]
    ends: dict[str, Any] = {
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
        "has_more": len(ids) > len(page),
    }
    rest = json.dumps(ends, ensure_ascii=False)[1:].encode()
    return b'{"object":"list","data":%b,%b' % (_list([items[id] for id in page]), rest)


def _list(items: Iterable[bytes]) -> bytes:
    return b"[%b]" % b",".join(items)


def _not_kept(what: str, code: str, param: str) -> Failure:
    message = (
        f"{what} is not stored here (deleted, never stored, of another key, too old, or lost "
        "in a restart); send the whole conversation"
    )
    return Failure(HTTPStatus.NOT_FOUND, message, code=code, param=param)
