"""What layers keep: by the files of a model, as its worker measures it, as mlx-lm allocates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from mlxsup.protocol.cache_cost import CHUNK_TOKENS, GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.supervisor.memory.folder import read_folder
from mlxsup.supervisor.memory.known_types import KNOWN_TYPES
from mlxsup.supervisor.memory.layout import find_layout
from mlxsup.supervisor.memory.weights import loaded_bytes
from mlxsup.worker.engines.mlx.cache_layers import measure_layers
from mlxsup.worker.engines.mlx.caches import layers_of
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.load import iterate_arrays, load_lazily
from mlxsup.worker.engines.mlx.prefill import LARGEST_CHUNK
from mlxsup.worker.engines.mlx.prefix_size import row_after_one_token

from support.mlx_rows import loaded_engine
from support.model_types.build import make_model
from support.model_types.listed import MODEL_TYPES, model_file, model_types
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

QUICK = [
    "llama",  # keys and values
    "llama_sliding",  # a window
    "gemma3_text",
    "gemma4_text",  # layers that share keys
    "deepseek_v3",  # compressed
    "deepseek_v32",  # and an indexer
    "qwen3_next",  # a state
    "falcon_h1",  # a state and keys in each layer
    "mamba",
    "nanbeige",  # layers that run twice
]
UNKNOWN = {"deepseek_v41", "llama4", "longcat_flash_ngram"}
"""Types that the estimate does not know: counted as full attention, and marked."""

UNBUILT = {"bitnet", "gear", "muse_spark", "phi3small"}
"""Types whose caches cannot be looked at here: MLX or mlx-lm cannot compute them on a CPU, or they
are refused. The estimate does not know them."""


def load(tmp_path: Path, name: str) -> tuple[Path, Any]:
    """A tiny model of a type: its folder, and the model as mlx-lm makes it."""
    (model_type,) = model_types([name])
    folder = make_model(tmp_path / name, model_type)
    return folder, load_lazily(check_folder(folder, lambda share: None))[0]


def total(layers: Sequence[CacheLayers], tokens: int) -> int:
    """The least that a row of that many tokens takes, in bytes."""
    return sum(
        part.layers * (part.row_bytes + part.token_bytes * min(tokens, part.window or tokens))
        for part in layers
    )


def check_layout(tmp_path: Path, name: str) -> None:
    folder, model = load(tmp_path, name)
    files = read_folder(folder)
    estimate = find_layout(files.text_config, files.tensors)
    measured = measure_layers(row_after_one_token(model))
    assert bool(estimate.remark) == (name in UNKNOWN), estimate.remark
    if name in UNKNOWN:
        return
    assert describe(estimate.layers) == describe(measured)


def describe(layers: Sequence[CacheLayers]) -> list[tuple[int, int, int, int]]:
    """Groups in one order; what takes nothing is left out."""
    return sorted(
        (part.token_bytes, part.row_bytes, part.window or 0, part.layers)
        for part in layers
        if part.token_bytes or part.row_bytes
    )


@pytest.mark.parametrize("name", QUICK)
def test_the_files_say_what_the_caches_keep(tmp_path: Path, name: str) -> None:
    check_layout(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [one.name for one in MODEL_TYPES if one.name not in {*QUICK, *UNBUILT}]
)
def test_the_files_of_every_type_say_what_the_caches_keep(tmp_path: Path, name: str) -> None:
    check_layout(tmp_path, name)


def test_whatever_the_estimate_knows_was_compared() -> None:
    compared = {model_file(one.config) for one in MODEL_TYPES if one.name not in UNKNOWN | UNBUILT}
    known = {model_file({"model_type": name}) for name in KNOWN_TYPES}
    # The last one is known by the model type that it shares with another architecture.
    assert known == compared - {"bailing_moe_v3"}


# ---------------------------------------------------------------- what mlx-lm allocates


@pytest.mark.parametrize("name", QUICK)
def test_a_batch_takes_no_more_than_estimated_and_not_much_less(tmp_path: Path, name: str) -> None:
    _, model = load(tmp_path, name)
    layers = measure_layers(row_after_one_token(model))
    for lengths in ([5], [40, 7], [300, 20, 100], [257]):
        rows = [read(model, length) for length in lengths]
        batch = [kept[0].merge(list(kept)) for kept in zip(*rows, strict=True)]
        for held in (sum(map(bytes_of, rows)), bytes_of(batch)):
            assert held <= cache_bytes(layers, rows=len(lengths), longest=max(lengths))
        assert bytes_of(batch) >= total(layers, min(lengths)) * len(lengths)


def read(model: Any, length: int) -> list[Any]:
    """The caches of a row that has read a prompt of so many tokens in pieces, and decoded one."""
    caches: list[Any] = make_prompt_cache(model)
    tokens = [number % 50 + 1 for number in range(length)]
    *head, last = tokens
    pieces = [head[begin : begin + 64] for begin in range(0, len(head), 64)]
    for piece in [*pieces, [last]]:
        mx.eval(model(mx.array([piece]), cache=caches))
    return caches


def bytes_of(caches: Sequence[Any]) -> int:
    return sum(int(layer.nbytes) for layer in layers_of(caches) if not layer.empty())


def test_the_estimate_goes_by_the_steps_of_mlx_lm_and_the_chunks_of_the_engine() -> None:
    assert (KVCache.step, BatchKVCache.step) == (GROWTH_TOKENS, GROWTH_TOKENS)
    assert LARGEST_CHUNK == CHUNK_TOKENS


def test_growing_needs_the_largest_layer_twice(tmp_path: Path) -> None:
    """While a cache grows by a step, MLX holds old and new arrays of one layer, not of all."""
    (llama,) = model_types(["llama"])
    deep = replace(llama, config=llama.config | {"num_hidden_layers": 8})
    folder = make_model(tmp_path / "deep", deep)
    model = load_lazily(check_folder(folder, lambda share: None))[0]
    layers = measure_layers(row_after_one_token(model))
    rows = [read(model, 512) for _ in range(8)]
    batch = [kept[0].merge(list(kept)) for kept in zip(*rows, strict=True)]
    mx.eval([(layer.keys, layer.values) for layer in batch])
    del rows
    held = bytes_of(batch)
    growing = taken_by_a_step(model, batch)
    assert bytes_of(batch) == held * 768 // 512
    computing = taken_by_a_step(model, batch)
    assert bytes_of(batch) == held * 768 // 512
    assert held + growing <= cache_bytes(layers, rows=8, longest=512) + computing


def taken_by_a_step(model: Any, batch: list[Any]) -> int:
    """The most memory that a step of eight rows takes besides what is there."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(model(mx.array([[1]] * 8), cache=batch))
    return int(mx.get_peak_memory()) - int(before)


# ---------------------------------------------------------------- what a worker reports


def test_the_weights_of_a_tiny_model_are_those_of_its_file(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    files = read_folder(folder)
    with loaded_engine(folder) as engine:
        arrays = sum(int(array.nbytes) for array in iterate_arrays(engine.model))
        assert loaded_bytes(files.tensors) <= arrays <= loaded_bytes(files.tensors) + 4096
        assert list(engine.facts.cache_layers) == list(
            find_layout(files.text_config, files.tensors).layers
        )
