"""A burst of prompts, answered by mlxsup, by one process alone and by mlx_lm.server."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxsup.cli.benchmark.asking import ask_over_socket
from mlxsup.cli.benchmark.burst import Burst
from mlxsup.client import AsyncClient

from ..floor import Floor
from ..peers import MlxLmServer
from .results import Found
from .stages import tell
from support.verdict import NotShown

OURS, FLOOR, SERVER = "mlxsup", "in process", "mlx_lm.server"
PROMPT_WORDS = (
    "is the number of this prompt of the benchmark which has some more words so that it is as long"
    " as a short question"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedBurst(Burst):
    """A burst of mlxsup.

    Attributes:
        steps: that the engine took.
    """

    steps: int = 0

    @property
    def more_steps(self) -> int:
        """Steps besides one for each token of an answer: two, if one pass has read all prompts."""
        return self.steps - len(self.times[0])


def steps_note(bursts: Sequence[CountedBurst]) -> str:
    """How well bursts were gathered, a sentence without its full stop."""
    more = statistics.median(burst.more_steps for burst in bursts)
    return (
        f"Steps besides one for each token of an answer: {more:g} (2: one pass has read all"
        " prompts)"
    )


def prompts_of(count: int, seed: int) -> list[str]:
    """Prompts that no cache has seen: they differ from their first word on."""
    return [f"{seed} {number} {PROMPT_WORDS}" for number in range(count)]


async def counted_burst(
    client: AsyncClient, model: str, prompts: Sequence[str], tokens: int
) -> CountedBurst:
    """Sends all prompts at once to mlxsup, and counts the steps that it takes.

    Raises:
        AnswerError: an answer has another length.
    """
    before = await _steps(client, model)
    inputs = [{"prompt": prompt} for prompt in prompts]
    burst = await ask_over_socket(client, model, inputs, tokens)
    steps = await _steps(client, model) - before
    return CountedBurst(sent_s=burst.sent_s, times=burst.times, steps=steps)


async def _steps(client: AsyncClient, model: str) -> int:
    """How many steps a model has taken in all of its lives."""
    rows = (await client.status())["models"]
    return int(next(row["steps"] for row in rows if row["name"] == model))


async def served(
    server: MlxLmServer, model: str, prompts: Sequence[str], tokens: int
) -> Burst | None:
    """The same from mlx_lm.server, which shows pieces of text; None if it answers otherwise.

    A piece may hold several tokens, and the last one of an answer is counted as often as it takes.
    """
    times: list[list[float]] = [[] for _ in prompts]
    sent_s: list[float] = []
    has_failed = False
    begin = time.perf_counter()

    async def read(prompt: str, own: list[float]) -> None:
        sent_s.append(time.perf_counter() - begin)
        await server.ask(model, prompt, tokens, lambda now: own.append(now - begin))

    try:
        async with asyncio.TaskGroup() as group:
            for pair in zip(prompts, times, strict=True):
                group.create_task(read(*pair))
    except* (AssertionError, OSError) as errors:
        tell(f"mlx_lm.server no longer takes part: {errors.exceptions[0]}")
        has_failed = True
    if has_failed or not all(times):
        return None
    whole = [own + [own[-1]] * (tokens - len(own)) for own in times]
    return Burst(sent_s=sent_s, times=whole)


@dataclass(slots=True)
class Pairs:
    """Bursts of mlxsup and of one process in turn, at one number of streams.

    Attributes:
        ours: mlxsup's.
        floor: those of one process, one for each of ours.
        server: those of mlx_lm.server; empty unless it has answered every time.
    """

    ours: list[CountedBurst] = field(default_factory=list)
    floor: list[Burst] = field(default_factory=list)
    server: list[Burst] = field(default_factory=list)

    def ratio(self, of: str, unit: str, times: float = 1.0) -> Found:
        """Ours to one process's, pair by pair.

        Args:
            of: the name of a property of `Burst`.
            unit: in which the sides are shown.
            times: the number of these units in the property's own.

        Raises:
            NotShown: one process has no such speed.
        """
        sides = self._sides(of, times)
        if not all(sides[FLOOR]):
            raise NotShown("in one process the streams never ran together: too short")
        values = [our / its for our, its in zip(sides[OURS], sides[FLOOR], strict=True)]
        return Found(values=values, sides=sides, unit=unit)

    def difference_ms(self) -> Found:
        """How much later our first tokens come, pair by pair."""
        sides = self._sides("first_s", 1000.0)
        values = [our - its for our, its in zip(sides[OURS], sides[FLOOR], strict=True)]
        return Found(values=values, sides=sides, unit="ms")

    def _sides(self, of: str, times: float) -> dict[str, list[float]]:
        found: dict[str, Sequence[Burst]] = {
            OURS: self.ours,
            FLOOR: self.floor,
            SERVER: self.server,
        }
        return {
            name: [float(getattr(burst, of)) * times for burst in bursts]
            for name, bursts in found.items()
            if bursts
        }


@dataclass(slots=True, kw_only=True)
class Contest:
    """Everybody who answers, loaded.

    Attributes:
        client: of mlxsup.
        floor: one process alone.
        server: None if there is none, or once it has failed.
        model: the name that all of them know.
        seed: of the latest prompts."""

    client: AsyncClient
    floor: Floor
    server: MlxLmServer | None
    model: str
    seed: int = 0

    async def pair(self, pairs: Pairs | None, streams: int, tokens: int) -> None:
        """One more burst of each, those of mlxsup and of one process in changing order.

        Args:
            pairs: takes them; None to warm up.
            streams: how many prompts at once.
            tokens: length of each answer.
        """
        self.seed += 1
        ours, floor = await self._both(streams, tokens)
        theirs = None
        if self.server is not None:
            theirs = await served(self.server, self.model, self._prompts(streams), tokens)
            if theirs is None:
                # It may still be at work, and keeps its memory.
                await asyncio.to_thread(self.server.give_up)
                self.server = None
        if pairs is None:
            return
        pairs.ours.append(ours)
        pairs.floor.append(floor)
        if theirs is None:
            pairs.server.clear()
        else:
            pairs.server.append(theirs)

    async def _both(self, streams: int, tokens: int) -> tuple[CountedBurst, Burst]:
        """Ours and the floor's, with the same times between the prompts."""
        prompts = self._prompts(streams)
        if self.seed % 2:
            ours = await self._ours(prompts, tokens)
            return ours, await self._alone(prompts, ours.sent_s, tokens)
        # Nobody knows yet when ours will be sent: all of them are there at once.
        floor = await self._alone(prompts, [0.0] * streams, tokens)
        return await self._ours(prompts, tokens), floor

    async def _ours(self, prompts: Sequence[str], tokens: int) -> CountedBurst:
        return await counted_burst(self.client, self.model, prompts, tokens)

    async def _alone(self, prompts: Sequence[str], sent_s: Sequence[float], tokens: int) -> Burst:
        times = await asyncio.to_thread(self.floor.burst, prompts, sent_s, tokens)
        return Burst(sent_s=sent_s, times=times)

    def _prompts(self, streams: int) -> list[str]:
        return prompts_of(streams, 1000 * self.seed + streams)
