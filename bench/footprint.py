"""What the processes weigh, and how long a worker takes to come up."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from .floor import Floor
from .report import print_table, spread
from support.daemon.child import Child
from support.daemon.daemon import Daemon, row, wait_for_state

BARE = """
import sys
import mlx.core, mlx_lm
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_tokenizer
if sys.argv[1]:
    tokenizer = load_tokenizer(sys.argv[1])
print("{}", flush=True)
sys.stdin.read()
"""


def bare_rss_bytes(tokenizer: str = "") -> int:
    """Resident bytes of a process that has imported mlx-lm, and perhaps read a tokenizer."""
    with Child("-c", BARE, tokenizer) as child:
        child.line()
        return int(psutil.Process(child.pid).memory_info().rss)


def run(model: Path, repeats: int) -> None:
    """Measures and prints."""
    print("## Memory and start-up (CPU)\n")
    supervisors, workers, bares, with_tokenizer, spawns, loads = [], [], [], [], [], []
    for _ in range(repeats):
        bares.append(bare_rss_bytes() / 2**20)
        with_tokenizer.append(bare_rss_bytes(str(model)) / 2**20)
        floor = Floor(model)
        loads.append(floor.ready_s)
        floor.close()
        with Daemon({"m": {"path": str(model), "preload": False}}) as daemon:
            assert daemon.process is not None
            with daemon.client() as client:
                begin = time.perf_counter()
                client.load("m")
                spawns.append(time.perf_counter() - begin)
                client.complete("m", prompt="hello", max_tokens=8)
                loaded = wait_for_state(client, "m", "READY")
                # Two heartbeats, so that the bytes are those after the answer.
                for _ in range(2):
                    time.sleep(1.0)
                    loaded = row(client, "m")
                held = loaded["active_bytes"] + loaded["cache_bytes"]
                worker = psutil.Process(loaded["pid"]).memory_info().rss
                workers.append((worker - held) / 2**20)
                supervisors.append(psutil.Process(daemon.process.pid).memory_info().rss / 2**20)
    ratios = [w / b for w, b in zip(workers, bares, strict=True)]
    fair_ratios = [w / b for w, b in zip(workers, with_tokenizer, strict=True)]
    differences = [s - load for s, load in zip(spawns, loads, strict=True)]
    print(f"{repeats} repeats; median (range)\n")
    print_table(
        ["what", "measured", "target"],
        [
            ["supervisor, idle, RSS", spread(supervisors, " MiB", 0), "≤80 MB"],
            ["worker RSS without weights and caches", spread(workers, " MiB", 0), ""],
            ["bare process that imported mlx-lm, RSS", spread(bares, " MiB", 0), ""],
            ["… and read this model's tokenizer", spread(with_tokenizer, " MiB", 0), ""],
            ["worker to bare", spread(ratios), "≤1.2"],
            ["worker to bare with tokenizer", spread(fair_ratios), "≤1.2"],
            ["load command → READY", spread(spawns, " s"), ""],
            ["in-process import, load, warm-up", spread(loads, " s"), ""],
            ["difference", spread(differences, " s"), ""],
        ],
    )
