"""`python -m fuzz [--decoder N] [--socket N] [--seed N]`: prints the figures of P17."""

from __future__ import annotations

import argparse
import random
import resource
import sys
import threading
import time

import psutil
import zmq
from mlxsup.protocol.codec import DecodeError, Decoder
from mlxsup.protocol.messages import CLIENT_MESSAGES
from support.daemon import Daemon, fake, row, wait_for_state
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


class RoundTrips(threading.Thread):
    """Another client that pings all the while: how long the supervisor's loop stands still.

    Attributes:
        calm_ms: the longest of the pings before the block.
        longest_ms: the longest of those within it.
    """

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon=True)
        self._client = daemon.client()
        self._ended = threading.Event()
        self.calm_ms = max(self._ping() for _ in range(100))
        self.longest_ms = 0.0

    def __enter__(self) -> RoundTrips:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        self._client.close()

    def run(self) -> None:
        """Pings."""
        while not self._ended.wait(0.005):
            self.longest_ms = max(self.longest_ms, self._ping())

    def _ping(self) -> float:
        start_s = time.perf_counter()
        self._client.ping()
        return 1000 * (time.perf_counter() - start_s)


def fuzz_socket(count: int, seed: int) -> str:
    """Through the socket of a daemon (fake engine), while a stream runs unbroken."""
    dice = random.Random(seed)
    endless = {"context_length": 10_000_000}
    models = {"m": fake(fake={"step_s": 0.01, **endless}), "fast": fake(fake=endless)}
    with Daemon(models) as daemon, daemon.client() as client:
        for name in models:
            wait_for_state(client, name, "READY")
        stream = Reader(client, "m", "undisturbed", max_tokens=1_000_000).started()
        supervisor = psutil.Process(daemon.process.pid)
        before = supervisor.memory_info().rss
        with zmq.Context() as context, RoundTrips(daemon) as trips:
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
        stream.stream.cancel()
        result = stream.finished()
        assert result.finish_reason == "cancelled"
        tokens = len(result.token_ids)
        right = client.complete("fast", prompt="undisturbed", max_tokens=tokens)
        assert result.token_ids == right.token_ids
        assert [row(client, name)["generation"] for name in models] == [1, 1]
    return (
        f"socket (fake engine): {count} messages, the stream of {tokens} tokens unbroken,"
        f" supervisor RSS {grown / 2**20:+.1f} MiB, longest ping {trips.longest_ms:.0f} ms"
        f" (before: {trips.calm_ms:.0f} ms)"
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
