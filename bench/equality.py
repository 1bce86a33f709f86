"""How often an answer is bit for bit the same, through the loop of a real worker process.

Asked twice alone, in a batch of eight, resumed at some token of it (F10), and paused there with
its state kept. On a CPU all of them are the same, which tests prove; on a GPU kernels of other
shapes round differently, and a state that was kept need not be computed again.

`python -m bench.equality FOLDER…` measures these model folders.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import RowState
from mlxsup.protocol.worker_messages import Dispatch, PauseRow, Resume, Step

from .report import machine_lines, print_table
from support.worker_harness import Stream, WorkerHarness

PROMPTS = 200
TOKENS = 48
BATCH = 8
TWICE, TOGETHER = "alone twice", f"alone and in a batch of {BATCH}"
RESUMED, PAUSED = "alone and resumed", "alone and paused, state kept"
WAYS = (TWICE, TOGETHER, RESUMED, PAUSED)
SAMPLINGS: tuple[dict[str, float], ...] = ({}, {"temperature": 0.8})
SUBJECTS = ("a fox", "the moon", "rice", "a bridge", "winter", "glass", "a clock", "salt", "Rome")
QUESTIONS = (
    "What is {subject}?",
    "Write two sentences about {subject}.",
    "Why would somebody paint {subject}?",
    "Tell a child about {subject}.",
)


class Rates:
    """Counts equal answers of one model.

    Args:
        worker: ready; answers up to BATCH requests at once.
        prompts: how many.
    """

    def __init__(self, worker: WorkerHarness, prompts: int = PROMPTS) -> None:
        self._worker = worker
        self._prompts = prompts

    def equal(self, sampling: Mapping[str, float]) -> dict[str, int]:
        """How many answers are the same as alone, by what was done to them."""
        asked = [question(n) | dict(sampling) for n in range(self._prompts)]
        alone = [self._answers([one])[0] for one in asked]
        again = [self._answers([one])[0] for one in asked]
        batched: list[Stream] = []
        for start in range(0, self._prompts, BATCH):
            batched += self._answers(asked[start : start + BATCH])
        resumed = [self._resumed(whole, n) for n, whole in enumerate(alone)]
        paused = [self._paused(one, n) for n, one in enumerate(asked)]
        tokens = [whole.tokens for whole in alone]
        others = ([one.tokens for one in again], [one.tokens for one in batched], resumed, paused)
        counts = [sum(map(list.__eq__, tokens, other)) for other in others]
        return dict(zip(WAYS, counts, strict=True))

    def row(self, name: str, sampling: Mapping[str, float]) -> list[str]:
        """One line of the table."""
        how = ", ".join(f"{key} {value:g}" for key, value in sampling.items()) or "greedy"
        counts = self.equal(sampling).values()
        return [f"{name}, {how}", *(f"{count} of {self._prompts}" for count in counts)]

    def _answers(self, asked: list[dict[str, Any]]) -> list[Stream]:
        """What these give together."""
        keys = [self._worker.dispatch(**one) for one in asked]
        answers = self._worker.finish(*keys, timeout_s=600)
        assert all(answer.error is None for answer in answers), answers
        return answers

    def _resumed(self, whole: Stream, number: int) -> list[int]:
        """The tokens of an answer that was interrupted once and resumed, alone."""
        delivered = whole.tokens[: _place(number, len(whole.tokens))]
        assert whole.acceptance is not None
        resume = Resume(acceptance=whole.acceptance, delivered=pack_tokens(delivered))
        (rest,) = self._worker.finish(self._worker.dispatch(resume=resume), timeout_s=600)
        assert rest.error is None, rest.error
        return delivered + rest.tokens

    def _paused(self, asked: Mapping[str, Any], number: int) -> list[int]:
        """The tokens of an answer that was paused once, alone, with its state kept."""
        worker = self._worker
        key = worker.dispatch(**asked)
        stream = worker.streams[key]
        while len(stream.tokens) < _place(number, TOKENS) and not stream.is_over:
            worker.receive(timeout_s=600)
        worker.send(PauseRow(key=RequestKey(key), keep=True))
        state = None
        while state is None and not stream.is_over:
            message = worker.receive(timeout_s=600)
            rows = message.rows if isinstance(message, Step) else []
            state = next((row.paused for row in rows if row.paused is not None), None)
        if stream.is_over:
            return stream.tokens
        assert state is RowState.KEPT, state
        assert stream.acceptance is not None
        resume = Resume(acceptance=stream.acceptance, delivered=pack_tokens(stream.tokens))
        del worker.streams[key]  # the harness expects one acceptance of each
        worker.send(Dispatch(key=RequestKey(key), resume=resume, body=b""))
        (rest,) = worker.finish(key, timeout_s=600)
        assert rest.error is None, rest.error
        return stream.tokens + rest.tokens


def _place(number: int, length: int) -> int:
    """After how many tokens an answer of that length is interrupted; another for each number."""
    return 1 + number % max(1, length - 1)


def question(number: int) -> dict[str, Any]:
    """A different request for each number; the same each time."""
    ask = QUESTIONS[number % len(QUESTIONS)].format(subject=SUBJECTS[number % len(SUBJECTS)])
    return {
        "messages": [{"role": "user", "content": f"{ask} ({number})"}],
        "max_tokens": TOKENS,
        "seed": number,
    }


def print_equality(
    folders: Mapping[str, Path], backend: str = "CUDA", prompts: int = PROMPTS
) -> None:
    """Measures every model and prints the table."""
    rows = []
    for name, folder in folders.items():
        with WorkerHarness(
            engine="mlx", path=str(folder), max_concurrency=BATCH, step_timeout_s=120.0
        ) as worker:
            worker.wait_until_ready(timeout_s=600)
            rates = Rates(worker, prompts)
            rows += [rates.row(name, sampling) for sampling in SAMPLINGS]
    print(f"## The same answer of {TOKENS} tokens ({backend})\n")
    print_table(["model", *WAYS], rows)


def main() -> None:
    """Measures the folders given."""
    parser = argparse.ArgumentParser(prog="python -m bench.equality", description=__doc__)
    parser.add_argument("folder", nargs="+", type=Path, help="a model folder")
    parser.add_argument("--backend", default="CUDA", help="what the table says; CUDA")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of each kind; 200")
    given = parser.parse_args()
    print("\n".join(machine_lines()) + "\n", flush=True)
    print_equality({one.name: one for one in given.folder}, given.backend, given.prompts)


if __name__ == "__main__":
    main()
