"""kill −9 in the middle of 16 answers: until all of them continue, next to a load."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mlxsup.client import AsyncClient, RequestError

from ..fast_path.bursts import prompts_of
from ..fast_path.results import Found, Founds
from ..fast_path.stages import Rows, Setting, Stage
from ..floor import Floor
from .models import model
from support.daemon import Daemon
from support.verdict import NotShown

NAME = "7b"
STREAMS = 16
TOKENS = 400
KILL_AFTER = 40
"""Tokens of each answer, before the process is killed."""

KILLS = 5
RESTART = {"max_restarts": 1_000_000, "stable_s": 0.0}
"""Each crash is the first one: no delay."""

LOOK_EVERY_S = 0.005
PATIENCE_S = 120.0


@dataclass(slots=True, eq=False)
class Live:
    """One answer.

    Attributes:
        times: when its tokens came.
        is_lost: whether it ended in an error.
        is_under_way: set once it has KILL_AFTER tokens, or has ended.
    """

    times: list[float] = field(default_factory=list)
    is_lost: bool = False
    is_under_way: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: AsyncClient, prompt: str, tokens: int) -> None:
        """Reads it to its end."""
        try:
            async for delta in client.generate(NAME, prompt=prompt, max_tokens=tokens):
                self.times += [time.perf_counter()] * len(delta.token_ids)
                if len(self.times) >= KILL_AFTER:
                    self.is_under_way.set()
        except RequestError:
            self.is_lost = True
        self.is_under_way.set()

    def continued_s(self, struck_at: float) -> float:
        """How long after the kill it continued.

        What had been sent before the kill may come after it, so it is the longest silence that
        tells when the answer stood still.

        Raises:
            NotShown: it had ended before.
        """
        silences = [(b - a, b) for a, b in pairwise(self.times) if b > struck_at]
        if not silences:
            raise NotShown("an answer had ended before the process was killed")
        return max(silences)[1] - struck_at


async def until_spares_wait(client: AsyncClient, count: int) -> None:
    """Waits until that many spare workers have imported everything.

    Raises:
        NotShown: they do not.
    """
    begin = time.monotonic()
    while True:
        workers = (await client.status())["spares"]["workers"]
        if [worker["state"] for worker in workers] == ["waiting"] * count:
            return
        if time.monotonic() - begin > PATIENCE_S:
            raise NotShown(f"{count} spare workers do not wait: {workers}")
        await asyncio.sleep(LOOK_EVERY_S)


async def kill(client: AsyncClient, seed: int, tokens: int) -> tuple[float, int]:
    """Kills the process among its answers.

    Returns:
        How long until the last answer continued, in seconds, and how many were lost, or had one
        token too many or too few.
    """
    lives = [Live() for _ in range(STREAMS)]
    [row] = (await client.status())["models"]
    async with asyncio.TaskGroup() as group:
        for live, prompt in zip(lives, prompts_of(STREAMS, seed), strict=True):
            group.create_task(live.read(client, prompt, tokens))
        for live in lives:
            await live.is_under_way.wait()
        os.kill(row["pid"], signal.SIGKILL)
        struck_at = time.perf_counter()
    lost = [live for live in lives if live.is_lost or len(live.times) != tokens]
    continued = [live.continued_s(struck_at) for live in lives if live not in lost]
    if not continued:
        raise NotShown("no answer was complete after the process had been killed")
    return max(continued), len(lost)


async def recovery(setting: Setting, wanted: Sequence[str]) -> Rows:
    """Kills without a spare worker, and then with one; a load in one process next to each."""
    folder = model(setting, NAME)
    tokens = 3 * KILL_AFTER if setting.is_small else TOKENS
    entry = {"path": str(folder), "max_concurrency": STREAMS, "restart": RESTART}
    for name, spares in (("recovery", 0), ("recovery_spare", 1)):
        if name not in wanted:
            continue
        gaps, loads, lost = [], [], []
        with Daemon({NAME: entry}, {"spare_workers": spares}) as daemon:
            async with AsyncClient(daemon.endpoint) as client:
                await client.load(NAME)
                for seed in range(1, setting.runs(KILLS) + 1):
                    with Floor(folder, STREAMS) as floor:
                        loads.append(floor.started_s)
                    await until_spares_wait(client, spares)
                    gap_s, gone = await kill(client, seed, tokens)
                    gaps.append(gap_s)
                    lost.append(gone)
        yield name, founds(name, gaps, loads, lost)


def founds(
    name: str, gaps: Sequence[float], loads: Sequence[float], lost: Sequence[float]
) -> Founds:
    """The figures of a row, kill by kill."""
    sides = {"until all continue": gaps, "a load in one process": loads}
    if name == "recovery_spare":
        ratios = [gap / load for gap, load in zip(gaps, loads, strict=True)]
        note = f"{sum(lost):g} streams were lost or changed" if any(lost) else ""
        return {name: Found(values=ratios, sides=sides, unit="s", note=note)}
    more = [gap - load for gap, load in zip(gaps, loads, strict=True)]
    return {
        "recovery": Found(values=more, sides=sides, unit="s"),
        "recovery_lost": Found(values=lost),
    }


STAGES = (Stage(name="recovery", rows=("recovery", "recovery_spare"), measure=recovery),)
