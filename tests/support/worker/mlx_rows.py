"""An MLX engine as tests drive it: a spec, rows, and whole answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import Row, RowToken
from mlxsup.worker.engines.mlx import loader
from mlxsup.worker.engines.mlx.batch_modes import LoneDecode, TogetherMode
from mlxsup.worker.engines.mlx.engine import MlxEngine, model_fingerprint
from mlxsup.worker.engines.mlx.folder import check_folder

from support.core.row_values import row_values
from support.worker.loop_driver import LoopDriver
from support.worker.turn_bench import make_spec as spec_of


def make_spec(path: Path, **changes: Any) -> LaunchSpec:
    """Return the launch spec of an MLX worker that serves a folder."""
    values = {"engine": "mlx", "path": str(path), "max_concurrency": 8, "prefix_cache_bytes": 0}
    return spec_of(**(values | changes))


_found: dict[Path, dict[str, str]] = {}
"""By folder, whose fingerprint the engine compares."""


@contextmanager
def loaded_engine(
    path: Path, *, clock: Callable[[], float] = time.perf_counter, **changes: Any
) -> Iterator[MlxEngine]:
    """A loaded engine, closed at the end; as from a daemon, it is told what a load before has found
    out about its rows, which takes half of a load."""
    known = {"known_batching": _found.get(path)}
    engine = MlxEngine(make_spec(path, **(known | changes)), clock)
    facts = engine.load(lambda phase, progress: None)
    if "known_batching" not in changes:
        _found[path] = {
            "fingerprint": facts.fingerprint,
            "batching": facts.batching,
            "reason": facts.batching_reason,
        }
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def driven_engine(path: Path, rows: int = 4, **changes: Any) -> Iterator[LoopDriver]:
    """The step loop over a loaded engine, which runs so many rows."""
    with loaded_engine(path, **changes) as engine:
        driver = LoopDriver(engine, engine.facts, rows)
        try:
            yield driver
        finally:
            driver.close()


def make_row(key: int, tokens: list[int], max_tokens: int = 16, **changes: Any) -> Row:
    """A greedy row, unless told otherwise."""
    values = row_values(**{"seed": 0, **changes})
    return Row(key=RequestKey(key), tokens=tokens, max_tokens=max_tokens, **values)


def run_rows(engine: MlxEngine, rows: Iterable[Row] = ()) -> dict[int, list[RowToken]]:
    """Inserts rows and steps until none is left; what each row got, in order."""
    for row in rows:
        engine.insert(row)
    got: dict[int, list[RowToken]] = {}
    while engine.row_count():
        for token in engine.step().tokens:
            got.setdefault(int(token.key), []).append(token)
        engine.settle()
    return got


def token_ids(got: list[RowToken]) -> list[int]:
    """The ids of an answer."""
    return [token.token for token in got if token.token is not None]


def solo(engine: MlxEngine, row: Row) -> list[int]:
    """The answer of a row that is alone in the batch."""
    return token_ids(run_rows(engine, [row])[int(row.key)])


def random_state() -> list[int]:
    """MLX's global random state."""
    state: Any = mx.random.state
    return [int(number) for number in state[0].tolist()]


def known_as(path: Path, way: Batching) -> dict[str, str]:
    """Return what makes an engine of this folder run its rows in this way, unprobed."""
    versions = {name: version(name) for name in ("mlx", "mlx-lm")}
    device, _ = loader.open_stream()
    own = model_fingerprint(check_folder(path, lambda share: None), device, versions)
    return {"fingerprint": own, "batching": way, "reason": "a test says so"}


def check_no_row_is_left(engine: MlxEngine) -> None:
    """Neither in our books nor in the batches."""
    assert engine.batch is not None
    engine.settle()
    assert set(engine.batch.books()) == {0}
    passes: Any = engine.batch.mode
    assert not passes.waiting
    if isinstance(passes, TogetherMode):
        assert not passes.batches
    decode: Any = passes.decode
    if isinstance(decode, LoneDecode):
        assert (decode.rows, decode.new) == ({}, {})
        return
    assert (decode.new, decode.rows.uids, decode.rows.prompt_cache) == ({}, [], [])
    assert decode.next() == [], "a step of nothing"
