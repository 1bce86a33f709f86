"""How long a model may stay before a swap may end its turn.

It begins with the first tokens and not with READY: a slow machine would otherwise spend its turns
on reading prompts. Three times the load bounds the time that is lost to loading to a quarter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxsup.protocol.ids import RequestKey

from ..requests.ledger import Request

RESIDENCY_LOADS = 3.0
"""A turn lasts at least this many times what it costs: the load and the prefill that follows."""


@dataclass(slots=True, kw_only=True)
class Residency:
    """One turn of a model, from READY to the end of its process.

    The time that it may stay begins when each row that was dispatched at first has gained a token
    or ended: what a turn costs before that is of no use.

    Attributes:
        ready_at: when it became READY.
        tokens_before: how many tokens the model had delivered before.
        began_at: when the time that it may stay began; None: not yet.
        is_open: whether the turn has delivered no token, or its time has not begun.
    """

    ready_at: float
    tokens_before: int
    began_at: float | None = None
    is_open: bool = True
    # Bounded by the rows of the engine. What each had been sent when it was dispatched.
    _awaited: dict[RequestKey, int] = field(default_factory=dict)

    def look(self, running: Mapping[RequestKey, Request], tokens: int, now: float) -> bool:
        """Rows were dispatched, have gained tokens or have ended.

        Args:
            running: the rows of the model.
            tokens: how many tokens the model has delivered, in all of its turns.
            now: monotonic seconds.

        Returns:
            Whether the time that the model may stay has begun with that.
        """
        if not self.is_open:
            return False
        self._awaited = {
            key: sent
            for key, sent in self._awaited.items()
            if key in running and running[key].tokens_sent == sent
        }
        has_delivered = tokens > self.tokens_before
        if not (has_delivered or self._awaited):  # at first, and if all those ended without a token
            self._awaited = {key: request.tokens_sent for key, request in running.items()}
        if self._awaited:
            self.began_at = None
            return False
        self.is_open = not has_delivered
        if self.began_at is not None:
            return False
        self.began_at = now
        return True

    def ends_at(self, *, load_s: float, min_residency_s: float) -> float:
        """From when on a swap may end the turn; infinite while its time has not begun.

        Args:
            load_s: how long the load took.
            min_residency_s: how long every turn may last.
        """
        if self.began_at is None:
            return math.inf
        cost_s = load_s + self.began_at - self.ready_at
        return self.began_at + max(min_residency_s, RESIDENCY_LOADS * cost_s)
