"""A bare forwarder, for comparison: it does nothing but pass messages on, between the same sockets.

Run as a child process: `forwarder FOLDER` binds `back.sock`, where one source connects, and
`front.sock`, where one receiver does, and says so. For each line of standard input it prints how
many messages it has passed on and the processor time of the thread that does so.
`forwarder FOLDER SIZE_BYTES STEP_S` is the source: a message of that size after each pause.
"""

from __future__ import annotations

import json
import sys
import time

import zmq


def forward(folder: str) -> None:
    """Passes messages on until standard input ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    back, front = context.socket(zmq.DEALER), context.socket(zmq.ROUTER)
    back.bind(f"ipc://{folder}/back.sock")
    front.bind(f"ipc://{folder}/front.sock")
    poller = zmq.Poller()
    for source in (sys.stdin.fileno(), back):
        poller.register(source, zmq.POLLIN)
    print(json.dumps({}), flush=True)
    receiver = front.recv_multipart()[0]
    passed = 0
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready:
            if not sys.stdin.readline():
                break
            about = {"messages": passed, "cpu_ns": time.thread_time_ns()}
            print(json.dumps(about), flush=True)
        if back in ready:
            front.send_multipart([receiver, *back.recv_multipart()])
            passed += 1
    context.destroy(linger=0)


def send(folder: str, size_bytes: int, step_s: float) -> None:
    """Sends until it is ended."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{folder}/back.sock")
    message = bytes(size_bytes)
    while True:
        time.sleep(step_s)  # as a worker's engine would take its time
        socket.send(message)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        send(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    else:
        forward(sys.argv[1])
