"""Tokens per second with drafts and without.

An edit repeats most of its prompt; a chat repeats little of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from mlxsup.protocol.body import RequestBody
from mlxsup.worker.engines.mlx.engine import MlxEngine

from .report import machine_lines
from support.worker.mlx_rows import loaded_engine, make_row

CODE = "\n".join(
    f"def area_{name}(width, height):\n    return width * height + {number}\n"
    for number, name in enumerate(("box", "door", "wall"))
)
TASKS = {
    "edit": f"Repeat this code, and rename height to depth:\n{CODE}",
    "chat": "Tell me a story about a fox, a river and an old clock.",
}
TOKENS = 48


def run(folder: Path, repeats: int, rows: tuple[int, ...] = (1, 4, 16)) -> None:
    """Print a line for each task and number of rows."""
    print("\n".join(machine_lines()))
    for count in rows:
        with (
            loaded_engine(folder, max_concurrency=16) as plain,
            loaded_engine(folder, max_concurrency=16, drafts="ngram") as drafting,
        ):
            for task, text in TASKS.items():
                print(f"{task}, {count} rows: {_compare(plain, drafting, text, count, repeats)}")


def _compare(plain: MlxEngine, drafting: MlxEngine, text: str, rows: int, repeats: int) -> str:
    rates: dict[MlxEngine, list[float]] = {plain: [], drafting: []}
    answers = {}
    read = accepted = 0
    for turn in range(repeats + 1):
        for engine, own in rates.items():
            began_at = time.perf_counter()
            answers[engine], guesses = _answer(engine, text, rows)
            if turn:  # the first one warms up
                own.append(rows * TOKENS / (time.perf_counter() - began_at))
            read, accepted = read + guesses[0], accepted + guesses[1]
    assert answers[plain] == answers[drafting], "other answers with drafts"
    off, on = (median(own) for own in rates.values())
    return (
        f"{off:.2f} tokens per second without drafts, {on:.2f} with ({on / off:.2f}); "
        f"{accepted} of {read} guesses accepted"
    )


def _answer(
    engine: MlxEngine, text: str, rows: int
) -> tuple[dict[int, list[int]], tuple[int, int]]:
    for key in range(rows):
        ids = engine.text.encode(RequestBody(prompt=f"{key}. {text}\n")).tokens
        engine.insert(make_row(key, ids, TOKENS, ignore_eos=True))
    got: dict[int, list[int]] = {key: [] for key in range(rows)}
    read = accepted = 0
    while engine.has_rows():
        result = engine.step()
        for one in (result.guessed or {}).values():
            read, accepted = read + one.read, accepted + one.accepted
        for token in result.tokens:
            got[int(token.key)].append(token.token or 0)
        engine.settle()
    return got, (read, accepted)
