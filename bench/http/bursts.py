"""The same burst over HTTP, in one process alone, and from other servers, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mlxsup.cli.benchmark.burst import AnswerError, Burst

from ..fast_path.bursts import FLOOR, OURS, prompts_of
from ..fast_path.results import Found
from ..fast_path.stages import tell
from ..floor import Floor
from .servers import OverHttp

T = TypeVar("T")

PEER_LIMIT_S = 600.0
"""How long somebody else's server may take for a burst."""


@dataclass(slots=True)
class Rounds:
    """Bursts of everybody, one of each in each round.

    Attributes:
        bursts: by name.
        missing: peers that were not there in every round, and why.
    """

    bursts: dict[str, list[Burst]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def take(self, found: Mapping[str, Burst], missing: Mapping[str, str]) -> None:
        """One more round."""
        for name, burst in found.items():
            self.bursts.setdefault(name, []).append(burst)
        self.missing.update(missing)

    def found(self, of: str, unit: str, times: float = 1.0) -> Found:
        """Ours to one process's, round by round.

        Args:
            of: the name of a property of `Burst`.
            unit: in which the sides are shown.
            times: the number of these units in the property's own.
        """
        sides = {
            name: [float(getattr(burst, of)) * times for burst in bursts]
            for name, bursts in self.bursts.items()
            if name not in self.missing
        }
        values = [our / its for our, its in zip(sides[OURS], sides[FLOOR], strict=True)]
        return Found(values=values, sides=sides, unit=unit, note=note_of(self.missing))


def note_of(missing: Mapping[str, str]) -> str:
    """Which peers have no figures, for people."""
    return "; ".join(f"{name} is missing: {why}" for name, why in missing.items())


@dataclass(slots=True, kw_only=True)
class Contest:
    """Everybody who answers, loaded.

    Attributes:
        ours: the gateway.
        floor: one process alone.
        peers: other servers; one that fails takes no further part.
        model: the name that all of them know.
        missing: peers that are not there from the beginning, and why.
        seed: of the latest prompts.
    """

    ours: OverHttp
    floor: Floor
    peers: list[OverHttp]
    model: str
    missing: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    async def round(self, rounds: Rounds | None, streams: int, tokens: int) -> None:
        """A burst of each; ours and that of one process in changing order.

        Args:
            rounds: takes them; None to warm up.
            streams: how many prompts at once.
            tokens: length of each answer.
        """
        self.seed += 1
        prompts = prompts_of(streams, 1000 * self.seed + streams)
        if self.seed % 2:
            ours = await self.ours.burst(self.model, prompts, tokens)
            floor = await self._alone(prompts, ours.sent_s, tokens)
        else:
            # Nobody knows yet when ours will be sent: all of them are there at once.
            floor = await self._alone(prompts, [0.0] * streams, tokens)
            ours = await self.ours.burst(self.model, prompts, tokens)
        found = {OURS: ours, FLOOR: floor}
        for peer in list(self.peers):
            answered = await self.unless_it_fails(peer, peer.burst(self.model, prompts, tokens))
            if answered is not None:
                found[peer.name] = answered
        if rounds is not None:
            rounds.take(found, self.missing)

    async def unless_it_fails(self, peer: OverHttp, answer: Awaitable[T]) -> T | None:
        """What a peer answers; None if it fails, and then it takes no further part."""
        try:
            async with asyncio.timeout(PEER_LIMIT_S):
                return await answer
        except (AssertionError, AnswerError, OSError, TimeoutError) as error:
            await self._drop(peer, error)
            return None

    async def _drop(self, peer: OverHttp, error: Exception) -> None:
        tell(f"{peer.name} no longer takes part: {type(error).__name__}: {error}")
        self.missing[peer.name] = "it has failed"
        self.peers.remove(peer)
        if peer.process is not None:  # it may still be at work, and keeps its memory
            await asyncio.to_thread(peer.process.give_up)

    async def _alone(self, prompts: Sequence[str], sent_s: Sequence[float], tokens: int) -> Burst:
        times = await asyncio.to_thread(self.floor.burst, prompts, sent_s, tokens)
        return Burst(sent_s=sent_s, times=times)
