"""The first requests after READY: is the first as fast as the second (B10)?

Each repeat is a new process, so that nothing is left of an earlier one. The prompts have the same
length and no token in common.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from mlxsup.client import Client

from .report import print_table, spread
from support.daemon.daemon import Daemon

PROMPT_TOKENS = 40
ANSWER = 8
REQUESTS = ("first", "second", "third")

Times = dict[str, list[float]]


def ask(client: Client, model: str, number: int) -> tuple[float, float]:
    """Time to the first token and to the last, in seconds, as the daemon counts them."""
    first = 300 + number * PROMPT_TOKENS
    tokens = list(range(first, first + PROMPT_TOKENS))
    result = client.complete(model, prompt_tokens=tokens, max_tokens=ANSWER)
    assert len(result.token_ids) == ANSWER, "it ended early: nothing to compare"
    return result.timings.first_token_s, result.timings.total_s


def run(tiny: Path, smollm2: Path, repeats: int) -> None:
    """Measures and prints.

    Args:
        tiny, smollm2: models.
        repeats: processes of each.
    """
    print("## The first requests after READY (CPU)\n", flush=True)
    rows = []
    for model, folder in (("tiny", tiny), ("SmolLM2", smollm2)):
        first_token: Times = {name: [] for name in REQUESTS}
        total: Times = {name: [] for name in REQUESTS}
        with Daemon({model: {"path": str(folder)}}) as daemon, daemon.client() as client:
            for _ in range(repeats):
                client.restart(model, now=True)
                for number, name in enumerate(REQUESTS):
                    times = ask(client, model, number)
                    first_token[name].append(times[0])
                    total[name].append(times[1])
        for what, found in (("first token", first_token), (f"all {ANSWER} tokens", total)):
            later = statistics.median(found["second"] + found["third"])
            rows.append(
                [
                    model,
                    what,
                    *(f"{spread([1000 * s for s in found[name]], digits=0)}" for name in REQUESTS),
                    f"{statistics.median(found['first']) / later:.2f}",
                ]
            )
    print(f"{repeats} processes; {PROMPT_TOKENS} prompt tokens; ms, median (range)\n")
    print_table(["model", "what", *REQUESTS, "first to later"], rows)
