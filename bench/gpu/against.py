"""Bursts on a GPU, next to the same bursts in one process and in mlx_lm.server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlxsup.client import AsyncClient

from ..fast_path.bursts import Contest, Pairs, steps_note
from ..fast_path.claims import DEMANDS, STREAMS
from ..fast_path.results import Founds
from ..fast_path.stages import Rows, Setting, Stage, tell
from ..floor import Floor
from ..peers import MlxLmServer
from .models import model
from support.daemon import Daemon

TOKENS = 192
REPEATS = 5
MOST_STREAMS = max(STREAMS)


def server_of(stack: AsyncExitStack, folders: dict[str, Path]) -> MlxLmServer | None:
    """mlx_lm.server, unless it does not start here."""
    options = ("--decode-concurrency", str(MOST_STREAMS), "--prompt-concurrency", str(MOST_STREAMS))
    try:
        return stack.enter_context(MlxLmServer(folders, *options))
    except AssertionError as error:
        tell(f"mlx_lm.server does not take part: {error}")
        return None


def founds(name: str, streams: int, pairs: Pairs) -> Founds:
    """The figures of one row."""
    row = f"{name}_{streams}"
    is_difference = streams in DEMANDS[name].first_more_ms
    first = pairs.difference_ms() if is_difference else pairs.ratio("first_s", "ms", 1000.0)
    return {
        f"{row}_steady": pairs.ratio("steady_per_s", "tok/s"),
        f"{row}_whole": pairs.ratio("whole_per_s", "tok/s"),
        f"{row}_first": replace(first, note=steps_note(pairs.ours)),
    }


async def against(name: str, setting: Setting, wanted: Sequence[str]) -> Rows:
    """All rows of one model, with the same three processes."""
    folder = model(setting, name)
    tokens = 32 if setting.is_small else TOKENS
    async with AsyncExitStack() as stack:
        floor = stack.enter_context(Floor(folder, MOST_STREAMS))
        entry = {"path": str(folder), "max_concurrency": MOST_STREAMS}
        daemon = stack.enter_context(Daemon({name: entry}))
        server = server_of(stack, {name: folder})
        client = await stack.enter_async_context(AsyncClient(daemon.endpoint))
        await client.load(name)
        contest = Contest(client=client, floor=floor, server=server, model=name)
        for streams in STREAMS:
            if f"{name}_{streams}" not in wanted:
                continue
            await contest.pair(None, streams, tokens)
            pairs = Pairs()
            for _ in range(setting.runs(REPEATS)):
                await contest.pair(pairs, streams, tokens)
            yield f"{name}_{streams}", founds(name, streams, pairs)


STAGES = tuple(
    Stage(
        name=f"against_{name}",
        rows=tuple(f"{name}_{streams}" for streams in STREAMS),
        measure=partial(against, name),
    )
    for name in DEMANDS
)
