"""`python -m soak [--minutes N]`: ordinary use with crashes; memory, files, threads, rows flat."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlxsup.client import Client
from support.daemon import Daemon, fake, row, wait_for_state
from support.streams import Reader
from support.tiny_model import make_tiny_model

from .usage import Usage, growth_mb, sample

BURST = 24
CANCELLED = 0.2
CRASHES_EVERY = 5
UNLOADS_EVERY = 7
MAX_GROWTH_MB = {"supervisor": 5.0, "fake": 5.0, "real": 40.0}
"""Between two quarters of the run. The real worker keeps prompts for reuse, up to a limit that is
reached early; what is left is the allocator's own."""

RESTART = {"max_restarts": 1_000_000, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}


def models(tiny: Path) -> dict[str, dict[str, object]]:
    """Two that live through it all, and one that dies and is unloaded."""
    return {
        "fake": fake(fake={"step_s": 0.001}, max_concurrency=8),
        "real": {"path": str(tiny), "preload": True, "prefix_cache": "16MiB"},
        "mortal": fake(fake={"step_s": 0.001}, max_concurrency=8, restart=RESTART),
    }


def use(client: Client, dice: random.Random, turn: int) -> None:
    """One turn: a burst of requests, some cancelled; now and then a crash or an unload."""
    readers = [
        Reader(
            client,
            dice.choice(("fake", "real", "mortal")),
            f"{dice.random()} " * dice.randint(1, 30),
            max_tokens=dice.randint(1, 80),
        )
        for _ in range(BURST)
    ]
    for reader in readers:
        if dice.random() < CANCELLED:
            reader.stream.cancel()
    pid = row(client, "mortal")["pid"]
    if turn % CRASHES_EVERY == 0 and pid is not None:
        os.kill(pid, dice.choice((signal.SIGKILL, signal.SIGTERM)))
    for reader in readers:
        reader.finished(120.0)
    wait_for_state(client, "mortal", "READY")
    if turn % UNLOADS_EVERY == 0:
        client.unload("mortal")
        client.load("mortal")


def soak(minutes: float, seed: int, tell: Callable[[str], object]) -> str:
    """Runs it and returns the figures.

    Raises:
        AssertionError: something has grown.
    """
    dice, samples = random.Random(seed), list[Usage]()
    with tempfile.TemporaryDirectory() as folder:
        entries = models(make_tiny_model(Path(folder) / "tiny"))
        with Daemon(entries) as daemon, daemon.client() as client:
            for name in entries:
                wait_for_state(client, name, "READY")
            until, turn = time.monotonic() + 60.0 * minutes, 0
            while time.monotonic() < until or turn <= UNLOADS_EVERY:
                turn += 1
                use(client, dice, turn)
                samples.append(sample(daemon, client))
                if turn % 20 == 0:
                    tell(f"turn {turn}: {samples[-1]}")
            for name in ("fake", "real"):
                assert row(client, name)["generation"] == 1, f"{name} was replaced"
    steady = samples[len(samples) // 4 :]
    for what in ("files", "threads", "processes"):
        counts = {getattr(one, what) for one in steady}
        assert len(counts) == 1, f"{what} between {min(counts)} and {max(counts)}"
    grown = {name: growth_mb(samples, name) for name in MAX_GROWTH_MB}
    for name, limit_mb in MAX_GROWTH_MB.items():
        assert grown[name] <= limit_mb, f"{name} grew by {grown[name]:.1f} MB"
    last = samples[-1]
    figures = ", ".join(f"{name} {mb:+.1f} MB" for name, mb in grown.items())
    return (
        f"soak (fake engine, and MLX on the CPU): {minutes:g} min, {turn * BURST} requests:"
        f" {last.files} files, {last.threads} threads, {last.processes} processes, 0 rows left;"
        f" RSS from the second quarter to the last: {figures}"
    )


def main() -> int:
    """Runs it once."""
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(soak(given.minutes, given.seed, partial(print, file=sys.stderr, flush=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
