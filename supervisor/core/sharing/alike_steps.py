"""Steps that differ in nothing are charged together, so that one of them costs an addition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxsup.protocol.ids import ModelName, RequestKey

from ..requests.ledger import Request
from .device_time import DeviceTime


@dataclass(slots=True, kw_only=True)
class AlikeSteps:
    """Steps of one engine in a row that decoded the same rows, read no prompt and ended nothing,
    while the same engines worked; not frozen, because each step is added to it.

    Attributes:
        device: of the engine.
        payers: the requests of the rows that have not ended.
        keys: of the rows that each step decoded, in order, those of ended requests included.
        took_s: seconds of all of them.
        at: when the last was heard of, in monotonic seconds.
    """

    device: DeviceTime
    payers: list[Request]
    keys: list[RequestKey]
    took_s: float = 0.0
    at: float

    def charge(self, engine: ModelName, pay: Callable[[Request, float], None]) -> float:
        """Has each payer pay its part, and returns what all steps cost."""
        cost_s = self.device.cost_s(engine, max(self.took_s, 0.0), self.at)
        for request in self.payers:
            pay(request, cost_s / len(self.keys))
        return cost_s
