"""`python -m chaos [--requests N] [--seed N] [--without-resume]`: the ledger must reconcile."""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from mlxsup.client import Client, RequestError
from support.daemon import Daemon, fake, row, wait_for_state

from .ledger import Ledger

MODELS = ("a", "b")
PROMPTS = 24
TOKENS = 60
THREADS = 12
PAUSE_S = 0.4
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGSTOP")


class Chaos:
    """One run against one daemon with the fake engine.

    Args:
        requests: how many are asked.
        seed: of the faults and of the mix.
        resume: whether answers shall outlive their workers.
    """

    def __init__(self, daemon: Daemon, requests: int, seed: int, *, resume: bool) -> None:
        self._daemon, self._requests, self._seed, self._resume = daemon, requests, seed, resume
        self._ended = threading.Event()
        self._left = iter(range(requests))
        self._lock = threading.Lock()
        self.ledger = Ledger()
        self.faults: Counter[str] = Counter()
        self.recovery_s: list[float] = []

    def run(self) -> None:
        """Asks everything while faults strike."""
        with self._daemon.client() as client:
            truth = {
                (model, n): client.complete(model, prompt=f"p{n}", max_tokens=TOKENS).token_ids
                for model in MODELS
                for n in range(PROMPTS)
            }
        askers = [
            threading.Thread(target=self._ask_on, args=(truth, self._seed + n), daemon=True)
            for n in range(THREADS)
        ]
        injector = threading.Thread(target=self._inject, daemon=True)
        for thread in (*askers, injector):
            thread.start()
        for thread in askers:
            thread.join()
        self._ended.set()
        injector.join()

    def _ask_on(self, truth: dict[tuple[str, int], list[int]], seed: int) -> None:
        dice = random.Random(seed)
        with self._daemon.client() as client:
            while True:
                with self._lock:
                    if next(self._left, None) is None:
                        return
                self._ask(client, truth, dice.choice(MODELS), dice.randrange(PROMPTS))

    def _ask(
        self, client: Client, truth: dict[tuple[str, int], list[int]], model: str, number: int
    ) -> None:
        right, got = truth[model, number], []
        self.ledger.ask()
        stream = client.generate(model, prompt=f"p{number}", max_tokens=TOKENS, resume=self._resume)
        try:
            for delta in stream:
                got += delta.token_ids
            self.ledger.finished(got, right, stream.result.resumed)
        except RequestError as error:
            self.ledger.failed(error.code, got, right, error.detail.get("tokens_sent"))

    def _inject(self) -> None:
        dice = random.Random(self._seed)
        with self._daemon.client() as client:
            kinds: list[tuple[str, Callable[[str], None]]] = [
                *((name, self._signaller(client, name)) for name in SIGNALS),
                ("restart --now", lambda model: self._restart(client, model, now=True)),
                ("restart", lambda model: self._restart(client, model, now=False)),
                ("reload", lambda model: self._reload()),
            ]
            order: list[tuple[str, Callable[[str], None]]] = []
            while not self._ended.wait(dice.uniform(0.5, 1.5) * PAUSE_S):
                if not order:  # each kind once before any comes again: a minimum count of each
                    order = dice.sample(kinds, len(kinds))
                name, strike = order.pop()
                strike(dice.choice(MODELS))
                self.faults[name] += 1

    def _signaller(self, client: Client, name: str) -> Callable[[str], None]:
        def strike(model: str) -> None:
            before = row(client, model)
            if before["pid"] is None:
                return
            start_s = time.monotonic()
            try:
                os.kill(before["pid"], getattr(signal, name))
            except ProcessLookupError:
                return
            if name == "SIGKILL":
                while row(client, model)["generation"] == before["generation"]:
                    if self._ended.wait(0.01):
                        return
                wait_for_state(client, model, "READY")
                self.recovery_s.append(time.monotonic() - start_s)

        return strike

    @staticmethod
    def _restart(client: Client, model: str, *, now: bool) -> None:
        try:
            client.restart(model, now=now)
        except RequestError as error:
            if error.code != "load_failed":
                raise

    def _reload(self) -> None:
        assert self._daemon.process is not None
        self._daemon.process.send_signal(signal.SIGHUP)


def run_chaos(requests: int, seed: int, *, resume: bool = True) -> str:
    """Runs it and returns the figures.

    Raises:
        AssertionError: the ledger does not reconcile.
    """
    restart = {"max_restarts": 100_000, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}
    entry = fake(fake={"step_s": 0.001}, restart=restart, max_concurrency=4)
    with Daemon(dict.fromkeys(MODELS, entry)) as daemon:
        # What faulthandler and a failed step print is provoked here.
        daemon.allowed_words = {"Traceback", "Failed to"}
        chaos = Chaos(daemon, requests, seed, resume=resume)
        chaos.run()
        problems = chaos.ledger.reconcile()
        assert not problems, problems[:20]
    ends = ", ".join(f"{count} {end}" for end, count in chaos.ledger.ends.most_common())
    faults = ", ".join(f"{count} {name}" for name, count in sorted(chaos.faults.items()))
    recovery = "none measured"
    if chaos.recovery_s:
        recovery = (
            f"median {statistics.median(chaos.recovery_s):.2f} s,"
            f" longest {max(chaos.recovery_s):.2f} s of {len(chaos.recovery_s)}"
        )
    return (
        f"chaos (fake engine): {chaos.ledger.asked} requests: {ends};"
        f" {chaos.ledger.resumed} resumes; faults: {faults}; SIGKILL to READY: {recovery};"
        " the ledger reconciles"
    )


def main() -> int:
    """Runs it once."""
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-resume", action="store_true")
    given = parser.parse_args()
    print(run_chaos(given.requests, given.seed, resume=not given.without_resume))
    return 0


if __name__ == "__main__":
    sys.exit(main())
