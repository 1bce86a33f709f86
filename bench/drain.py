"""A client that does nothing but receive: asks for streams, and reads frames without decoding them.

Run as a child process: `drain ENDPOINT MODEL CONNECTIONS STREAMS`. It prints a line
once something has come for every connection, and what it has received so far for each line of
standard input; signs of life do not count.
"""

from __future__ import annotations

import json
import sys

import zmq

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import Alive, Generate
from mlxsup.protocol.codec import encode, encode_body
from mlxsup.protocol.ids import ModelName, RequestId

PROMPT_TOKENS = 16
SIGN_OF_LIFE = encode(Alive())


def question(model: str, number: int) -> list[bytes]:
    """Return the frames of a request for an answer that fills the context."""
    tokens = [1 + (number * 31 + place) % 100 for place in range(PROMPT_TOKENS)]
    body = encode_body(RequestBody(prompt_tokens=tokens))
    return encode(Generate(id=RequestId(f"stream-{number}"), model=ModelName(model), body=body))


def main(endpoint: str, model: str, connections: int, streams: int) -> None:
    """Receives until standard input ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    sockets = []
    for _ in range(connections):
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.connect(endpoint)
        poller.register(socket, zmq.POLLIN)
        sockets.append(socket)
    for number in range(streams):
        sockets[number % connections].send_multipart(question(model, number))
    messages = 0
    silent = set(sockets)
    while True:
        ready = dict(poller.poll())
        if ready.pop(sys.stdin.fileno(), None):
            if not sys.stdin.readline():
                break
            print(json.dumps({"messages": messages}), flush=True)
        for socket in ready:
            frames = socket.recv_multipart()
            if frames == SIGN_OF_LIFE:
                continue
            messages += 1
            if silent:
                silent.discard(socket)
                if not silent:
                    print(json.dumps({"connections": connections}), flush=True)
    context.destroy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
