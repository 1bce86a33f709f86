"""`make models`: tries every model type and writes their tables to build/models.md.

`python -m support.model_types NAME …` tries these alone, and writes nothing.
"""

from __future__ import annotations

import sys
import time

from .listed import model_types
from .run import Result, try_model_type
from .table import COLUMNS, write_tables


def main(names: list[str]) -> int:
    """Prints a line for each model type; 1 if an answer was wrong."""
    results: list[Result] = []
    for model_type in model_types(names):
        started = time.monotonic()
        results.append(try_model_type(model_type))
        print(f"{_line(results[-1])} | {time.monotonic() - started:.1f} s", flush=True)
    if not names:
        write_tables(results)
    wrong = [result.name for result in results if result.load == "ok" and not result.is_right]
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


def _line(result: Result) -> str:
    cells = [
        f"{name}: {verdict}{list(verdict.cached) or ''}"
        for name, verdict in ((name, result.verdicts.get(name)) for name in COLUMNS)
        if verdict is not None
    ]
    rows = f"{result.batching or ''} {result.batching_reason}".strip()
    return " | ".join([result.name, result.caches, result.load, rows, *cells])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
