"""Tokens per second with drafts and without.

The model is one that copies, which a small one with real weights hardly does, so an edit shows what
drafts gain on this machine. Nothing that is drawn at random repeats itself, and the draft model for
it is another one: what drafts take where they gain nothing.
"""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.engine import MlxEngine

from .copying_model import make_copying_model
from .report import order_in_round, print_table, spread
from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import loaded_engine, make_row

TOKENS = 96
MOST_TOKENS = 512
"""Of all rows together: those of many rows have shorter answers."""

FIRST_ID = 300
LIST = 120
"""Tokens of a prompt, all different."""

EVERY = 20
"""Of so many tokens of an edit one is renamed, of which a draft model does not know."""

TASKS: dict[str, dict[str, Any]] = {"edit": {}, "free text": {"temperature": 1000.0}}


class Run(NamedTuple):
    """The time that a token of each row takes while all of them decode, and the guesses read and
    accepted then.

    Prompts are read in more steps in one run than in the next, so rows have got different numbers
    of tokens when the last one begins: whole answers would compare unequal work.
    """

    wall_s: float
    cpu_s: float
    read: int
    accepted: int


def run(repeats: int, rows: tuple[int, ...] = (1, 4, 16)) -> None:
    """Print a line for each task, number of rows and way to guess."""
    ids = range(FIRST_ID, FIRST_ID + 1000)
    numbers = random.Random(1)
    lists = [numbers.sample(ids, LIST) for _ in range(max(rows))]
    renamed = dict(zip(ids[::EVERY], range(1500, 2000), strict=False))
    table = []
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        model = make_copying_model(Path(parent) / "model", renamed, layers=6, hidden=512)
        draft = make_copying_model(Path(parent) / "draft", {}, layers=2, hidden=256)
        # Without a preference it would draw as the model does: by chance, and with the same keys.
        other = make_tiny_model(Path(parent) / "other")
        weights: Any = mx.load(str(other / "model.safetensors"))
        weights["lm_head.weight"] *= 10_000
        mx.save_safetensors(str(other / "model.safetensors"), weights, {"format": "mlx"})
        drafts = {"off": "off", "ngram": "ngram", "draft": str(draft), "bad draft": str(other)}
        engines = {
            side: stack.enter_context(loaded_engine(model, max_concurrency=16, drafts=given))
            for side, given in drafts.items()
        }
        for count in rows:
            for task, changes in TASKS.items():
                tokens = min(TOKENS, MOST_TOKENS // count)
                asked = [
                    make_row(key, [*own, own[0]], tokens, ignore_eos=True, seed=key, **changes)
                    for key, own in enumerate(lists[:count])
                ]
                sides = ("off", "ngram", "draft" if task == "edit" else "bad draft")
                runs = _compare({side: engines[side] for side in sides}, asked, repeats)
                table += [[task, str(count), *line] for line in runs]
    head = ("task", "rows", "drafts", "speed over off: processor time", "clock", "accepted")
    print_table(head, table)


def _compare(engines: dict[str, MlxEngine], rows: list[Row], repeats: int) -> list[list[str]]:
    """Return a line for each side but the first, which the others are compared with."""
    runs: dict[str, list[Run]] = {side: [] for side in engines}
    answers = {}
    for repeat in range(repeats + 1):
        for side in order_in_round(list(engines), repeat):
            answers[side], own = _answer(engines[side], rows)
            if repeat:  # the first round warms up, and measures what guesses take
                runs[side].append(own)
        assert len({str(answer) for answer in answers.values()}) == 1, "other answers with drafts"
    plain, *others = runs
    return [
        [
            side,
            spread([off.cpu_s / on.cpu_s for off, on in zip(runs[plain], runs[side], strict=True)]),
            spread(
                [off.wall_s / on.wall_s for off, on in zip(runs[plain], runs[side], strict=True)]
            ),
            f"{runs[side][-1].accepted} of {runs[side][-1].read}",
        ]
        for side in others
    ]


def _answer(engine: MlxEngine, rows: list[Row]) -> tuple[dict[int, list[int]], Run]:
    for row in rows:
        engine.insert(row)
    got: dict[int, list[int]] = {int(row.key): [] for row in rows}
    read = accepted = 0

    def step() -> int:
        """Return how many tokens came."""
        nonlocal read, accepted
        result = engine.step()
        for one in (result.guessed or {}).values():
            read, accepted = read + one.read, accepted + one.accepted
        for token in result.tokens:
            got[int(token.key)].append(token.token or 0)
        engine.settle()
        return len(result.tokens)

    while not all(got.values()):  # prompts are read
        step()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    tokens = read = accepted = 0
    while engine.row_count() == len(rows):
        tokens += step()
    share = len(rows) / tokens
    run = Run(
        (time.perf_counter() - wall_s) * share,
        (time.process_time() - cpu_s) * share,
        read,
        accepted,
    )
    while engine.row_count():
        step()
    return got, run
