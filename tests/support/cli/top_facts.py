"""A daemon as `mlxsup top` sees it, played in this process."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from mlxsup.client import ConnectionLost, RequestError

GIB = 2**30
AT = 1_763_900_000.0


def model(name: str, state: str = "READY", **values: Any) -> dict[str, Any]:
    """Return an entry of the status's `models`."""
    return {
        "name": name,
        "state": state,
        "generation": 1,
        "pid": 4711,
        "restarts": 0,
        "last_exit": None,
        "retry_in_s": None,
        "progress": None,
        "queued": 0,
        "running": [],
        "tokens_per_s": 93.4,
        "footprint_bytes": 2 * GIB,
        "context_length": 8192,
        "loaded_for_s": 3725.0,
        **values,
    }


def request(id: str, state: str = "answering", **values: Any) -> dict[str, Any]:
    """Return an entry of `requests`."""
    return {
        "id": id,
        "number": f"#{id.rpartition('-')[2]}",
        "model": "alpha",
        "client": "process 4711@77",
        "state": state,
        "place": 1 if state == "waiting" else None,
        "reason": "rows" if state == "waiting" else None,
        "prefill": 0.41 if state == "reading" else None,
        "expected_s": 12.0 if state in ("waiting", "reading") else None,
        "tokens_sent": 17,
        "tokens_per_s": 31.5 if state == "answering" else None,
        "engine_s": 1.5,
        **values,
    }


class PlayedDaemon:
    """A daemon in this process; called as `Client` is, it gives a client of itself.

    Attributes:
        models: of its status.
        listed: its requests.
        pid: of it.
        is_gone: whether nothing answers.
        refusal: what it answers to each order; None if it carries it out.
        orders: what it was asked to do, and to which model or request.
    """

    def __init__(self, models: list[dict[str, Any]], listed: list[dict[str, Any]]) -> None:
        self.models = models
        self.listed = listed
        self.pid = 100
        self.is_gone = False
        self.refusal: RequestError | None = None
        self.orders: list[tuple[str, str]] = []

    def __call__(self, endpoint: str) -> PlayedClient:
        """Connect."""
        return PlayedClient(self)


class PlayedClient:
    """A client of a played daemon, for what `top` asks.

    Args:
        daemon: that answers.
    """

    def __init__(self, daemon: PlayedDaemon) -> None:
        self.daemon = daemon
        self._changes: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._changes.put(None)

    def events(self) -> Iterator[dict[str, Any]]:
        """Report one change, and wait for the end of the client."""
        self._changes.put({"model": "alpha", "from": "LOADING", "to": "READY", "at": AT})
        return iter(self._changes.get, None)

    def ping(self) -> None:
        """See `Client.ping`."""
        if self.daemon.is_gone:
            raise ConnectionLost("no daemon answers at X", endpoint="ipc:///nowhere/x.sock")

    def status(self) -> dict[str, Any]:
        """See `Client.status`."""
        self.ping()
        return {
            "version": "0.1.0",
            "pid": self.daemon.pid,
            "endpoint": "ipc:///tmp/run/client.sock",
            "uptime_s": 125.0,
            "memory": {
                "budget_bytes": 8 * GIB,
                "reserved_bytes": 6 * GIB,
                "machine_bytes": 64 * GIB,
            },
            "models": [dict(one) for one in self.daemon.models],
        }

    def requests(self) -> dict[str, Any]:
        """See `Client.requests`."""
        return {"requests": [dict(one) for one in self.daemon.listed], "more": 0}

    def __getattr__(self, verb: str) -> Any:
        if verb not in ("restart", "load", "unload", "cancel", "pause", "resume"):
            raise AttributeError(verb)

        def carry_out(name: str) -> dict[str, Any]:
            self.daemon.orders.append((verb, name))
            if self.daemon.refusal is not None:
                raise self.daemon.refusal
            return {"request": name, "model": "alpha", "stage": f"{verb}d", "tokens_sent": 17}

        return carry_out
