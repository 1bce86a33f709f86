"""A client in a separate process, and so with its own account, that keeps requests open.

The process gets an `Order` as JSON. It prints an empty object when the first token has come; at the
end of its standard input it cancels what is open and prints what it got.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mlxsup.client import AsyncClient
from mlxsup.client.async_streams import AsyncStream

from support.child import Child, EndedError
from support.verdict import NotShown

ROOT = Path(__file__).parents[2]
END_S = 120.0
START = "import sys; from bench.sharing.real_party import main; main(sys.argv[1])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the process does.

    Attributes:
        endpoint: of the daemon.
        model: that it asks.
        open_requests: how many it has open all the time.
        seed: of lengths and prompts.
        shortest, longest: of its prompts and answers, in tokens.
    """

    endpoint: str
    model: str
    open_requests: int
    seed: int
    shortest: int
    longest: int


class Flood:
    """The requests of the process."""

    def __init__(self, client: AsyncClient, order: Order) -> None:
        self._client = client
        self._order = order
        self._dice = random.Random(order.seed)
        self._open: set[AsyncStream] = set()
        self._is_over = False
        self.has_begun = asyncio.Event()
        self.ended = 0
        self.tokens = 0

    async def run(self) -> None:
        """Keeps all requests open until `end`."""
        await asyncio.gather(*(self._keep_asking() for _ in range(self._order.open_requests)))

    def end(self) -> None:
        """Cancels what is open."""
        self._is_over = True
        for stream in self._open:
            stream.cancel()

    async def _keep_asking(self) -> None:
        while not self._is_over:
            dice, order = self._dice, self._order
            length = dice.randint(order.shortest, order.longest)
            prompt = [dice.randint(300, 2000) for _ in range(length)]
            answer = dice.randint(order.shortest, order.longest)
            stream = self._client.generate(
                order.model, prompt_tokens=prompt, max_tokens=answer, ignore_eos=True
            )
            self._open.add(stream)
            async for delta in stream:
                self.tokens += len(delta.token_ids)
                self.has_begun.set()
            self._open.discard(stream)
            self.ended += not self._is_over


class Party:
    """Such a process, which has begun; leaving the block ends it.

    Raises:
        NotShown: it did not begin.
    """

    def __init__(self, order: Order) -> None:
        self._child = Child("-c", START, json.dumps(asdict(order)), cwd=ROOT)
        self.found: dict[str, Any] = {}
        try:
            self._child.line()
        except EndedError:
            raise NotShown("a client process did not begin") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.found = self._child.end(END_S)


def main(order: str) -> None:
    """What the process does: runs until its standard input ends."""
    asyncio.run(_run(Order(**json.loads(order))))


async def _run(order: Order) -> None:
    async with AsyncClient(order.endpoint) as client:
        flood = Flood(client, order)
        running = asyncio.create_task(flood.run())
        await flood.has_begun.wait()
        print(json.dumps({}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        flood.end()
        await running
    print(json.dumps({"ended": flood.ended, "tokens": flood.tokens}), flush=True)
