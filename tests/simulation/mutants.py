"""`python -m simulation.mutants`: plants one bug per module of the core; the simulation sees it.

Each bug is tried in an interpreter of its own, whose import of that one module reads changed text.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

CORE = "mlxsup.supervisor.core."
MOST_SEEDS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug.

    Attributes:
        module: where.
        right, wrong: the text, and what is put in its place.
    """

    module: str
    right: str
    wrong: str


def _m(module: str, right: str, wrong: str) -> Mutant:
    return Mutant(module=module, right=right, wrong=wrong)


MUTANTS = (
    _m("admission", "if life.state is State.FAILED:", "if False:"),
    _m("causes", "if exit_code == code:", "if False:"),
    _m("core", "for request in self._serving.ledger.of_connection(event.connection):",
       "for request in self._serving.ledger.of_connection(event.connection)[1:]:"),
    _m("deadlines", "while (when := self.earliest()) is not None and when <= now:",
       "while (when := self.earliest()) is not None and when < now - 1e9:"),
    _m("exits", "life.do(RunningLost(text=text, verdict=trigger.verdict))", "pass"),
    _m("fairness", "sorted([*keys, *self._again])", "sorted([*keys])"),
    _m("life", "self.phase = phase\n        self.pid = None", "self.phase = phase"),
    _m("lifecycle", "(State.BACKOFF, Due): rules_process.retry",
       "(State.BACKOFF, Due): rules_process.nothing"),
    _m("loading", "if not is_any_loading and not turns:", "if not turns:"),
    _m("model", "len(self.running) + len(self.leaving) < self.row_limit",
       "len(self.running) < self.row_limit"),
    _m("models", "self._serving.fail_queue(model, error)", "pass"),
    _m("phases", "return self.escalates_at", "return None"),
    _m("recovery", "suspect.is_on_probation = True", "suspect.is_on_probation = False"),
    _m("refusals", '"cause": text, "tokens_sent": tokens_sent}',
       '"cause": text, "tokens_sent": tokens_sent + 1}'),
    _m("requests", "request.sent_tokens += tokens", "request.sent_tokens = bytearray(tokens)"),
    _m("restart", "while self._crashes[0] <= now - window_s", "while self._crashes[0] <= now"),
    _m("rules_process", "life.tell_to_end(stage)", "pass"),
    _m("rules_wanted", "life.do(QueueEnds(error=cut_off(life.name, trigger.why)))\n"
       "    life.enter(\n", "life.enter(\n"),
    _m("serving", "request.seq += 1", "request.seq += request.resumed + 1"),
    _m("turns", "return next((r for r in turns.waiting if r not in turns.due), None)",
       "return None"),
    _m("status", '"name": model.name', '"name": model.nome'),
    _m("watchdog", "return Alarm.STOPPED", "return Alarm.NONE"),
    _m("worker_events", "event.generation != model.life.generation", "False"),
)  # fmt: skip
"""`status` is read by no played client: it is looked at at the end of each run."""


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> object:
        """Never from a cache."""
        source = self.get_data(self.path).decode()
        assert source.count(self._mutant.right) >= 1, f"{self._mutant} is out of date"
        changed = source.replace(self._mutant.right, self._mutant.wrong, 1)
        return self.source_to_code(changed.encode(), self.path)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The changed module, and no other."""
        if fullname != CORE + self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._mutant)
        return spec


def first_failing_seed(mutant: Mutant, most: int) -> int | None:
    """Runs seeds with the bug in this very interpreter; call it in one of its own."""
    sys.meta_path.insert(0, _Finder(mutant))
    from .world import World

    for seed in range(1, most + 1):
        try:
            World(seed).run()
        except Exception:  # noqa: BLE001 - the bug has shown itself
            return seed
    return None


def is_caught(module: str, most: int = MOST_SEEDS) -> str:
    """Plants the bug of a module in a new interpreter; what that says."""
    command = [sys.executable, "-m", "simulation.mutants", "--plant", module, "--seeds", str(most)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    """Every bug, or with --plant one of them here."""
    parser = argparse.ArgumentParser(prog="simulation.mutants")
    parser.add_argument("--plant")
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS)
    given = parser.parse_args()
    if given.plant:
        [mutant] = [m for m in MUTANTS if m.module == given.plant]
        seed = first_failing_seed(mutant, given.seeds)
        print("" if seed is None else f"seed {seed}")
        return 1 if seed is None else 0
    missed = []
    for mutant in MUTANTS:
        caught = is_caught(mutant.module, given.seeds)
        print(f"{mutant.module}: {caught or 'NOT CAUGHT'}", flush=True)
        missed += [] if caught else [mutant.module]
    print(f"{len(MUTANTS) - len(missed)} of {len(MUTANTS)} planted bugs were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
