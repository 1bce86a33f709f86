"""The only form in which errors cross a process boundary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """Every error that a client can get; docs/troubleshooting.md says what to do."""

    INVALID_REQUEST = "invalid_request"
    UNKNOWN_MODEL = "unknown_model"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    OVERLOADED = "overloaded"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    LOAD_FAILED = "load_failed"
    MODEL_FAILED = "model_failed"
    UNLOADED = "unloaded"
    WORKER_CRASHED = "worker_crashed"
    QUARANTINED = "quarantined"
    SLOW_CONSUMER = "slow_consumer"
    DUPLICATE_ID = "duplicate_id"
    SUPERSEDED = "superseded"
    UNSUPPORTED_VERSION = "unsupported_version"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


RETRYABLE = frozenset(
    {
        ErrorCode.OVERLOADED,
        ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.UNLOADED,
        ErrorCode.WORKER_CRASHED,
        ErrorCode.SLOW_CONSUMER,
        ErrorCode.SUPERSEDED,
        ErrorCode.SHUTTING_DOWN,
    }
)
"""Codes after which the same request may well succeed later."""


class RemoteError(Exception):
    """An error as it travels: a code to branch on, a sentence for people, numbers for machines.

    Attributes:
        code: what happened.
        message: one sentence that says what was wrong and what was expected.
        retryable: whether the same request may succeed later.
        detail: facts by name (JSON types only), such as `tokens_sent` or `known`.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retryable: bool | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = code in RETRYABLE if retryable is None else retryable
        self.detail: dict[str, Any] = dict(detail or {})

    def __repr__(self) -> str:
        return f"RemoteError({self.code.value}, {self.message!r}, detail={self.detail!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteError) and self.to_wire() == other.to_wire()

    def __hash__(self) -> int:
        return hash((self.code, self.message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy it: an exception is made again of its message alone otherwise."""
        return type(self).from_wire, (self.to_wire(),)

    def to_wire(self) -> dict[str, Any]:
        """Return the map that is sent."""
        return {
            "code": self.code.value,
            "message": self.message,
            "retryable": self.retryable,
            "detail": self.detail,
        }

    @classmethod
    def from_wire(cls, value: object) -> RemoteError:
        """Read what `to_wire` made; a code that a newer daemon has added counts as `internal`.

        Raises:
            ValueError: the value is not such a map.
        """
        match value:
            case {"code": str(code), "message": str(message), "retryable": bool(retryable), **rest}:
                known = ErrorCode(code) if code in set(ErrorCode) else ErrorCode.INTERNAL
                detail = rest.get("detail", {})
                if isinstance(detail, dict):
                    return cls(known, message, retryable=retryable, detail=detail)
        raise ValueError("an error needs a code, a message, retryable and a detail map")


def invalid(
    parameter: str, expected: str, got: object = None, *, shown: str = "", subject: str = ""
) -> RemoteError:
    """Return the error for a value that its parameter cannot have; never repeats a prompt.

    Args:
        parameter: its name.
        expected: what the value must be, as a noun phrase.
        got: the value; only its type is shown, or the value itself if it is a number.
        shown: what to show instead of that.
        subject: the part of the parameter that is wrong, if it is not all of it.
    """
    return RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"{subject or parameter} must be {expected}, not {shown or _describe(got)}",
        detail={"parameter": parameter, "expected": expected},
    )


def unfit(parameter: str, why: str) -> RemoteError:
    """Return the error for a parameter that does not go with the rest of its request."""
    return RemoteError(ErrorCode.INVALID_REQUEST, why, detail={"parameter": parameter})


def unknown(parameter: object, known: Iterable[str], where: str = "") -> RemoteError:
    """Return the error for a parameter that there is not."""
    name = str(parameter)[:64]
    return unfit(name, f"unknown parameter {name!r}{where}; known are {', '.join(sorted(known))}")


def check_encodable(parameter: str, text: str, *, subject: str = "") -> None:
    """Refuse text with half a pair of surrogates.

    Raises:
        RemoteError: `invalid_request`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        expected = "text that can be encoded as UTF-8"
        raise invalid(parameter, expected, subject=subject, shown="lone surrogates") from None


def _describe(value: object) -> str:
    if value is None or isinstance(value, bool | int | float):
        return repr(value)[:40]
    kinds = {"str": "text", "list": "a list", "dict": "a map", "bytes": "bytes"}
    return kinds.get(type(value).__name__, f"a {type(value).__name__}")
