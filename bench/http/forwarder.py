"""A bare forwarder, for comparison: asyncio, and nothing that a gateway does besides passing on.

Run as a child process: `forwarder FOLDER LOOP` listens at `back.sock`, where one source connects,
and at a port of this machine, which it prints. Whoever connects there may ask for anything. Once
the empty line at the end of the question's head has come, the answer begins: a fixed head, and from
then on whatever one read of the source brings, as one HTTP chunk, to everybody who is connected.
Nothing is decoded, counted or kept. Its event loop is asyncio's own one, or uvloop, on which the
gateway runs.

`forwarder FOLDER EVENT STEP_S` is the source: writes the event after each pause.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from typing import cast

import uvloop

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Client(asyncio.Protocol):
    """Somebody who is sent everything."""

    def __init__(self, clients: set[asyncio.Transport]) -> None:
        self._clients = clients
        self._question = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """The question, of which only the end of its head matters."""
        self._question += data
        if b"\r\n\r\n" in self._question and self._transport not in self._clients:
            self._transport.write(HEAD)
            self._clients.add(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._clients.discard(self._transport)


class Source(asyncio.Protocol):
    """Who sends what is passed on."""

    def __init__(self, clients: set[asyncio.Transport]) -> None:
        self._clients = clients

    def data_received(self, data: bytes) -> None:
        """Passes it on."""
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        for client in self._clients:
            client.write(chunk)


async def forward(folder: str) -> None:
    """Passes on until standard input ends."""
    loop = asyncio.get_running_loop()
    clients: set[asyncio.Transport] = set()
    await loop.create_unix_server(lambda: Source(clients), f"{folder}/back.sock")
    server = await loop.create_server(lambda: Client(clients), "127.0.0.1", 0)
    package, *_ = type(loop).__module__.split(".")
    about = {"port": server.sockets[0].getsockname()[1], "loop": package}
    print(json.dumps(about), flush=True)
    is_over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), is_over.set)
    await is_over.wait()


def send(folder: str, event: bytes, step_s: float) -> None:
    """Sends until it is ended."""
    with socket.socket(socket.AF_UNIX) as back:
        back.connect(f"{folder}/back.sock")
        while True:
            time.sleep(step_s)  # as a worker's engine would take its time
            back.sendall(event)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        send(sys.argv[1], sys.argv[2].encode(), float(sys.argv[3]))
    else:
        with asyncio.Runner(loop_factory=LOOPS[sys.argv[2]]) as runner:
            runner.run(forward(sys.argv[1]))
