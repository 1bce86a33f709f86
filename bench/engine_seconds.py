"""Whether requests pay for what their worker works: engine seconds against samples from outside.

While requests of different lengths run, the states of the worker's threads are sampled: it works
while any of them runs or could. What all requests say that they have cost should be as long.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

from mlxsup.client import AsyncClient

from .report import print_table, spread
from .two_models import words
from support.daemon.daemon import Daemon

INTERVAL_S = 0.01
CONCURRENCY = 4
REQUESTS = 12
LONGEST_PROMPT = 120
LONGEST_ANSWER = 32
BOUND = 0.03


class BusySamples:
    """Samples whether any thread of a process runs or could, until it is stopped; on Linux.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._end = threading.Event()
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._sample, name="samples")
        self._thread.start()

    def stop(self) -> float:
        """For how many seconds it worked."""
        self._end.set()
        self._thread.join()
        return self._busy_s

    def _sample(self) -> None:
        seen_at = time.perf_counter()
        while not self._end.wait(INTERVAL_S):
            now = time.perf_counter()
            if self._is_busy():
                self._busy_s += now - seen_at
            seen_at = now

    def _is_busy(self) -> bool:
        for task in self._tasks.iterdir():
            try:
                fields = (task / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has ended
            if fields.rpartition(")")[2].split()[0] == "R":
                return True
        return False


async def measure(client: AsyncClient, pid: int, seed: int) -> tuple[float, float]:
    """Engine seconds of all requests of one round, and the busy seconds of the worker."""
    dice = random.Random(seed)
    places = asyncio.Semaphore(CONCURRENCY)

    async def ask(number: int) -> float:
        prompt = words(dice.randint(1, LONGEST_PROMPT), 1000 * seed + number)
        length = dice.randint(1, LONGEST_ANSWER)
        async with places:
            result = await client.complete("model", prompt=prompt, max_tokens=length)
        return result.usage.engine_s

    samples = BusySamples(pid)
    paid_s = await asyncio.gather(*(ask(number) for number in range(REQUESTS)))
    return sum(paid_s), samples.stop()


def run(model: Path, repeats: int) -> None:
    """Measures and prints.

    Args:
        model: a real one: next to steps of a tiny one, the rest of the loop counts.
        repeats: of each figure.
    """
    print("## Engine seconds against the worker's busy time (CPU, SmolLM2)\n", flush=True)
    if Path("/proc/self/task").is_dir():
        asyncio.run(_run(model, repeats))
    else:
        print("not shown: the states of threads are read from /proc\n", flush=True)


async def rounds(model: Path, repeats: int) -> list[tuple[float, float]]:
    """Engine seconds and busy seconds of each round, after one that warms up."""
    found: list[tuple[float, float]] = []
    entry = {"path": str(model), "max_concurrency": CONCURRENCY}
    with Daemon({"model": entry}) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            await client.load("model")
            pid = int((await client.status())["models"][0]["pid"])
            await measure(client, pid, 0)  # the first round is slower
            for repeat in range(1, repeats + 1):
                found.append(await measure(client, pid, repeat))
    return found


async def _run(model: Path, repeats: int) -> None:
    found = await rounds(model, repeats)
    ratios = [paid_s / busy_s for paid_s, busy_s in found]
    is_kept = all(abs(ratio - 1) <= BOUND for ratio in ratios)
    row = [
        spread([paid_s for paid_s, _ in found]),
        spread([busy_s for _, busy_s in found]),
        spread(ratios, digits=3),
        f"{1 - BOUND:.2f} to {1 + BOUND:.2f}",
        "kept" if is_kept else "MISSED",
    ]
    print(f"{repeats} rounds of {REQUESTS} requests, {CONCURRENCY} at a time; median (range)\n")
    print_table(["engine s", "busy s", "ratio", "target", ""], [row])
