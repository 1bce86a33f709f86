"""Tables of the model types, for people."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import MODEL_REMAPPING

from mlxsup.worker.engines.mlx.known_faults import KNOWN_FAULTS, Remedy

from .faults import BATCH_FAULTS, LOAD_FAULTS, BatchFault
from .run import Result
from .verdict import Kind, Verdict

TABLES = Path(__file__).parents[3] / "build" / "models.md"

COLUMNS = {
    "alone": "alone",
    "batched": "batch",
    "late": "late join, cancel",
    "chunks": "chunks",
    "second turn": "second turn",
    "shared prefix": "shared prefix",
    "resume": "resume",
    "seeded": "seeded",
}
"""Headings by scenario, in order."""

UNLOADABLE = {
    "bitnet": "needs Metal",
    "muse_spark": "needs Metal",
    "phi3small": "refused: every answer would be wrong",
}
"""Model types that do not load on MLX's CPU build."""

UNEQUAL_ALONE = {"plamo3": "past its window mlx-lm's own answers depend on the chunks"}
"""Model types whose answers are not those of mlx-lm, even alone."""

CACHE_NAMES = {
    "KV": "key-value",
    "RotatingKV": "window",
    "Arrays": "state",
    "ChunkedKV": "chunked window",
    "Layer": "its own",
}


def render_table(results: Sequence[Result]) -> str:
    """One row for each model type."""
    headings = ["model type", "caches", "loads", "rows", *COLUMNS.values()]
    lines = [_line(headings), _line(["---"] * len(headings))]
    for result in sorted(results, key=lambda r: r.name.lower()):
        verdicts = [result.verdicts.get(name) for name in COLUMNS]
        cells = [_cell(verdict) for verdict in verdicts]
        loads = "yes" if result.load == "ok" else "**no**"
        rows = result.batching.value.replace("_", " ") if result.batching else "–"
        lines.append(_line([f"`{result.name}`", caches(result.caches), loads, rows, *cells]))
    return "\n".join(lines)


def caches(kinds: str) -> str:
    """In words; what a list of caches holds says enough of it."""
    names = [CACHE_NAMES.get(kind, kind) for kind in kinds.split(", ") if kind != "CacheList"]
    return " + ".join(names) or "–"


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "–"
    if not verdict.is_right:
        return "**raises**" if verdict.kind is Kind.RAISED else "**wrong**"
    if verdict.kind is Kind.ROUNDING:
        text = f"{verdict.difference:.0e}".replace("e-0", "e-")
    else:
        text = "bits"
    known = "/".join(str(count) for count in verdict.cached)
    return f"{text}, {known}" if known else text


def render_exceptions(results: Sequence[Result]) -> str:
    """What differs from a plain model, and why."""
    batching = {result.name: result.batching for result in results}
    loads = {result.name: result.load for result in results}
    lines = [
        _line(["model type", "how its rows run", "cause in mlx-lm"]),
        _line(["---"] * 3),
    ]
    for fault in BATCH_FAULTS:
        ways = {str(batching[name]).replace("_", " ") for name in fault.rows if name in batching}
        lines.append(_line([_names(fault), ", ".join(sorted(ways)), _cause(fault)]))
    for fault in LOAD_FAULTS:
        if any(loads.get(name, "ok") != "ok" for name in fault.rows):
            lines.append(_line([_names(fault), "not at all", _cause(fault)]))
    for known in KNOWN_FAULTS:
        way = "refused" if known.remedy is Remedy.REFUSE else "corrected"
        cause = f"`mlx_lm/models/{known.file}:{known.line}`, `{known.symbol}`: {known.what}"
        lines.append(_line([f"`{known.model_type}`", way, cause]))
    return "\n".join(lines)


def _names(fault: BatchFault) -> str:
    return ", ".join(f"`{name}`" for name in fault.rows)


def _cause(fault: BatchFault) -> str:
    return f"`mlx_lm/{fault.file}:{fault.line}`, `{fault.symbol}`: {fault.cause}"


def render_other_names() -> str:
    """Model types without their own file."""
    pairs = sorted(MODEL_REMAPPING.items())
    return ", ".join(f"`{name}` as `{file}`" for name, file in pairs) + "."


def render_versions() -> str:
    """What the table was made with."""
    versions = {name: version(name) for name in ("mlx", "mlx-lm", "transformers")}
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    device = "MLX's CPU build" if mx.default_device().type == mx.cpu else "a GPU"
    return f"Made with {listed}, on {device} ({platform.machine()}), in float32."


def write_tables(results: Sequence[Result]) -> None:
    """Write build/models.md."""
    parts = (
        render_versions(),
        render_table(results),
        render_exceptions(results),
        render_other_names(),
    )
    TABLES.parent.mkdir(exist_ok=True)
    TABLES.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
