"""A connection that notes what a driver does with it."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.ids import RequestId


class Connection:
    """What a driver needs of one, and what was done with it."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.opened: list[RequestId] = []
        self.delay_s: float | None = None
        self.link: Any = None
        self.pumps: list[bool] = []

    def open_command(self, request_id: RequestId, *_: object, is_subscription: bool) -> None:
        assert is_subscription
        self.opened.append(request_id)

    def pump(self) -> bool:
        self.done.append("pump")
        return self.pumps.pop(0) if self.pumps else False

    def pump_messages(self) -> bool:
        self.done.append("pump messages")
        return self.pumps.pop(0) if self.pumps else False

    def cancel(self, request_id: RequestId) -> None:
        self.done.append(("cancel", request_id))

    def close(self) -> None:
        self.done.append("close")

    def terminate(self) -> None:
        self.done.append("terminate")
