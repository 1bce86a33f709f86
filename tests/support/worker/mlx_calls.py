"""Every call of MLX in this process, with its thread.

`python -m support.worker.mlx_calls` makes them in a new process, in which nothing has been traced
or compiled before.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.worker.loop_driver import LoopDriver
from support.worker.mlx_rows import make_spec

BATCHES = (GenerationBatch, PromptProcessingBatch)
PARTS = (mx, mx.random, mx.fast, *BATCHES)
"""Whose functions do the work."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7},
    "with log-probabilities": {"logprobs": True, "top_logprobs": 3},
    "penalised": {"repetition_penalty": 1.2, "logit_bias": {"300": 2.0}},
}
"""Parameters of requests."""


PROMPT_TOKENS = 12


class Calls:
    """The calls since `watch`.

    Attributes:
        names: in order.
        threads: which thread called what.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: dict[int, set[str]] = {}

    def watch(self, replace: Callable[[Any, str, Any], None] = setattr) -> None:
        """From now on.

        Args:
            replace: sets an attribute: `monkeypatch.setattr`, to have it undone.
        """
        for part in PARTS:
            for name in dir(part):
                is_part = not name.startswith("_") or (part in BATCHES and name == "__init__")
                function = getattr(part, name)
                is_plain = callable(function) and not isinstance(function, type)
                if is_part and is_plain and name != "empty":  # a class method
                    replace(part, name, self._watched(name, function))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.names.append(name)
            self.threads.setdefault(threading.get_ident(), set()).add(name)
            return function(*arguments, **named)

        return watched


def calls_of_requests(folder: Path, count: int) -> dict[str, list[list[str]]]:
    """Return the calls of some requests of each kind, one after the other: they share the length,
    and no token."""
    calls = Calls()
    calls.watch()
    engine = MlxEngine(make_spec(folder, max_concurrency=4))
    # So much time passes between two looks at the clock that each step looks at its memory.
    clock = itertools.count().__next__
    driver = LoopDriver(engine, engine.load(lambda phase, progress: None), clock=clock)
    made: dict[str, list[list[str]]] = {kind: [] for kind in KINDS}
    first_token = 300
    for kind, parameters in KINDS.items():
        for _ in range(count):
            calls.names = []
            prompt = list(range(first_token, first_token + PROMPT_TOKENS))
            first_token += PROMPT_TOKENS
            answer = driver.answer(prompt_tokens=prompt, max_tokens=6, **parameters)
            assert len(answer.tokens) == 6, answer
            made[kind].append(list(calls.names))
    driver.close()
    engine.close()
    return made


if __name__ == "__main__":
    print(json.dumps(calls_of_requests(Path(sys.argv[1]), 3)))
