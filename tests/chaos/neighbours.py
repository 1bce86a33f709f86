"""Clients that behave badly beside those that are judged."""

from __future__ import annotations

import asyncio
import random
import sys

from mlxsup.client import AsyncClient

from fuzz.frames import hostile_frames
from support.raw_client import RawClient

ABANDONED = 5
GARBAGE = 20
TOKENS = 200


class Neighbours:
    """Clients that leave, are killed, or talk nonsense.

    Args:
        endpoint: of the daemon.
        dice: for the nonsense.
    """

    def __init__(self, endpoint: str, dice: random.Random) -> None:
        self._endpoint, self._dice = endpoint, dice

    async def strike(self, kind: str, model: str) -> bool:
        """Always strikes."""
        match kind:
            case "client gone":
                await self._leave(model)
            case "client killed":
                await self._kill(model)
            case "garbage":
                await asyncio.to_thread(self._send_garbage)
        return True

    async def _leave(self, model: str) -> None:
        """A client that asks, and closes its connection in the middle of its answers."""
        async with AsyncClient(self._endpoint) as client:
            streams = [
                client.generate(model, prompt=f"left {n}", max_tokens=TOKENS)
                for n in range(ABANDONED)
            ]
            await client.ping()
            del streams

    async def _kill(self, model: str) -> None:
        """A client that asks, and whose process is killed in the middle of its answers."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "chaos.victim", self._endpoint, model, str(ABANDONED),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"asked\n", "the victim did not start"
        finally:
            process.kill()
            await process.wait()

    def _send_garbage(self) -> None:
        with RawClient(self._endpoint) as client:
            for _ in range(GARBAGE):
                client.say(hostile_frames(self._dice))
            client.hear_any()
