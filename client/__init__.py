"""The Python client, asynchronous and synchronous.

`AsyncClient` is imported when it is first asked for, so that a command that needs the synchronous
client alone starts without asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxsup.protocol.client_messages import Timings, Usage
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.states import Channel, FinishReason, NoticeKind

from .client import Client
from .errors import ConnectionLost, RequestError
from .results import Delta, Notice, Result
from .vectors import Embeddings, Ranked, Ranking

if TYPE_CHECKING:
    from .async_client import AsyncClient

__all__ = [
    "AsyncClient",
    "Channel",
    "Client",
    "ConnectionLost",
    "Delta",
    "Embeddings",
    "ErrorCode",
    "FinishReason",
    "Logprobs",
    "Notice",
    "NoticeKind",
    "Ranked",
    "Ranking",
    "RequestError",
    "Result",
    "Timings",
    "TokenLogprob",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name == "AsyncClient":
        from .async_client import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # `help` and completion see the names that are here, and `AsyncClient` may not be here yet.
    return sorted({*globals(), *__all__})
