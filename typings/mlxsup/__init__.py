"""mlxsup: several MLX language models at once, each in its own process.

The Python client is imported when it is first asked for: every part of mlxsup passes through here,
and most of them need no client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .protocol.version import VERSION as __version__

if TYPE_CHECKING:
    from .client import AsyncClient, Client, ConnectionLost, RequestError

__all__ = ["AsyncClient", "Client", "ConnectionLost", "RequestError", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import client

    return getattr(client, name)


def __dir__() -> list[str]:
    return __all__
