"""The calls that every rank makes of its engine, one after the other."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from mlxsup.protocol.codec import pack
from mlxsup.protocol.ids import RequestKey

from ..engine import Engine, EngineFacts, RowSetAside, RowToken, StepResult


class Replay:
    """Makes the calls of one rank, and sums up their results: the leader makes them as its step
    loop asks, and each follower in the order in which they arrive.

    A rank that has other results than the leader computes something else, and would sooner or later
    wait for a pass that no other rank begins.

    Attributes:
        number: of the latest call.
        digest: of the results so far, a CRC-32; it begins with what decides about later passes.

    Args:
        engine: of this rank.
        facts: what its load found out.
    """

    def __init__(self, engine: Engine, facts: EngineFacts) -> None:
        self._engine = engine
        self._constrained: set[RequestKey] = set()
        self.number = 0
        found = facts.batching, facts.context_length, facts.vocabulary_size
        self.digest = zlib.crc32(pack(found))

    def make(
        self,
        name: str,
        arguments: Sequence[Any],
        named: dict[str, Any],
        *,
        is_constrained: bool = False,
    ) -> Any:
        """Make a call and return its result.

        Args:
            name: of a method that changes rows or runs a pass.
            arguments, named: of the method.
            is_constrained: whether it inserts a row with a grammar. Only the leader sees how such a
                row ends, so its tokens do not count.
        """
        self.number += 1
        if is_constrained:
            self._constrained.add(arguments[0].key)
        result = getattr(self._engine, name)(*arguments, **named)
        self.digest = zlib.crc32(pack(self._shown(result)), self.digest)
        # Afterwards: the token that was computed ahead is one that its grammar may have ended.
        if name in ("remove", "set_aside"):
            self._constrained.difference_update(arguments)
        return result

    def is_constrained(self, key: RequestKey) -> bool:
        """True if a row has a grammar."""
        return key in self._constrained

    def _shown(self, result: Any) -> Any:
        match result:
            case StepResult(tokens=tokens, prefill=prefill):
                told = [_shown_token(one) for one in tokens if one.key not in self._constrained]
                return told, [(one.key, one.done, one.total, one.known) for one in prefill]
            case [RowSetAside(), *_]:
                return [
                    (one.key, one.is_kept, None if one.token is None else _shown_token(one.token))
                    for one in result
                    if one.key not in self._constrained
                ]
            case _:
                return result


def _shown_token(token: RowToken) -> tuple[Any, ...]:
    return token.key, token.token, token.finish, token.ended_by, token.vector
