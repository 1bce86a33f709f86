"""A client that is a socket and msgpack: it reads on after each end, and counts what comes then."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgpack
import zmq

from .asks import End, Open
from .ledger import Ledger

READS_AT_ONCE = 64


class RawDoor:
    """One connection, for use in the running event loop.

    Args:
        endpoint: of the daemon.
        ledger: where everything is entered that no daemon may send.
    """

    name = "raw"

    def __init__(self, endpoint: str, ledger: Ledger) -> None:
        self._ledger = ledger
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, tuple[Open, asyncio.Future[End]]] = {}
        self._pieces: dict[str, int] = {}
        self._ended: set[str] = set()
        self._fence: asyncio.Future[None] | None = None
        self._handle: asyncio.Handle | None = None
        self._loop.add_reader(self._socket.FD, self._pump_soon)

    async def ask(self, one: Open) -> End:
        """Sends a request and returns how it ended."""
        name = one.ask.id
        ended: asyncio.Future[End] = self._loop.create_future()
        self._open[name], self._pieces[name] = (one, ended), 0
        self._say(*one.ask.frames())
        self._cancel_when_due(name, one)
        return await ended

    async def fence(self) -> None:
        """Returns when everything has come that the daemon sent before it answered a ping."""
        self._fence = self._loop.create_future()
        self._say(msgpack.packb({"type": "ping", "id": "fence", "v": 2}))
        await self._fence

    def close(self) -> None:
        """Ends the connection."""
        self._loop.remove_reader(self._socket.FD)
        if self._handle is not None:
            self._handle.cancel()
        self._context.destroy(linger=0)

    # ------------------------------------------------------------ inside

    def _say(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        self._pump_soon()  # the descriptor is edge-triggered, and a send swallows the edge

    def _pump_soon(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._handle = None
        for _ in range(READS_AT_ONCE):
            events = self._socket.getsockopt(zmq.EVENTS)
            assert isinstance(events, int)
            if not events & zmq.POLLIN:
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 1:
                self._ledger.violate("frames", f"a message of {len(frames)} frames")
            self._hear(msgpack.unpackb(frames[0]))
        self._pump_soon()

    def _hear(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "deltas":
                for delta in message["deltas"]:
                    self._take(delta)
            case "done" | "failed":
                self._end(message)
            case "reply" if message["id"] == "fence" and self._fence is not None:
                self._fence.set_result(None)
            case "alive":
                pass
            case kind:
                self._ledger.violate("unasked", f"a message of type {kind}")

    def _find(self, name: str, what: str) -> tuple[Open, asyncio.Future[End]] | None:
        if (found := self._open.get(name)) is None:
            is_late = name in self._ended
            check = "after the end" if is_late else "unknown id"
            self._ledger.violate(check, f"{what} of request {name!r}")
        return found

    def _take(self, delta: dict[str, Any]) -> None:
        name = delta["id"]
        if (found := self._find(name, "a piece")) is None:
            return
        if delta["seq"] != self._pieces[name]:
            self._ledger.violate("sequence", f"{name}: {delta['seq']}, not {self._pieces[name]}")
        self._pieces[name] = delta["seq"] + 1
        packed = delta["tokens"]
        ids = struct.unpack(f"<{len(packed) // 4}I", packed)
        found[0].take(ids, msgpack.unpackb(delta["body"]).get("text", ""))
        self._cancel_when_due(name, found[0])

    def _cancel_when_due(self, name: str, one: Open) -> None:
        if one.is_due_for_cancel:
            one.cancel()
            self._say(msgpack.packb({"type": "cancel", "id": name, "v": 2}))

    def _end(self, message: dict[str, Any]) -> None:
        name = message["id"]
        if (found := self._find(name, f"a {message['type']}")) is None:
            return
        del self._open[name]
        self._ended.add(name)
        pieces = self._pieces.pop(name)
        if message["type"] == "failed":
            error = message["error"]
            end = End(code=error["code"], is_error=True, detail=error.get("detail") or {})
        else:
            if message["seq"] != pieces:
                self._ledger.violate("sequence", f"{name}: {message['seq']} pieces, {pieces} came")
            usage = message.get("usage", {})
            end = End(
                code=message["finish_reason"],
                usage=(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)),
                seed=message.get("seed"),
                resumed=message.get("resumed", 0),
                paused=message.get("paused", 0),
            )
        self._ledger.ended(found[0], end, self.name)
        if not found[1].done():
            found[1].set_result(end)
