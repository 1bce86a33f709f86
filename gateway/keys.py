"""Who asks: API keys, read again whenever their file changes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from mlxsup.protocol.key_file import Key, KeyFileError, digest_of, read_keys

from .failure import Failure

CALLER = "mlxsup.caller"
"""The key of an ASGI scope under which `Guard` keeps the `Caller`."""

logger = logging.getLogger(__name__)

Seen = tuple[int, ...] | None
"""What tells one version of a file from another; None: there is none."""


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request is.

    Attributes:
        account: the name under `[clients]`; empty: that of the gateway's process.
        is_operator: whether its key may load, unload and restart models.
        has_key: whether it has one that counts; otherwise none is needed.
    """

    account: str = ""
    is_operator: bool = False
    has_key: bool = False


class Keys:
    """The keys that a gateway takes.

    Args:
        path: their file; None: there are none, and none is needed.
        is_needed: whether a key is needed even while there is no file, because others than the
            users of this machine reach the gateway.
    """

    def __init__(self, path: Path | None = None, *, is_needed: bool = False) -> None:
        self._path = path
        self._is_needed = is_needed
        self._seen: Seen = None
        # By digest; None while no key is needed.
        self._keys: dict[str, Key] | None = {} if is_needed else None
        self._problem = ""

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Who has sent a request with these headers.

        Raises:
            Failure: it needs a key and has none, or one that is not known; or the file is unusable.
        """
        self._look()
        if self._problem:
            raise Failure(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the gateway cannot read its keys; see `mlxsup logs mlxsup-gateway`",
                code="keys_unusable",
                is_retryable=False,
            )
        if self._keys is None:
            return Caller()
        given = list(_given(headers))
        for key in given:
            # No key can be found by how long this takes: nobody chooses a digest.
            if found := self._keys.get(digest_of(key)):
                return Caller(found.account, is_operator=found.is_operator, has_key=True)
        raise _refused(is_wrong=bool(given))

    @property
    def are_needed(self) -> bool:
        """Whether requests need one now."""
        self._look()
        return self._keys is not None

    def _look(self) -> None:
        """Reads the file if it is not the one that was read last."""
        if self._path is None:
            return
        seen = _version(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            keys = read_keys(self._path)
        except KeyFileError as error:
            # Refused is safer than open.
            self._problem = str(error)
            self._keys = {}
            logger.error("keys cannot be used: %s", error)
            return
        self._problem = ""
        if keys is None:
            self._keys = {} if self._is_needed else None
        else:
            self._keys = {key.digest: key for key in keys}
        logger.info("keys read count=%s", "none" if keys is None else len(keys))


def _version(path: Path) -> Seen:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return (error.errno or 0,)
    return (
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_size,
        status.st_mode,
        status.st_uid,
    )


def _given(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[str]:
    """The keys that a request has: as OpenAI's clients send them, and as Anthropic's do."""
    for name, value in headers:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer" and key.strip():
                yield key.strip()
        elif name == b"x-api-key" and value.strip():
            yield value.decode("latin-1").strip()


def _refused(*, is_wrong: bool) -> Failure:
    how = "send one as `authorization: Bearer KEY` or as `x-api-key: KEY`"
    return Failure(
        HTTPStatus.UNAUTHORIZED,
        "no such key: it is wrong, or was revoked; `mlxsup key list` shows those that there are"
        if is_wrong
        else f"a key is needed: {how}; `mlxsup key new NAME` makes one",
        code="invalid_api_key" if is_wrong else "missing_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def operator_needed(what: str, *, param: str = "") -> Failure:
    """Who asks has a key, and not that of an operator.

    Args:
        what: needs one.
        param: the field that does; empty for the whole request.
    """
    return Failure(
        HTTPStatus.FORBIDDEN,
        f"{what} needs the key of an operator: `mlxsup key new NAME --operator` makes one",
        code="operator_only",
        param=param,
    )
