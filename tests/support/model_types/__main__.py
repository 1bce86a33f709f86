"""`make models`: tries every model type and writes their tables to build/models.md.

`python -m support.model_types NAME …` tries these alone, and writes nothing.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import MODEL_REMAPPING

from mlxsup.worker.engines.mlx.quirks import KNOWN_FAULTS, Remedy

from .faults import BATCH_FAULTS, LOAD_FAULTS
from .listed import model_types
from .scenarios import SCENARIOS, Kind, Result, Verdict, try_model_type

TABLES = Path(__file__).parents[3] / "build" / "models.md"

CACHE_NAMES = {
    "KV": "key-value",
    "RotatingKV": "window",
    "Arrays": "state",
    "ChunkedKV": "chunked window",
    "Layer": "its own",
}


def main(names: list[str]) -> int:
    """Print a line for each model type; return 1 if an answer was wrong."""
    results: list[Result] = []
    for model_type in model_types(names):
        started = time.monotonic()
        results.append(try_model_type(model_type))
        seconds = f"{time.monotonic() - started:.1f} s"
        print(_line([*_cells(results[-1]), results[-1].load, seconds]), flush=True)
    if not names:
        write_tables(results)
    wrong = [result.name for result in results if result.load == "ok" and not result.is_right]
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


def write_tables(results: Sequence[Result]) -> None:
    """Write build/models.md."""
    device = "MLX's CPU build" if mx.default_device().type == mx.cpu else "a GPU"
    made_with = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "transformers"))
    others = (f"`{name}` as `{file}`" for name, file in sorted(MODEL_REMAPPING.items()))
    parts = (
        f"Made with {made_with}, on {device} ({platform.machine()}), in float32.",
        _table(
            ["model type", "caches", "loads", "rows", *SCENARIOS],
            [_cells(result) for result in sorted(results, key=lambda r: r.name.lower())],
        ),
        _table(["model type", "how its rows run", "cause in mlx-lm"], _exceptions(results)),
        ", ".join(others) + ".",
    )
    TABLES.parent.mkdir(exist_ok=True)
    TABLES.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(_line(row) for row in (headings, ["---"] * len(headings), *rows))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(result: Result) -> list[str]:
    # What a list of caches holds says enough of it.
    kinds = [CACHE_NAMES.get(k, k) for k in result.caches.split(", ") if k != "CacheList"]
    loads = "yes" if result.load == "ok" else "**no**"
    rows = result.batching.value.replace("_", " ") if result.batching else "–"
    verdicts = [_cell(result.verdicts.get(name)) for name in SCENARIOS]
    return [f"`{result.name}`", " + ".join(kinds) or "–", loads, rows, *verdicts]


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "–"
    if not verdict.is_right:
        return "**raises**" if verdict.kind is Kind.RAISED else "**wrong**"
    is_rounded = verdict.kind is Kind.ROUNDING
    text = f"{verdict.difference:.0e}".replace("e-0", "e-") if is_rounded else "bits"
    known = "/".join(str(count) for count in verdict.cached)
    return f"{text}, {known}" if known else text


def _exceptions(results: Sequence[Result]) -> list[list[str]]:
    """What differs from a plain model, and why."""
    found = {result.name: result for result in results}
    rows = []
    for fault in (*BATCH_FAULTS, *LOAD_FAULTS):
        here = [found[name] for name in fault.rows if name in found]
        if fault in BATCH_FAULTS:
            ways = ", ".join(sorted({str(one.batching).replace("_", " ") for one in here}))
        elif any(one.load != "ok" for one in here):
            ways = "not at all"
        else:
            continue
        names = ", ".join(f"`{name}`" for name in fault.rows)
        rows.append([names, ways, f"`mlx_lm/{fault.place}`, `{fault.symbol}`: {fault.cause}"])
    for known in KNOWN_FAULTS:
        way = "refused" if known.remedy is Remedy.REFUSE else "corrected"
        cause = f"`mlx_lm/models/{known.file}:{known.line}`, `{known.symbol}`: {known.what}"
        rows.append([f"`{known.model_type}`", way, cause])
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
