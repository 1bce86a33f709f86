"""Whether an unload returns the memory of its model (`unload_drift`).

A model of more than one GiB is loaded, asked and unloaded again and again. After each unload, what
the processes of the daemon hold is summed up, of shared pages their part. `mlx_lm.server` changes
between the same model and a tiny one, and is looked at whenever it has answered with the tiny one.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlxsup.client import AsyncClient

from ..peers import MlxLmServer
from ..shaped_model import Shape, make_shaped_model
from .figures import finish, parser_of
from .real_budget import held_bytes
from .real_place import CONTEXT, leaving_out, pooled, prompt_tokens, tell
from support.daemon import Daemon
from support.tiny_model import make_tiny_model

CLAIM = "unload_drift"
LARGE = Shape(
    layers=18, hidden=1024, intermediate=4096, heads=16, key_value_heads=8, dtype="float32"
)
MODEL, OTHER = "large", "tiny"
LEAST_BYTES = 2**30
CYCLES = 50
PEER_CYCLES = 8
WARM = 3
"""Cycles before the first that counts: what a process needs once is no drift."""

PROMPT, ANSWER = 16, 4
PARTS = 5


def drift(held: Sequence[int], weights: int) -> float:
    """By how much the last part of some looks is above the first, over the weights.

    Medians of a fifth each, so that a single look decides nothing.
    """
    size = max(1, len(held) // PARTS)
    return (statistics.median(held[-size:]) - statistics.median(held[:size])) / weights


async def of_daemon(folder: Path, cycles: int) -> list[int]:
    """What all processes of a daemon hold after each unload, in bytes."""
    held = []
    with Daemon({MODEL: {"path": str(folder), "preload": False}}) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            for number in range(WARM + cycles):
                await client.load(MODEL)
                prompt = prompt_tokens(PROMPT, number)
                await client.complete(MODEL, prompt_tokens=prompt, max_tokens=ANSWER)
                loaded = sum(held_bytes(process.pid) for process in daemon.processes())
                await client.unload(MODEL)
                left = sum(held_bytes(process.pid) for process in daemon.processes())
                tell(f"{number}: {loaded / 2**20:.0f} MiB loaded, {left / 2**20:.1f} MiB unloaded")
                if number >= WARM:
                    held.append(left)
    return held


async def of_peer(folders: dict[str, Path], cycles: int) -> list[int]:
    """What mlx_lm.server holds after each change from the large model to the tiny one, in bytes."""
    held = []
    with MlxLmServer(folders) as peer:
        for number in range(WARM + cycles):
            await peer.ask(MODEL, f"{number} what", ANSWER)
            await peer.ask(OTHER, f"{number} what", ANSWER)
            if number >= WARM:
                held.append(held_bytes(peer.pid))
            tell(f"{number}: mlx_lm.server holds {held_bytes(peer.pid) / 2**20:.0f} MiB")
    return held


def main() -> int:
    """Measures, prints and keeps."""
    parser = parser_of("real_unload", __doc__)
    parser.add_argument("--samples", type=int, default=0, help="unloads")
    given = parser.parse_args()
    cycles = given.samples or CYCLES
    with tempfile.TemporaryDirectory(prefix="mlxsup-unload-") as folder:
        large = make_shaped_model(Path(folder) / MODEL, LARGE, seed=1, context_length=CONTEXT)
        tiny = make_tiny_model(Path(folder) / OTHER)
        weights = sum(file.stat().st_size for file in large.glob("*.safetensors"))
        ours = asyncio.run(of_daemon(large, cycles))
        theirs = asyncio.run(of_peer({MODEL: large, OTHER: tiny}, min(cycles, PEER_CYCLES)))
    peers = {"mlx_lm.server": [drift(theirs, weights)]}
    one = pooled(
        CLAIM,
        drift(ours, weights),
        leaving_out(ours, lambda some: drift(some, weights)),
        peers=peers,
        runs=cycles,
        note=f"{ours[-1] / 2**20:.0f} MiB are left of {weights / 2**20:.0f} MiB of weights, all"
        f" processes together; {theirs[-1] / 2**20:.0f} MiB of mlx_lm.server, with a tiny model",
    )
    is_enough = cycles >= CYCLES and weights >= LEAST_BYTES
    if not is_enough:
        print(f"not shown: {CLAIM} needs {CYCLES} unloads of 1 GiB, these are {cycles}")
    return finish([one], is_kept=given.keep and is_enough)


if __name__ == "__main__":
    sys.exit(main())
