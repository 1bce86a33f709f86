"""A chat's second turn, and a second chat with the same system prompt: what is known.

Two worker processes serve the same model, one with its prefix cache and one with
`prefix_cache = 0`. Both are asked the same, in turn; each repeat has its own words, so that
nothing is known of it. Then tiny models with other caches: sliding windows, and a hybrid of
attention and convolution.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.client import AsyncClient

from .report import print_table, spread
from .two_models import words
from support.daemon.daemon import Daemon
from support.model_types.build import make_model

SYSTEM_WORDS = 60
QUESTION_WORDS = 20
ANSWER = 24
KINDS = {"llama": "attention", "gemma3_text": "sliding windows", "lfm2": "a hybrid"}

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
    # As clients send it that do not return the reasoning of an answer.
    chat[2] = said("assistant", "other words than those of the answer")
    stripped = await ask(client, model, chat)
    again = await ask(client, model, chat)
    return {
        "first turn": first,
        "second turn": second,
        "other chat, same system prompt": other,
        "second turn, answer shortened": stripped,
        "the same again": again,
    }


def run(model: Path, kinds: Path, repeats: int) -> None:
    """Measures and prints.

    Args:
        model: a real one.
        kinds: a folder for tiny models.
        repeats: of each figure.
    """
    asyncio.run(_run(model, "SmolLM2", repeats))
    for model_type, what in KINDS.items():
        folder = make_model(kinds / model_type, model_type)
        asyncio.run(_run(folder, f"a tiny {model_type}: {what}", repeats))


async def _run(model: Path, name: str, repeats: int) -> None:
    print(f"## The second turn of a chat (CPU, {name})\n", flush=True)
    models: dict[str, dict[str, Any]] = {
        "with": {"path": str(model)},
        "without": {"path": str(model), "prefix_cache": 0},
    }
    turns: dict[tuple[str, str], list[Turn]] = defaultdict(list)
    with Daemon(models) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            for model_name in models:
                await client.load(model_name)
                await ask(client, model_name, [said("user", "hello")])  # the first one is slower
            for repeat in range(repeats):
                for model_name in models:
                    for what, turn in (await chats(client, model_name, 100 * repeat)).items():
                        turns[model_name, what].append(turn)
    print(f"{repeats} repeats; median (range); TTFT: time to first token\n")
    rows = []
    for what in [what for model_name, what in turns if model_name == "with"]:
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
