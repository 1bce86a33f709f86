"""Clients that behave badly, in a process of their own: `python -m campaign.crowd WHAT …`.

It prints a line when it has begun and a line of JSON when it ends, which it does when what it does
is done or its standard input closes.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

import msgpack
import zmq

STREAMS = 8

BIG = "[[fault big=20000]]"
"""A prompt whose answer comes in pieces of 20 kB."""

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
"""What a DEALER says first (ZMTP 3.0); whoever says it is connected for as long as it likes."""

PATIENCE_S = 30.0


def begun() -> None:
    """Print the first line."""
    print(json.dumps({}), flush=True)


def until_input_ends() -> threading.Event:
    """Return an event that is set once standard input is closed."""
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def listen(
    endpoint: str, model: str, prompt: str, count: int, *, is_reading: bool
) -> dict[str, Any]:
    """Ask for streams that are read, or are not read until the input ends; then read all."""
    ended, codes, open_ids = until_input_ends(), Counter[str](), set(range(count))
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVHWM, 0 if is_reading else 1)
        peer.connect(endpoint)
        tokens = 4000 if prompt == BIG or not is_reading else 1_000_000
        for n in open_ids:
            header = {"type": "generate", "id": str(n), "model": model}
            body = {"prompt": f"{prompt} {n}", "max_tokens": tokens}
            peer.send_multipart([msgpack.packb(header), msgpack.packb(body)])
        begun()
        while not ended.is_set():
            if not is_reading:
                ended.wait()
            elif peer.poll(100):
                peer.recv_multipart()
        until = time.monotonic() + PATIENCE_S
        while not is_reading and open_ids and time.monotonic() < until:
            if not peer.poll(1000):
                continue
            message = msgpack.unpackb(peer.recv_multipart()[0], strict_map_key=False)
            if message["type"] in ("failed", "done"):
                open_ids.discard(int(message["id"]))
                codes[message.get("error", {}).get("code", "done")] += 1
    return {"codes": codes}


def connect_all(path: str, count: int, *, greeting: bytes = b"") -> list[socket.socket]:
    """Return that many connections, as fast as they are let in; fewer where nothing listens."""
    held: list[socket.socket] = []
    until = time.monotonic() + PATIENCE_S
    while len(held) < count:
        one = socket.socket(socket.AF_UNIX)
        try:
            one.connect(path)  # waits while the backlog is full
            held.append(one)
            one.sendall(greeting)
        except BrokenPipeError:
            pass  # turned away
        except OSError:  # nothing listens
            one.close()
            if time.monotonic() > until:
                break
    return held


def is_open(one: socket.socket) -> bool:
    """True if the other side has not ended the connection."""
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
    """Hold connections that greet and say nothing more, until the input ends."""
    held = connect_all(path, count, greeting=GREETING + READY)
    begun()
    sys.stdin.read()
    return {"connected": len(held), "open": sum(map(is_open, held))}


def storm(path: str, count: int, times: int) -> dict[str, Any]:
    """Open `count` silent connections at once and close all of them, `times` times."""
    begun()
    connected = 0
    for _ in range(times):
        held = connect_all(path, count)
        connected += len(held)
        for one in held:
            one.close()
    return {"connected": connected}


def main() -> int:
    """Do one of these."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    what, where, *rest = sys.argv[1:]
    match what:
        case "silent" | "reading":
            result = listen(where, rest[0], rest[1], int(rest[2]), is_reading=what == "reading")
        case "hold":
            result = hold(where, int(rest[0]))
        case "storm":
            result = storm(where, int(rest[0]), int(rest[1]))
        case _:
            raise SystemExit(f"no crowd is called {what}")
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
