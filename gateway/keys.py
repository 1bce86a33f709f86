"""Who asks: API keys, read again and again by a thread, so that no disk holds up a request.

A thread compares the bytes of the file, whose time is coarser than two edits may be, and requests
read a snapshot. Without an answer of the disk for four seconds every request is refused.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from mlxsup.protocol.key_file import (
    Key,
    KeyFileError,
    KeyPlace,
    UnreadKeyFileError,
    digest_of,
    parse_keys,
    read_key_file,
    read_mark,
    remember,
)

from .failure import Failure

CALLER = "mlxsup.caller"
"""The key of an ASGI scope under which `Guard` keeps the `Caller`."""

LOOK_S = 0.5
"""How often the file is read."""

STALE_PULSES = 4
"""So many pulses of the event loop without an answer of the disk, and nobody is let in. Pulses and
not seconds: a process that was stopped has counted none when it goes on."""

FIRST_LOOK_S = 4.0
"""How long the start waits for the file; after that, requests are refused until it was read."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request is.

    Attributes:
        account: the name under `[clients]`; empty: that of the gateway's process.
        is_operator: whether its key may load, unload and restart models.
        key: the digest of its key; empty: none is needed.
    """

    account: str = ""
    is_operator: bool = False
    key: str = ""

    @property
    def has_key(self) -> bool:
        """True if it has a key that counts."""
        return bool(self.key)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the latest look has found; never changed, so that any thread may read it.

    Attributes:
        keys: those that count, by their digests; None: none is needed.
        problem: why nobody is let in; empty if somebody may be.
        data: what is in the file; None: nothing that could be read.
    """

    keys: Mapping[str, Key] | None
    problem: str = ""
    data: bytes | None = None


OPEN = Seen(None)
UNREAD = Seen({}, "they have not been read yet")


class Keys:
    """The keys that a gateway takes.

    Once keys were in force, only the mark that `mlxsup key off` leaves opens the gateway.

    Args:
        place: where they are; None: there are none, and none is needed.
        are_required: whether a key is needed even if there never was one.
        were_in_force: whether they were in force before this process.

    Attributes:
        are_in_force: whether somebody has made a key, and nobody has turned keys off since.
    """

    def __init__(
        self,
        place: KeyPlace | None = None,
        *,
        are_required: bool = False,
        were_in_force: bool = False,
    ) -> None:
        self._place = place
        self._are_required = are_required
        self.are_in_force = were_in_force
        self._seen = OPEN if place is None else UNREAD
        self._unanswered = 0
        self._unmarked = ""

    def watch(self) -> None:
        """Start to read the file; returns once it was read, or after `FIRST_LOOK_S`."""
        has_looked = threading.Event()
        threading.Thread(target=self._watch, args=(has_looked,), name="keys", daemon=True).start()
        has_looked.wait(FIRST_LOOK_S)

    def pulse(self) -> None:
        """Count a second of the event loop; `look` begins the count again."""
        self._unanswered += 1

    @property
    def digests(self) -> frozenset[str] | None:
        """Return those of all keys that count; None while the file is unusable."""
        seen = self._seen
        if seen.problem:
            return None
        return frozenset([""] if seen.keys is None else seen.keys)

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Return who has sent a request with these headers.

        Raises:
            Failure: it needs a key and has none, or one that is not known; or the file is unusable.
        """
        seen = self._seen
        if self._place is not None and (seen.problem or self._unanswered > STALE_PULSES):
            raise _unusable(has_none=self._are_required and not self.are_in_force)
        if seen.keys is None:
            return Caller()
        given = list(_given(headers))
        for key in given:
            # No key can be found by how long this takes: nobody chooses a digest.
            if found := seen.keys.get(digest_of(key)):
                return Caller(found.account, is_operator=found.is_operator, key=found.digest)
        raise _refused(is_wrong=bool(given))

    def look(self) -> None:
        """Read the file, and what the mark says; only on the thread that watches, and in tests."""
        if self._place is None:
            return
        seen = self._read(self._place)
        if seen.problem and seen.problem != self._seen.problem:
            logger.error("keys cannot be used: %s", seen.problem)
        elif not seen.problem and seen is not self._seen:
            if seen.keys is None:
                logger.info("no keys are needed")
            else:
                logger.info("keys read count=%d", len(seen.keys))
        self._seen = seen
        self._unanswered = 0

    def _watch(self, has_looked: threading.Event) -> None:
        while True:
            self.look()
            has_looked.set()
            time.sleep(LOOK_S)

    def _read(self, place: KeyPlace) -> Seen:
        is_marked, unread = _read_mark(place)
        try:
            data, problem = read_key_file(place.file), ""
        except KeyFileError as error:
            data, problem = None, str(error)
        is_there = data is not None or os.path.lexists(place.file)
        if is_marked and not is_there:
            is_marked, unread = _read_mark(place)  # `key off` may have come between the two
        if is_there or is_marked:
            self.are_in_force = True
        elif is_marked is False:
            self.are_in_force = False
        if self.are_in_force and not is_marked:
            self._mark(place)
        if data is not None:
            return self._parsed(place, data)
        problem = problem or unread
        if not problem and self.are_in_force:
            problem = f"{place.file} is gone, and keys were in force"
        if not problem and self._are_required:
            problem = f"{place.file} has no key yet"
        return Seen({}, problem) if problem else OPEN

    def _parsed(self, place: KeyPlace, data: bytes) -> Seen:
        if data == self._seen.data:
            return self._seen
        try:
            return Seen({key.digest: key for key in parse_keys(place.file, data)}, data=data)
        except KeyFileError as error:
            return Seen({}, str(error), data)

    def _mark(self, place: KeyPlace) -> None:
        """Write the mark, which was lost with its folder or never made."""
        try:
            remember(place)
        except KeyFileError as error:
            if str(error) != self._unmarked:  # once, and not with each look
                logger.warning("keys in force not marked: %s", error)
            self._unmarked = str(error)


def _read_mark(place: KeyPlace) -> tuple[bool | None, str]:
    """Return what the mark says, and why it cannot be read."""
    try:
        return read_mark(place.mark), ""
    except UnreadKeyFileError as error:
        return None, str(error)


def _given(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[str]:
    """Return the keys that a request has: as OpenAI's clients send them, and as Anthropic's do."""
    for name, value in headers:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer" and key.strip():
                yield key.strip()
        elif name == b"x-api-key" and value.strip():
            yield value.decode("latin-1").strip()


def _unusable(*, has_none: bool) -> Failure:
    """Return the refusal of every request."""
    message = (
        "the gateway cannot read its API keys, so it refuses every request; see `mlxsup "
        "logs mlxsup-gateway`, create a key with `mlxsup key new NAME`, or allow HTTP "
        "without keys with `mlxsup key off`"
    )
    if has_none:
        message = (
            "this gateway requires API keys but has none yet; `mlxsup key new NAME` creates one"
        )
    return Failure(
        HTTPStatus.SERVICE_UNAVAILABLE, message, code="keys_unusable", is_retryable=False
    )


def _refused(*, is_wrong: bool) -> Failure:
    how = "send one as `authorization: Bearer KEY` or as `x-api-key: KEY`"
    return Failure(
        HTTPStatus.UNAUTHORIZED,
        "the API key is wrong or revoked; `mlxsup key list` lists the keys"
        if is_wrong
        else f"an API key is required: {how}; `mlxsup key new NAME` creates one",
        code="invalid_api_key" if is_wrong else "missing_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def operator_needed(what: str, *, param: str = "") -> Failure:
    """Return the refusal of a caller whose key is not that of an operator.

    Args:
        what: needs one.
        param: the field that does; empty for the whole request.
    """
    return Failure(
        HTTPStatus.FORBIDDEN,
        f"{what} requires an operator key; `mlxsup key new NAME --operator` creates one",
        code="operator_only",
        param=param,
    )
