"""Models that do not fit together and are all wanted: clients that keep asking."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxsup.client import AsyncClient

from .real_place import Live, prompt_tokens, sampled, squeezed, tell
from .real_timeline import Timeline, Turn
from support.daemon import Daemon
from support.verdict import NotShown

SWAP_AFTER_S = 1.0
MIN_RESIDENCY_S = 3.0
CLIENTS = 3
"""For each model; each asks again when its answer has ended. One more than rows: somebody waits."""

ROWS = 2
TELL_EVERY_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every client of every model asks for, in turn.

    Attributes:
        prompt: its length in tokens.
        answer: the same.
        kinds: how many different requests there are for a model.
    """

    prompt: int
    answer: int
    kinds: int = 4

    def parameters(self, model: str, kind: int) -> dict[str, Any]:
        """One of the requests for a model; always the same one."""
        seed = 100 * sum(model.encode()) + kind
        return sampled(prompt_tokens(self.prompt, seed), seed, self.answer)


@dataclass(slots=True)
class Crowd:
    """Clients of several models, each of which has a stream open all the time.

    Attributes:
        models: that are wanted.
        work: what they ask for.
        answers: the undisturbed ones, by model and kind.
        ended: the streams that have ended, with model and kind.
        open: those that have not.
        token_times: when each token came, by model.
    """

    models: Sequence[str]
    work: Work
    answers: Mapping[tuple[str, int], list[int]]
    ended: list[tuple[str, int, Live]] = field(default_factory=list)
    open: dict[Live, tuple[str, int]] = field(default_factory=dict)
    is_over: bool = False

    async def run(self, client: AsyncClient) -> None:
        """Keeps asking until `end`."""
        await asyncio.gather(
            *(
                self._keep_asking(client, model, first)
                for first in range(CLIENTS)
                for model in self.models
            )
        )

    def end(self) -> None:
        """Cancels what is open."""
        self.is_over = True
        for live in self.open:
            live.cancel()

    async def _keep_asking(self, client: AsyncClient, model: str, first: int) -> None:
        number = first
        while not self.is_over:
            kind = number % self.work.kinds
            live = Live()
            self.open[live] = model, kind
            await live.read(client, model, **self.work.parameters(model, kind))
            del self.open[live]
            self.ended.append((model, kind, live))
            if live.error is not None:
                tell(f"{model}: {live.error!r}")
                await asyncio.sleep(1.0)  # a refusal must not become a storm of them
            number += 1

    def lost(self) -> int:
        """The streams that ended with an error, or are not as the undisturbed ones."""
        return sum(
            live.error is not None
            or live.token_ids != self.answers[model, kind][: len(live.token_ids)]
            or (not live.was_cancelled and len(live.token_ids) < self.work.answer)
            for model, kind, live in self.ended
        )

    def whole(self, model: str) -> int:
        """How many answers of a model have come to their ends."""
        return sum(
            name == model and len(live.token_ids) == self.work.answer
            for name, _, live in self.ended
        )

    def token_times(self) -> dict[str, list[float]]:
        """When each piece of the streams that have ended came, by model."""
        times: dict[str, list[float]] = {model: [] for model in self.models}
        for model, _, live in self.ended:
            times[model] += live.times
        return times


async def undisturbed(
    client: AsyncClient, models: Sequence[str], work: Work
) -> dict[tuple[str, int], list[int]]:
    """The answers to all requests, one model after the other."""
    answers = {}
    for model in models:
        await client.load(model)
        results = await asyncio.gather(
            *(client.complete(model, **work.parameters(model, kind)) for kind in range(work.kinds))
        )
        for kind, result in enumerate(results):
            answers[model, kind] = result.token_ids
        await client.unload(model)
        tell(f"{model}: {work.kinds} undisturbed answers")
    return answers


@asynccontextmanager
async def crowded(
    folders: Mapping[str, Path], room: float, work: Work
) -> AsyncIterator[tuple[Daemon, AsyncClient, Crowd, Timeline]]:
    """A daemon with too little room for its models, all of which are wanted.

    Leaving the block ends the streams.

    Raises:
        NotShown: a worker crashed.
    """
    keys = {"swap_after_s": SWAP_AFTER_S, "min_residency_s": MIN_RESIDENCY_S}
    entry = {"max_concurrency": ROWS}
    models = list(folders)
    with squeezed(folders, room, entry=entry, supervisor=keys) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            crowd = Crowd(models, work, await undisturbed(client, models, work))
            async with Timeline(client) as timeline:
                running = asyncio.create_task(crowd.run(client))
                try:
                    yield daemon, client, crowd, timeline
                finally:
                    crowd.end()
                    await running
            restarts = {row["name"]: row["restarts"] for row in (await client.status())["models"]}
            if any(restarts.values()):
                raise NotShown(f"workers crashed: {restarts}")


def tell_turns(turns: Sequence[Turn]) -> None:
    """How long each was, and how many pieces of answers it delivered."""
    for turn in turns:
        tell(f"{turn.model}: {turn.left_s - turn.ready_s:.1f} s, {turn.tokens} pieces")


async def until_swaps(timeline: Timeline, swaps: int, patience_s: float) -> None:
    """Waits for that many swaps.

    Raises:
        NotShown: there were fewer.
    """
    begin = told = time.monotonic()
    while timeline.swaps < swaps:
        now = time.monotonic()
        if now - begin > patience_s:
            raise NotShown(f"{timeline.swaps} swaps in {patience_s:.0f} s, and not {swaps}")
        if now - told > TELL_EVERY_S:
            told = now
            tell(f"{now - begin:.0f} s: {timeline.swaps} swaps")
        await asyncio.sleep(0.1)
