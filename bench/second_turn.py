"""A chat's second turn, and a second chat with the same system prompt: what is known.

Two worker processes serve the same model, one with its prefix cache and one with
`prefix_cache = 0`. Both are asked the same, in turn; each repeat has words of its own, so that
nothing is known of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from mlxsup.client import AsyncClient
from support.daemon import Daemon

from .report import print_table, spread
from .two_models import words

SYSTEM_WORDS = 60
QUESTION_WORDS = 20
ANSWER = 24

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer."""

    first_token_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str


async def ask(client: AsyncClient, model: str, messages: Messages) -> Turn:
    """Streams one greedy answer."""
    begin = time.perf_counter()
    first_at = 0.0
    stream = client.generate(model, messages=messages, max_tokens=ANSWER)
    async for delta in stream:
        if delta.token_ids:
            first_at = first_at or time.perf_counter()
    usage = stream.result.usage
    return Turn(
        first_token_s=first_at - begin,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        text=stream.result.text,
    )


def said(role: str, text: str) -> dict[str, str]:
    """One message."""
    return {"role": role, "content": text}


async def chats(client: AsyncClient, model: str, seed: int) -> dict[str, Turn]:
    """Two turns of a chat, then the first turn of another one with the same system prompt."""
    system = said("system", words(SYSTEM_WORDS, seed))
    chat = [system, said("user", words(QUESTION_WORDS, seed + 1))]
    first = await ask(client, model, chat)
    chat += [said("assistant", first.text), said("user", words(QUESTION_WORDS, seed + 2))]
    second = await ask(client, model, chat)
    other = await ask(client, model, [system, said("user", words(QUESTION_WORDS, seed + 3))])
    return {"first turn": first, "second turn": second, "other chat, same system prompt": other}


def run(model: Path, repeats: int) -> None:
    """Measures and prints."""
    asyncio.run(_run(model, repeats))


async def _run(model: Path, repeats: int) -> None:
    print("## The second turn of a chat (CPU, SmolLM2)\n", flush=True)
    models = {
        "with": {"path": str(model)},
        "without": {"path": str(model), "prefix_cache": 0},
    }
    turns: dict[tuple[str, str], list[Turn]] = defaultdict(list)
    with Daemon(models) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            for name in models:
                await client.load(name)
                await ask(client, name, [said("user", "hello")])  # the first one is slower
            for repeat in range(repeats):
                for name in models:
                    for what, turn in (await chats(client, name, 100 * repeat)).items():
                        turns[name, what].append(turn)
    print(f"{repeats} repeats; median (range); TTFT: time to first token\n")
    rows = []
    for what in [what for name, what in turns if name == "with"]:
        cached, plain = turns["with", what], turns["without", what]
        assert [t.text for t in cached] == [t.text for t in plain], "the cache changed an answer"
        assert not any(turn.cached_tokens for turn in plain)
        ratios = [c.first_token_s / p.first_token_s for c, p in zip(cached, plain, strict=True)]
        rows.append(
            [
                what,
                spread([turn.prompt_tokens for turn in cached], digits=0),
                spread([turn.cached_tokens for turn in cached], digits=0),
                spread([turn.first_token_s for turn in cached]),
                spread([turn.first_token_s for turn in plain]),
                spread(ratios),
            ]
        )
    head = ["what", "prompt tokens", "of them cached", "TTFT s", "without cache", "ratio"]
    print_table(head, rows)
