"""What rows that were set aside had computed, kept for them alone.

Everything here belongs to the thread that owns the engine.

This is no prefix cache, which forgets when it is full: a kept state goes when the supervisor says
so, when its row returns, or with the process. Text, grammar and draws are replayed from the
delivered ids, as after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxsup.protocol.ids import RequestKey

from .prefix_cache import Found, own_arrays
from .prefix_index import BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What one row had computed.

    Attributes:
        cache: a layer each.
        tokens: those that it holds.
        size: bytes of both.
    """

    cache: list[Any]
    tokens: list[int]
    size: int


class KeptRows:
    """The caches of rows that will return, by their requests' keys.

    Unlike the prefix cache it forgets nothing by itself. Bounded by the supervisor, which says of
    each request that it returns or does not.
    """

    def __init__(self) -> None:
        self._states: dict[RequestKey, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._states

    @property
    def held_bytes(self) -> int:
        """The size of what it keeps: arrays and ids."""
        return sum(state.size for state in self._states.values())

    def keep(self, key: RequestKey, cache: list[Any], tokens: list[int]) -> None:
        """Takes over the cache of a row; nobody else may use it from now on.

        Args:
            key: of the row's request.
            cache: of the row, on the current stream.
            tokens: what it holds.
        """
        size = own_arrays(cache) + BYTES_PER_TOKEN * len(tokens)
        self._states[key] = _State(cache=cache, tokens=tokens, size=size)

    def take(self, key: RequestKey, tokens: list[int]) -> Found | None:
        """The cache of a row that returns; None if none is kept, or not of these tokens.

        Args:
            key: of the row's request.
            tokens: the whole row's: at least one must be left to read.
        """
        state = self._states.pop(key, None)
        if state is None or len(state.tokens) >= len(tokens):
            return None
        count = len(state.tokens)
        if state.tokens != tokens[:count]:
            return None
        return Found(cache=state.cache, count=count, shared=count)

    def drop(self, *keys: RequestKey) -> None:
        """Frees what is kept of rows that do not return; unknown keys are ignored."""
        for key in keys:
            self._states.pop(key, None)

    def clear(self, *, spared: RequestKey | None = None) -> None:
        """Frees everything but the state of one request."""
        self.drop(*(key for key in list(self._states) if key != spared))
