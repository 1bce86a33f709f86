"""The errors that a client raises."""

from __future__ import annotations

from mlxsup.protocol.errors import ErrorCode, RemoteError


class RequestError(RemoteError):
    """A request or command ended with an error.

    Attributes:
        code: what happened; compares equal to its name, `error.code == "unknown_model"`.
        message: one sentence for people.
        retryable: whether the same request may succeed later.
        detail: facts by name, such as `tokens_sent` or `known`.
    """

    @classmethod
    def of(cls, error: RemoteError) -> RequestError:
        """Return the error as the user meets it."""
        return cls(error.code, error.message, retryable=error.retryable, detail=error.detail)

    def __repr__(self) -> str:
        return f"RequestError({self.code.value}, {self.message!r}, detail={self.detail!r})"


class ConnectionLost(ConnectionError):
    """No daemon answers, or the one that answered is gone; nothing is resent automatically.

    Attributes:
        message: one sentence for people.
        endpoint: where the daemon was looked for.
        hint: what to do about it; may be empty.
        is_turned_away: whether the other side ended the connection before it answered anything.
    """

    def __init__(
        self, message: str, endpoint: str, hint: str = "", *, is_turned_away: bool = False
    ) -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.endpoint = endpoint
        self.hint = hint
        self.is_turned_away = is_turned_away


class SubscriptionClosed(Exception):
    """Ends the wait for an event of a subscription that its owner has closed; no user meets it."""


def internal(message: str) -> RequestError:
    """Return the error for a peer that broke the protocol."""
    return RequestError(ErrorCode.INTERNAL, message)
