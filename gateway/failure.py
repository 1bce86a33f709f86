"""An HTTP request that gets an error: raised anywhere, and shaped by the API that was asked."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from mlxsup.protocol.errors import invalid


class Failure(Exception):
    """The answer to a request is an error; all that read requests raise it for what they refuse.

    Attributes:
        status: of the HTTP response, if nothing was sent before.
        message: one sentence for people, which says what to do.
        code: one word for programs; empty for none.
        param: the field that is wrong, `messages[1].content`; empty for none.
        is_retryable: whether the same request may succeed soon; None if that does not matter,
            because no client tries this status again.
        retry_after_s: when it may; None for no advice.
        headers: further ones, by name.
        detail: what else programs may read, by name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "",
        param: str = "",
        is_retryable: bool | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.is_retryable = is_retryable
        self.retry_after_s = retry_after_s
        self.headers = headers or {}
        self.detail = detail or {}

    def to_plain(self) -> dict[str, Any]:
        """Return its arguments by name: `Failure(**failure.to_plain())` is the same again."""
        return dict(vars(self))


def bad_field(param: str, message: str) -> Failure:
    """Return the failure of a field of the body that cannot be used."""
    return Failure(HTTPStatus.BAD_REQUEST, message, code="invalid_request", param=param)


def bad_value(param: str, expected: str, got: object, *, shown: str = "") -> Failure:
    """Return the failure of a field with a value of another type, or none; arguments as for
    `invalid`."""
    if got is None:
        return bad_field(param, f"{param} must be {expected}, and is missing")
    return bad_field(param, invalid(param, expected, got, shown=shown).message)


def check_choice(param: str, choices: Collection[str], got: object) -> str:
    """Return a text, after a check that it is one of these.

    Raises:
        Failure: it is none; the message names them.
    """
    if isinstance(got, str) and got in choices:
        return got
    shown = repr(got)[:40] if isinstance(got, str) else ""
    raise bad_value(param, f"one of {', '.join(choices)}", got, shown=shown)
