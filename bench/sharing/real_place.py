"""What the measures with real processes share: models, what the product can do, first tokens."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxsup.client import AsyncClient, Delta, Notice, RequestError
from mlxsup.client.async_streams import AsyncStream

from ..claim import Range
from ..shaped_model import Shape
from .figures import Figure, figure
from support import warm
from support.daemon import Daemon
from support.verdict import NotShown

SHAPE = Shape(layers=2, hidden=128, intermediate=256, heads=2, key_value_heads=2, dtype="float32")
"""A step of a few rows takes milliseconds on two cores, so that many fit into a run."""

MEMORY_MIB = 224
"""What is reserved for such a model: about what its process holds, which now and then is more, so
that it has to be corrected. An estimate would not be the same for equal models."""

CONTEXT = 8192
COMMAND_S = 60.0
LOOK_EVERY_S = 0.02
PATIENCE_S = 300.0
"""What takes seconds on a quiet machine; beyond it, a run cannot judge."""


def tell(line: str) -> None:
    """Progress, apart from the report."""
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- what the product can do


def require_keys(*keys: str) -> None:
    """Looks whether the product has these keys of `[supervisor]`.

    Raises:
        NotShown: it lacks one.
    """
    done = warm.run_text(Daemon.command("config", "schema"), timeout_s=COMMAND_S)
    known = json.loads(done.stdout)["$defs"]["SupervisorTable"]["properties"]
    for key in keys:
        if key not in known:
            raise NotShown(f"it needs the key {key} of [supervisor], which this version lacks")


def squeezed(
    folders: Mapping[str, Path],
    room: float,
    *,
    entry: Mapping[str, Any],
    supervisor: Mapping[str, Any],
) -> Daemon:
    """A daemon whose budget holds only a few of its equal models; none is loaded.

    Args:
        folders: the models.
        room: the memory budget, in models.
        entry: further keys of each of them.
        supervisor: further keys of `[supervisor]`.
    """
    models = {
        name: {"path": str(folder), "preload": False, "memory": f"{MEMORY_MIB}MiB", **entry}
        for name, folder in folders.items()
    }
    return Daemon(models, {**supervisor, "memory_budget": f"{room * MEMORY_MIB:.0f}MiB"})


async def row_of(client: AsyncClient, model: str) -> dict[str, Any]:
    """A model's row of the status."""
    rows: list[dict[str, Any]] = (await client.status())["models"]
    return next(row for row in rows if row["name"] == model)


async def until(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits for something that happens in this event loop.

    Raises:
        NotShown: it did not happen in time.
    """
    begin = time.monotonic()
    while not is_so():
        if time.monotonic() - begin > patience_s:
            raise NotShown(f"{what}: not within {patience_s:g} s")
        await asyncio.sleep(LOOK_EVERY_S)


async def until_row(
    client: AsyncClient, model: str, is_so: Callable[[dict[str, Any]], bool], what: str
) -> None:
    """Waits until the status says something of a model.

    Raises:
        NotShown: it does not say so in time.
    """
    begin = time.monotonic()
    while not is_so(await row_of(client, model)):
        if time.monotonic() - begin > PATIENCE_S:
            raise NotShown(f"{what}: not within {PATIENCE_S:g} s")
        await asyncio.sleep(LOOK_EVERY_S)


# ---------------------------------------------------------------- requests


def prompt_tokens(length: int, seed: int) -> list[int]:
    """A prompt of that many ids; others for each seed, from the first one on."""
    dice = random.Random(seed)
    return [dice.randint(300, 2000) for _ in range(length)]


async def first_token_s(client: AsyncClient, model: str, prompt: list[int], **more: Any) -> float:
    """Seconds from the question to the first token of a short answer, read to its end."""
    begin = time.perf_counter()
    first_s = 0.0
    async for delta in client.generate(model, prompt_tokens=prompt, max_tokens=4, **more):
        if delta.token_ids and not first_s:
            first_s = time.perf_counter() - begin
    assert first_s, "no token"
    return first_s


@dataclass(slots=True, eq=False)
class Live:
    """A stream that is read in the background.

    Attributes:
        token_ids: what has come so far.
        times: when each piece came, `time.perf_counter`.
        ran_since: when the first token came since it began or was last resumed; 0.0 before.
        pauses: how many times it was said to be paused.
        error: what it ended with, if it did not end well.
        was_cancelled: whether its reader ended it.
    """

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ran_since: float = 0.0
    pauses: int = 0
    error: RequestError | None = None
    is_over: bool = False
    was_cancelled: bool = False
    stream: AsyncStream | None = None

    def on_notice(self, notice: Notice) -> None:
        """Hears of pauses."""
        if notice.kind == "paused":
            self.pauses += 1
            self.ran_since = 0.0

    def take(self, delta: Delta) -> None:
        """One piece."""
        if delta.token_ids:
            now = time.perf_counter()
            self.ran_since = self.ran_since or now
            self.token_ids += delta.token_ids
            self.times.append(now)

    async def read(self, client: AsyncClient, model: str, **parameters: Any) -> None:
        """Asks, and reads to the end."""
        self.stream = client.generate(model, on_notice=self.on_notice, **parameters)
        try:
            async for delta in self.stream:
                self.take(delta)
        except RequestError as error:
            self.error = error
        self.is_over = True

    def cancel(self) -> None:
        """Ends it."""
        if self.stream is not None:
            self.was_cancelled = True
            self.stream.cancel()


def sampled(prompt: list[int], seed: int, max_tokens: int) -> dict[str, Any]:
    """The parameters of an answer that is drawn, so that any slip of a draw changes it."""
    return {
        "prompt_tokens": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "seed": seed,
        "ignore_eos": True,
    }


# ---------------------------------------------------------------- figures


def pooled(claim: str, value: float, without: Sequence[float], **more: Any) -> Figure:
    """A figure of all rounds together.

    Args:
        claim: its id.
        value: of all samples of all rounds.
        without: the same with each round left out in turn: the range.
        more: of `figure`.
    """
    one = figure(claim, [value], **more)
    low, high = min([value, *without]), max([value, *without])
    return replace(one, found=Range(value=value, low=low, high=high))


def leaving_out(rounds: Sequence[Any], of: Callable[[Sequence[Any]], float]) -> list[float]:
    """What comes out with each of the rounds left out in turn; nothing for a single round."""
    if len(rounds) < 2:
        return []
    return [of([*rounds[:place], *rounds[place + 1 :]]) for place in range(len(rounds))]
