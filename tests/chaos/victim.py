"""`python -m chaos.victim ENDPOINT MODEL COUNT`: asks, and reads until somebody kills it."""

from __future__ import annotations

import sys

import msgpack
import zmq

TOKENS = 200


def main() -> None:
    """Prints a line when the first piece has come."""
    endpoint, model, count = sys.argv[1:4]
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)
    for number in range(int(count)):
        header = {"type": "generate", "id": str(number), "model": model, "v": 2}
        body = {"prompt": f"victim {number} {id(socket)}", "max_tokens": TOKENS}
        socket.send_multipart([msgpack.packb(header), msgpack.packb(body)])
    while msgpack.unpackb(socket.recv())["type"] == "alive":
        pass
    print("asked", flush=True)
    while True:
        socket.recv()


if __name__ == "__main__":
    main()
