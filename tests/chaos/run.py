"""Requests on real processes while faults strike; every answer is compared (P1)."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from mlxsup.client import AsyncClient, ConnectionLost, FinishReason, RequestError
from support.daemon import Daemon

from .faults import Faults
from .ledger import Ledger
from .setting import Setting

CLIENTS = 4
CANCELLED = 0.02
"""The share of requests that their clients cancel in the middle."""
SEED = 7
"""Of every second answer; the others are greedy."""
PROGRESS_S = 5.0
SUPERVISOR = {"max_queue_per_client": 1024}

Case = tuple[str, int, int | None]
"""Model, number of the prompt, and seed; None for a greedy answer."""


def parameters(case: Case, tokens: int) -> dict[str, Any]:
    """What is asked."""
    _, number, seed = case
    sampling = {} if seed is None else {"seed": seed, "temperature": 0.8}
    return {"prompt": f"prompt {number}", "max_tokens": tokens, **sampling}


class Chaos:
    """One run against one daemon.

    Args:
        daemon: runs already.
        setting: sizes and faults.
        requests: how many are asked at least; more while a fault has not struck often enough.
        seed: of the faults and of the mix.
        resume: whether answers shall outlive their workers.
        tell: given a line of progress now and then.
    """

    def __init__(
        self,
        daemon: Daemon,
        setting: Setting,
        requests: int,
        seed: int,
        *,
        resume: bool,
        tell: Callable[[str], object],
    ) -> None:
        self._daemon, self._setting, self._requests = daemon, setting, requests
        self._seed, self._resume, self._tell = seed, resume, tell
        self._least = setting.least_of_each(requests)
        self._numbers = itertools.count()
        self._truth: dict[Case, list[int]] = {}
        self.ledger = Ledger()
        self.faults = Faults(daemon, setting, seed, self.ledger)
        self.took_s = 0.0

    async def run(self) -> None:
        """Asks everything while faults strike."""
        clients = [AsyncClient(self._daemon.endpoint) for _ in range(CLIENTS)]
        try:
            await self._learn_truth(clients[0])
            start_s, ended = time.monotonic(), asyncio.Event()
            faults = asyncio.create_task(self.faults.run(ended))
            progress = asyncio.create_task(self._tell_progress(start_s))
            await asyncio.gather(
                *(
                    self._ask_on(clients[n % CLIENTS], model, random.Random(f"{self._seed} {n}"))
                    for n, model in zip(
                        range(self._setting.askers),
                        itertools.cycle(self._setting.models),
                        strict=False,
                    )
                )
            )
            ended.set()
            await faults
            progress.cancel()
            self.took_s = time.monotonic() - start_s
        finally:
            for client in clients:
                await client.close()

    async def _learn_truth(self, client: AsyncClient) -> None:
        """The undisturbed answers: each model gives one at a time."""

        async def learn(model: str) -> None:
            for case in itertools.product((model,), range(self._setting.prompts), (None, SEED)):
                result = await client.complete(model, **parameters(case, self._setting.tokens))
                self._truth[case] = result.token_ids

        await asyncio.gather(*map(learn, self._setting.models))

    @property
    def _is_enough(self) -> bool:
        is_struck = min(self.faults.counts.values()) >= self._least
        return self.ledger.asked >= self._requests and is_struck

    async def _ask_on(self, client: AsyncClient, model: str, dice: random.Random) -> None:
        cases = [case for case in self._truth if case[0] == model]
        while not self._is_enough:
            await self._ask(client, dice.choice(cases), dice)

    async def _ask(self, client: AsyncClient, case: Case, dice: random.Random) -> None:
        right, got = self._truth[case], []
        cancel_at = dice.randrange(len(right)) if dice.random() < CANCELLED else None
        self.ledger.ask()
        stream = client.generate(
            case[0],
            **parameters(case, self._setting.tokens),
            # No two requests are the same one, whose crashes would count together.
            stop=[f"\x00{next(self._numbers)}"],
            resume=self._resume,
        )
        try:
            async for delta in stream:
                got += delta.token_ids
                if cancel_at is not None and len(got) > cancel_at:
                    stream.cancel()
            if stream.result.finish_reason is FinishReason.CANCELLED:
                self.ledger.cancelled(got, right, stream.result.resumed)
            else:
                self.ledger.finished(got, right, stream.result.resumed)
        except RequestError as error:
            sent = error.detail.get("tokens_sent")
            self.ledger.failed(error.code.value, got, right, sent)
        except ConnectionLost as error:
            self.ledger.lost(error.message)

    async def _tell_progress(self, start_s: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)  # the beat of what people see, no wait for anything
            took_s, asked = time.monotonic() - start_s, self.ledger.asked
            counts = self.faults.counts.values()
            self._tell(
                f"{took_s:.1f} s: {asked} of {self._requests} requests, {asked / took_s:.0f}/s,"
                f" {sum(counts)} faults, at least {min(counts)} of each,"
                f" {len(self.ledger.violations)} violations"
            )

    def report(self) -> str:
        """The figures."""
        ends = ", ".join(f"{count} {end}" for end, count in self.ledger.ends.most_common())
        faults = ", ".join(f"{n} {kind}" for kind, n in sorted(self.faults.counts.items()))
        poisons = ", ".join(f"{n} {end}" for end, n in self.ledger.poison_ends.most_common())
        lines = [
            f"chaos ({self._setting.where}): {self.ledger.asked} requests in {self.took_s:.0f} s:"
            f" {ends}; {self.ledger.resumed} resumes; faults: {faults}"
            + (f"; the poisoned: {poisons}" if poisons else "")
            + "; 0 violations: the ledger reconciles"
        ]
        for kind, times_s in sorted(self.faults.recovery_s.items()):
            lines.append(
                f"{kind} to READY: median {statistics.median(times_s):.2f} s,"
                f" longest {max(times_s):.2f} s of {len(times_s)}"
            )
        return "\n".join(lines)


def run_chaos(
    setting: Setting,
    requests: int,
    seed: int,
    *,
    resume: bool = True,
    tell: Callable[[str], object] = lambda line: None,
) -> str:
    """Runs it and returns the figures.

    Raises:
        AssertionError: the ledger does not reconcile.
    """
    with Daemon(dict(setting.models), SUPERVISOR) as daemon:
        chaos = Chaos(daemon, setting, requests, seed, resume=resume, tell=tell)
        asyncio.run(chaos.run())
        problems = chaos.ledger.reconcile()
        assert not problems, problems[:20]
    return chaos.report()
