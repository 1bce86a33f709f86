"""Clients that behave badly, in a separate process: `python -m promises.crowd WHAT …`.

Each prints one line when it has begun, and one of JSON when it ends; it ends when what it does is
done, or when its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

import msgpack
import zmq

from mlxsup.client import AsyncClient, RequestError
from mlxsup.protocol.client_messages import Generate
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import ModelName, RequestId

from fuzz.frames import hostile_frames

STREAMS = 8
HOLDERS = 100
"""More than wait and run of one client."""
BIG = "[[fault big=20000]]"
MIDDLING = "[[fault big=5000]]"


def begun() -> None:
    """Says so."""
    print(json.dumps({}), flush=True)


def until_input_ends() -> threading.Event:
    """Set once nobody holds the other end of standard input."""
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def listen(
    endpoint: str, model: str, prompt: str, count: int, *, is_reading: bool
) -> dict[str, Any]:
    """Streams that are read, or are not read until the input ends; then all is read."""
    ended, codes, open_ids = until_input_ends(), Counter[str](), set(range(count))
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVHWM, 0 if is_reading else 1)
        peer.connect(endpoint)
        tokens = 4000 if prompt == BIG or not is_reading else 1_000_000
        for n in open_ids:
            body = msgpack.packb({"prompt": f"{prompt} {n}", "max_tokens": tokens})
            peer.send_multipart(
                encode(Generate(id=RequestId(str(n)), model=ModelName(model), body=body))
            )
        begun()
        while not ended.is_set():
            if not is_reading:
                ended.wait()
            elif peer.poll(100):
                peer.recv_multipart()
        until = time.monotonic() + 30.0
        while not is_reading and open_ids and time.monotonic() < until:
            if not peer.poll(1000):
                continue
            message = msgpack.unpackb(peer.recv_multipart()[0], strict_map_key=False)
            if message["type"] in ("failed", "done"):
                open_ids.discard(int(message["id"]))
                codes[message.get("error", {}).get("code", "done")] += 1
    return {"codes": codes}


def listen_apart(endpoint: str, model: str, count: int, *, is_reading: bool) -> dict[str, Any]:
    """That many connections with one stream each, which are read, or are not."""
    ended, received = until_input_ends(), 0
    with zmq.Context() as context:
        peers, poller = [], zmq.Poller()
        for _ in range(count):
            peer = context.socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.RCVHWM, 0 if is_reading else 1)
            peer.connect(endpoint)
            body = msgpack.packb({"prompt": MIDDLING, "max_tokens": 4000})
            peer.send_multipart(
                encode(Generate(id=RequestId("x"), model=ModelName(model), body=body))
            )
            poller.register(peer, zmq.POLLIN)
            peers.append(peer)
        begun()
        while not ended.is_set():
            if not is_reading:
                ended.wait()
            for peer, _ in poller.poll(100) if is_reading else ():
                received += len(peer.recv_multipart()[-1])
        for peer in peers:
            peer.close()
    return {"received": received}


async def flood(endpoint: str, model: str, count: int) -> dict[str, Any]:
    """That many requests at once on one connection; `HOLDERS` of them again and again from then on.

    There are more of these than the queue takes of one client, so it stays full, and the rest are
    refused as fast as they ask, until the input ends. Refusals of the first burst wait for each
    other in this process; only those that follow are timed.
    """
    ended, ends, refused_ms = until_input_ends(), Counter[str](), list[float]()
    async with AsyncClient(endpoint) as client:

        async def ask(number: int) -> float | None:
            asked_s = time.monotonic()
            try:
                await client.complete(model, prompt=f"{number}", max_tokens=5, client="flood")
            except RequestError as error:
                ends[error.code.value] += 1
                return 1000 * (time.monotonic() - asked_s)
            ends["served"] += 1
            return None

        async def hold(number: int) -> None:
            while not ended.is_set():
                is_timed = burst.done()
                took_ms = await ask(number)
                if is_timed and took_ms is not None:
                    refused_ms.append(took_ms)

        start_s = time.monotonic()
        burst = asyncio.gather(*map(ask, range(count)))
        holders = asyncio.gather(*map(hold, range(HOLDERS)))
        begun()
        await burst
        took_s = time.monotonic() - start_s
        await holders
    return {"ends": ends, "refused_ms": refused_ms, "took_s": took_s}


def connect(path: str, count: int) -> dict[str, Any]:
    """Bare connections to a Unix socket, which say nothing and go."""
    begun()
    start_s = time.monotonic()
    for _ in range(count):
        with socket.socket(socket.AF_UNIX) as bare:
            bare.connect(path)
    return {"took_s": time.monotonic() - start_s}


def raise_file_limit() -> None:
    """To as many as this process may have: it opens thousands of connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
"""What a DEALER says first (ZMTP 3.0); who says it is connected for as long as it likes."""


def connect_all(path: str, count: int, *, greeting: bytes = b"") -> list[socket.socket]:
    """That many connections, as fast as they are let in; fewer where nobody listens for long."""
    held: list[socket.socket] = []
    until = time.monotonic() + 30.0
    while len(held) < count:
        one = socket.socket(socket.AF_UNIX)
        try:
            one.connect(path)  # waits while the queue of those who knock is full
            held.append(one)
            one.sendall(greeting)
        except BrokenPipeError:
            pass  # turned away
        except OSError:  # nobody listens
            one.close()
            if time.monotonic() > until:
                break
    return held


def is_open(one: socket.socket) -> bool:
    """Whether the other side has not ended the connection."""
    one.setblocking(False)
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def hold(path: str, count: int) -> dict[str, Any]:
    """Connections that greet and say nothing more, held until the input ends."""
    raise_file_limit()
    held = connect_all(path, count, greeting=GREETING + READY)
    begun()
    sys.stdin.read()
    return {"connected": len(held), "open": sum(map(is_open, held))}


def storm(path: str, count: int, times: int) -> dict[str, Any]:
    """`count` silent connections at once, all of them gone again, `times` times."""
    raise_file_limit()
    begun()
    connected = 0
    for _ in range(times):
        held = connect_all(path, count)
        connected += len(held)
        for one in held:
            one.close()
    return {"connected": connected}


def throw_frames(endpoint: str, count: int) -> dict[str, Any]:
    """Hostile frames at the socket of mlxsup."""
    dice = random.Random(1)
    begun()
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 1000)
        peer.connect(endpoint)
        for _ in range(count):
            peer.send_multipart(hostile_frames(dice))
            while peer.poll(0):
                peer.recv_multipart()
    return {}


# ---------------------------------------------------------------- against HTTP


def request_bytes(prompt: str, max_tokens: int) -> bytes:
    """A request for a stream, as the peer takes it."""
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )


def http_listen(port: int, *, is_reading: bool) -> dict[str, Any]:
    """Streams of the peer that are read, or are not."""
    ended, sockets = until_input_ends(), []
    for n in range(STREAMS):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20 if is_reading else 2048)
        one.connect(("127.0.0.1", port))
        one.sendall(request_bytes(f"{n}", 4000))
        one.setblocking(False)
        sockets.append(one)
    begun()
    while not ended.wait(0.05):
        for one in sockets if is_reading else ():
            try:
                while one.recv(2**16):
                    pass
            except BlockingIOError:
                pass
    for one in sockets:
        one.close()
    return {}


async def http_flood(port: int, count: int) -> dict[str, Any]:
    """That many requests at once, each on its own connection, as the peer wants it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * count)), hard))
    ends = Counter[str]()

    async def ask(number: int) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes(f"{number}", 5))
            text = await reader.read()
            writer.close()
            ends["served" if b"[DONE]" in text else "failed"] += 1
        except OSError:
            ends["failed"] += 1

    begun()
    start_s = time.monotonic()
    await asyncio.gather(*map(ask, range(count)))
    return {"ends": ends, "took_s": time.monotonic() - start_s}


def http_garbage(port: int, count: int) -> dict[str, Any]:
    """Connections that bring noise."""
    dice = random.Random(1)
    begun()
    for _ in range(count):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5.0) as one:
                one.sendall(dice.randbytes(dice.randrange(1, 400)))
        except OSError:
            pass  # it may close first
    return {}


def main() -> int:
    """Does one of these."""
    what, where, *rest = sys.argv[1:]
    match what:
        case "silent" | "reading":
            result = listen(where, rest[0], rest[1], int(rest[2]), is_reading=what == "reading")
        case "apart-silent" | "apart-reading":
            result = listen_apart(where, rest[0], int(rest[1]), is_reading=what == "apart-reading")
        case "flood":
            result = asyncio.run(flood(where, rest[0], int(rest[1])))
        case "connect":
            result = connect(where, int(rest[0]))
        case "hold":
            result = hold(where, int(rest[0]))
        case "storm":
            result = storm(where, int(rest[0]), int(rest[1]))
        case "frames":
            result = throw_frames(where, int(rest[0]))
        case "http-silent" | "http-reading":
            result = http_listen(int(where), is_reading=what == "http-reading")
        case "http-flood":
            result = asyncio.run(http_flood(int(where), int(rest[0])))
        case "http-garbage":
            result = http_garbage(int(where), int(rest[0]))
        case _:
            raise SystemExit(f"no crowd is called {what}")
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
