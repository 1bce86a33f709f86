"""Measures every size in turn: sends bursts, and watches the daemon meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from mlxsup.client import AsyncClient
from mlxsup.protocol.flight import RequestEnded

from ..exit_status import CliError
from ..model_rows import row_called
from .asking import STEADY, Ask, over_http, over_socket
from .burst import Burst
from .http_reading import Address
from .run import Look, Run
from .sizes import LEAST_ID, WARM_UP_TOKENS, Cell, in_turn, prompts_of

LOOK_EVERY_S = 1.0
"""How often the memory of the model's process is looked at."""

Tell = Callable[[Cell, int | None], None]
"""Gets each size that is about to be measured; the number of warm-ups before it, or None."""


async def measure(
    endpoint: str, run: Run, tell: Tell, *, address: Address | None, key: str
) -> None:
    """Warms up, then measures each repeat of each size.

    Args:
        endpoint: of the daemon, in which the model is READY.
        run: takes what is measured, at once, so that it is there if this is cancelled.
        tell: gets the progress.
        address: of the gateway, to ask through it; None for the daemon's socket.
        key: of the gateway.

    Raises:
        AnswerError, RequestError, ConnectionLost, OSError: an answer has failed.
        CliError: the daemon is too busy to be measured.
    """
    chooser = random.Random()  # other prompts each time: the daemon may remember earlier ones
    async with AsyncClient(endpoint) as client:
        model = run.model
        ask = over_socket(client, model) if address is None else over_http(address, model, key)
        for number, cell in enumerate(run.cells):
            tell(cell, number)
            await ask(list(prompts_of(cell, chooser)), min(cell.output_tokens, WARM_UP_TOKENS))
        run.look(await look(client, run))
        for repeat in range(run.repeats):
            for cell in in_turn(run.cells, repeat):
                tell(cell, None)
                await _measure_one(client, ask, run, cell, chooser)
            run.look(await look(client, run))


async def look(client: AsyncClient, run: Run) -> Look:
    """Sends a request, sees what else is open and what was done, and ends it.

    Raises:
        CliError: more requests are open than the daemon lists.
    """
    tokens = max(cell.prompt_tokens + cell.output_tokens for cell in run.cells) - 1
    stream = client.generate(run.model, prompt_tokens=[LEAST_ID], max_tokens=tokens, **STEADY)
    listed = await client.requests()
    stream.cancel()
    async for _ in stream:
        pass
    numbers = {one["id"]: int(one["number"].removeprefix("#")) for one in listed["requests"]}
    status = await client.status(debug=True)
    # A model that is very fast has answered before the others were listed.
    ended = {
        one["id"]: one["number"] for one in status["flight"] if one["kind"] == RequestEnded.KIND
    }
    number = numbers.get(stream.request_id) or ended.get(stream.request_id)
    if number is None:
        raise CliError(
            f"{len(numbers) + listed['more']} requests are open: nothing can be measured next to"
            " them",
            code="busy",
            hint="see them with `mlxsup requests`, and measure when they have ended",
        )
    row = _row(status, run.model)
    return Look(
        number=number,
        open_others=len(numbers.keys() - {stream.request_id}) + listed["more"],
        steps={one["name"]: one["steps"] for one in status["models"]},
        generation=row["generation"],
    )


# ---------------------------------------------------------------- inside


async def _measure_one(
    client: AsyncClient, ask: Ask, run: Run, cell: Cell, chooser: random.Random
) -> None:
    prompts = list(prompts_of(cell, chooser))
    begin = time.perf_counter()
    seen = [0]
    watching = asyncio.create_task(_watch_memory(client, run.model, seen))
    try:
        burst: Burst = await ask(prompts, cell.output_tokens)
    finally:
        watching.cancel()
        # Its error, if it has one, is that of the burst: the daemon is gone.
        await asyncio.gather(watching, return_exceptions=True)
    took_s = time.perf_counter() - begin
    seen.append(_memory_of(await client.status(), run.model))
    run.take(cell, burst, took_s, max(seen))


async def _watch_memory(client: AsyncClient, model: str, seen: list[int]) -> None:
    """Keeps the most that the model's process takes."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        seen[0] = max(seen[0], _memory_of(await client.status(), model))


def _memory_of(status: dict[str, Any], model: str) -> int:
    return int(_row(status, model)["footprint_bytes"])


def _row(status: dict[str, Any], model: str) -> dict[str, Any]:
    """The model's row.

    Raises:
        CliError: a reload has removed it.
    """
    row = row_called(status, model)
    if row is None:
        raise CliError(
            f"{model} is no longer configured",
            code="unknown_model",
            hint="see `mlxsup status`",
        )
    return row
