"""Ordinary use with crashes: bursts of requests whose answers are known before they are asked."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

from mlxsup.client import Client

from support.daemon import fake, row, wait_for_state
from support.faults import undisturbed
from support.reference import greedy_answers
from support.streams import Reader

BURST = 24
CANCELLED = 0.2
CRASHES_EVERY = 5
UNLOADS_EVERY = 7
MAX_TOKENS = 80
PROMPTS = [f"{'word ' * (3 * n)}number {n}" for n in range(12)]
RESTART = {"max_restarts": 1_000_000, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}


def entries(tiny: Path | None) -> dict[str, dict[str, object]]:
    """Models that live through it all, and one that dies and is unloaded.

    Args:
        tiny: a model folder for real MLX; None for the fake engine alone.
    """
    models: dict[str, dict[str, object]] = {
        "fake": fake(fake={"step_s": 0.001}, max_concurrency=8),
        "mortal": fake(fake={"step_s": 0.001}, max_concurrency=8, restart=RESTART),
    }
    if tiny is not None:
        models["real"] = {"path": str(tiny), "preload": True, "prefix_cache": "16MiB"}
    return models


class Use:
    """One client's use of the daemon.

    Attributes:
        requests: asked so far.
        problems: answers that were wrong.

    Args:
        client: asks.
        tiny: the folder of the real model, if there is one.
        seed: of what is asked.
    """

    def __init__(self, client: Client, tiny: Path | None, seed: int) -> None:
        self._client = client
        self._dice = random.Random(seed)
        fakes = [undisturbed(prompt, MAX_TOKENS) for prompt in PROMPTS]
        self._truth = {"fake": fakes, "mortal": fakes}
        if tiny is not None:
            self._truth["real"] = greedy_answers(tiny, PROMPTS, MAX_TOKENS)
        self.requests = self.turn = 0
        self.problems: list[str] = []

    def take_turn(self) -> None:
        """A burst of requests, some cancelled; now and then a crash or an unload."""
        client, dice = self._client, self._dice
        self.turn += 1
        asked = [self._ask() for _ in range(BURST)]
        for reader, _, _ in asked:
            if dice.random() < CANCELLED:
                reader.stream.cancel()
        pid = row(client, "mortal")["pid"]
        if self.turn % CRASHES_EVERY == 0 and pid is not None:
            os.kill(pid, dice.choice((signal.SIGKILL, signal.SIGTERM)))
        for reader, truth, what in asked:
            self._compare(reader, truth, what)
        wait_for_state(client, "mortal", "READY")
        if self.turn % UNLOADS_EVERY == 0:
            client.unload("mortal")
            client.load("mortal")

    def _ask(self) -> tuple[Reader, list[int], str]:
        model = self._dice.choice(list(self._truth))
        number, tokens = self._dice.randrange(len(PROMPTS)), self._dice.randint(1, MAX_TOKENS)
        self.requests += 1
        # The truth of a real model may end early.
        truth = self._truth[model][number][:tokens]
        parameters: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0}
        reader = Reader(self._client, model, PROMPTS[number], **parameters)
        return reader, truth, f"prompt {number} of {model}"

    def _compare(self, reader: Reader, truth: list[int], what: str) -> None:
        result = reader.finished(120.0)
        is_cancelled = result.finish_reason == "cancelled"
        expected = truth[: len(result.token_ids)] if is_cancelled else truth
        if result.token_ids != expected:
            self.problems.append(f"{what}: {result.token_ids} instead of {expected}")
