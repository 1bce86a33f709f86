"""`python -m fuzz [--decoder N] [--socket N] [--seed N]`: prints the figures of P17."""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time

import psutil
import zmq
from mlxsup.protocol.codec import DecodeError, Decoder
from mlxsup.protocol.messages import CLIENT_MESSAGES
from support.daemon import Daemon, fake, wait_for_state
from support.streams import Reader

from .frames import hostile_frames


def fuzz_decoder(count: int, seed: int) -> str:
    """Every message is decoded or refused; nothing else may come out."""
    dice, decoder = random.Random(seed), Decoder(CLIENT_MESSAGES, is_strict=True)
    refused, longest_s = 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        frames = hostile_frames(dice)
        start_s = time.perf_counter()
        try:
            decoder.decode(frames)
        except DecodeError:
            refused += 1
        longest_s = max(longest_s, time.perf_counter() - start_s)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return (
        f"decoder: {count} messages, {refused} refused, the longest {1000 * longest_s:.1f} ms,"
        f" peak memory +{grown / 1024:.1f} MiB"
    )


def fuzz_socket(count: int, seed: int) -> str:
    """Through the socket of a daemon (fake engine), while a stream runs unbroken."""
    dice = random.Random(seed)
    with Daemon({"m": fake(fake={"step_s": 0.01})}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        tokens = 3000
        stream = Reader(client, "m", "undisturbed", max_tokens=tokens).started()
        supervisor = psutil.Process(daemon.process.pid)
        before = supervisor.memory_info().rss
        with zmq.Context() as context:
            sent = 0
            while sent < count:
                with context.socket(zmq.DEALER) as socket:
                    socket.set(zmq.LINGER, 1000)
                    socket.connect(daemon.endpoint)
                    for _ in range(min(500, count - sent)):
                        socket.send_multipart(hostile_frames(dice))
                        sent += 1
                        while socket.poll(0):
                            socket.recv_multipart()
                client.ping()
        grown = supervisor.memory_info().rss - before
        assert len(stream.finished(300.0).token_ids) == tokens
        assert client.status()["models"][0]["generation"] == 1
    return (
        f"socket (fake engine): {count} messages, the stream of {tokens} tokens unbroken,"
        f" supervisor RSS {grown / 2**20:+.1f} MiB"
    )


def main() -> int:
    """Both, with their figures."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--decoder", type=int, default=1_000_000)
    parser.add_argument("--socket", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(fuzz_decoder(given.decoder, given.seed), flush=True)
    print(fuzz_socket(given.socket, given.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
