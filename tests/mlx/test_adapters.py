"""LoRA adapters: rows of one batch have different ones, and each has its answer of alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_model, quantize_model, save_model

from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import Row, RowToken

from support.model_types.build import make_model
from support.models.adapters import make_adapter
from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import (
    check_no_row_is_left,
    known_as,
    loaded_engine,
    make_row,
    run_rows,
)

pytestmark = pytest.mark.mlx

PROMPT = [(7 * n + n // 13) % 250 for n in range(40)]
BYTES = 64 << 20


def quantized(folder: Path) -> Path:
    """Return a folder with the same model in 4 bits."""
    model, config = load_model(folder)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BASES: dict[str, Callable[[Path], Path]] = {
    "llama": make_tiny_model,
    "llama 4 bit": lambda parent: quantized(make_tiny_model(parent)),
    "qwen3": lambda parent: make_model(parent, "qwen3"),
    "mixtral": lambda parent: make_model(parent, "mixtral"),
}


@pytest.fixture(scope="module", params=list(BASES))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BASES[request.param](tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    parent = tmp_path_factory.mktemp("adapters")
    one = make_adapter(parent / "one", base, seed=1, rank=2)
    two = make_adapter(parent / "two", base, seed=2, rank=4, layers=("q_proj", "o_proj"))
    return {"one": str(one), "two": str(two)}


def rows_of(**changes: Any) -> list[Row]:
    """Two bare rows, and one with each adapter; no prompt is as long as another."""
    names = ["", "one", "", "two"]
    return [
        make_row(n, PROMPT[: 40 - 3 * n], adapter=name, top_logprobs=3, **changes)
        for n, name in enumerate(names)
    ]


def shown(got: list[RowToken]) -> list[tuple[int | None, Any]]:
    return [(one.token, one.logprobs) for one in got]


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("way", [Batching.TOGETHER, Batching.SERIAL_PREFILL, Batching.ONE_ROW])
def test_rows_with_adapters_have_the_bits_of_each_alone(
    base: Path, adapters: dict[str, str], way: Batching, changes: dict[str, Any]
) -> None:
    known = known_as(base, way)
    with loaded_engine(base, adapters=adapters, known_batching=known) as engine:
        assert engine.facts.batching is way
        alone = [shown(run_rows(engine, [row])[row.key]) for row in rows_of(**changes)]
        together = run_rows(engine, rows_of(**changes))
        check_no_row_is_left(engine)
    assert [shown(together[n]) for n in range(4)] == alone
    with loaded_engine(base, known_batching=known) as engine:
        bare = [replace(row, adapter="") for row in rows_of(**changes)]
        without = [shown(run_rows(engine, [row])[row.key]) for row in bare]
    for n in range(4):
        assert (without[n] == alone[n]) is (n in (0, 2)), n
