"""Ranks divide a model, and the trial of a group refuses wrong results; one rank, real sums."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest
from mlx_lm.models import llama
from mlx_lm.utils import _get_classes, load_model

from mlxsup.worker.engine import (
    BadLaunchError,
    BadModelError,
    DivergedError,
    NoDeviceError,
    Rank,
)
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.known_answer import check_layer
from mlxsup.worker.engines.mlx.ranks import choose_backend, join, take_share
from mlxsup.worker.engines.opening import prepare

from support.model_types.build import make_model
from support.model_types.listed import MODEL_TYPES, UNLOADABLE, model_file
from support.worker.mlx_rows import make_spec

pytestmark = pytest.mark.mlx

TOKENS = 1400

NOT_TRIED = {*UNLOADABLE, "prism_hadamard_qwen35"}
"""The last one has signs beside its quantised weights, which mlx-lm cannot divide."""


def try_layer(folder: Path, count: int = TOKENS) -> None:
    """Try the first layer of the model in a folder."""
    (share, _), (whole, _) = load_model(folder, lazy=True), load_model(folder, lazy=True)
    share.shard(mx.distributed.init())
    check_layer(share, whole, mx.arange(count) * 7 % 500, lambda: None)


WRONG: dict[str, Callable[[list[mx.array]], mx.array]] = {
    "long messages": lambda sums: sums[-1] * (0.0 if sums[-1].shape[1] > 512 else 1.0),
    "one of three ranks": lambda sums: sums[-1] * 0.7,
    "after five messages": lambda sums: sums[-1] * (0.7 if len(sums) > 5 else 1.0),
    "not a number": lambda sums: sums[-1] * (float("nan") if len(sums) > 5 else 1.0),
}
"""Functions that make the latest of the sums so far wrong, in the same way in all ranks."""


@pytest.mark.parametrize("way", WRONG)
def test_wrong_sums_are_noticed_though_all_ranks_have_the_same(
    way: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_sum = mx.distributed.all_sum
    sums: list[mx.array] = []

    def wrong_sum(array: mx.array, **named: Any) -> mx.array:
        sums.append(all_sum(array, **named))
        return WRONG[way](sums)

    monkeypatch.setattr(mx.distributed, "all_sum", wrong_sum)
    with pytest.raises(DivergedError, match="the hosts compute layer 1 together otherwise"):
        try_layer(tiny)


def test_attention_sees_few_shapes_because_each_is_planned_for_a_second(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    attend = llama.scaled_dot_product_attention

    def noted(queries: mx.array, keys: mx.array, *others: Any, **named: Any) -> Any:
        shapes.append((queries.shape[2], keys.shape[2]))
        return attend(queries, keys, *others, **named)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", noted)
    try_layer(tiny, 6000)
    assert len(set(shapes)) <= 4  # the three sizes, and what is left at the end


DIVIDED = {
    model_file(one.config): one.name
    for one in MODEL_TYPES
    if one.name not in NOT_TRIED and hasattr(_get_classes(dict(one.config))[0], "shard")
}
"""A model for each file of mlx-lm that can be divided."""


@pytest.mark.parametrize("name", DIVIDED.values())
def test_every_type_that_hosts_can_divide_passes(name: str, tmp_path: Path) -> None:
    try_layer(make_model(tmp_path / "model", name), 300)


def shared(folder: Path, parallel: str, ranks: int = 1, backend: str = "ring") -> str:
    """Return how so many ranks divide the model in a folder."""
    model, _ = load_model(folder, lazy=True)
    group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    checked = check_folder(folder, lambda share: None)
    return take_share(model, checked, group, parallel=parallel, backend=backend)


def test_a_model_is_a_pipeline_if_its_type_can_be_one(tiny: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "qwen2")
    assert shared(other, "auto") == "pipeline"
    with pytest.raises(BadLaunchError, match=r"config\.json: .* use another number of hosts"):
        shared(other, "auto", ranks=99)
    with pytest.raises(BadLaunchError, match=r'99 hosts cannot divide; .* parallel = "pipeline"'):
        shared(other, "tensor", ranks=99)
    with pytest.raises(BadLaunchError, match=r"is 4, which 3 hosts .* another number of hosts$"):
        shared(tiny, "auto", ranks=3)
    with pytest.raises(BadModelError, match=r'llama cannot be divided by pipeline; .* "tensor"'):
        shared(tiny, "pipeline")
    with pytest.raises(BadModelError, match=r'bailing.* by tensor; set parallel = "pipeline"$'):
        shared(make_model(tmp_path / "pipeline", "bailing_hybrid"), "auto", backend="nccl")
    assert shared(make_model(tmp_path / "both", "qwen2"), "auto", backend="nccl") == "tensor"
    with pytest.raises(BadModelError, match=r"mamba cannot be divided; remove hosts"):
        shared(make_model(tmp_path / "neither", "mamba"), "auto")


def test_ranks_meet_through_nccl_on_the_private_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's build for CUDA reads these variables; without the
    interface NCCL takes another link."""
    joined: list[str] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(mx.distributed, "is_available", lambda backend: True)
    monkeypatch.setattr(mx.distributed, "init", lambda *, strict, backend: joined.append(backend))
    backend = choose_backend("auto")
    join(Rank(number=1, addresses=("10.9.9.9:7001", "127.0.0.1:7002"), backend=backend))
    assert joined == ["nccl"]
    name = os.environ.pop("NCCL_SOCKET_IFNAME")
    assert name.startswith("=")
    assert name[1:] in psutil.net_if_addrs()
    assert os.environ == {
        "MLX_RANK": "1", "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "10.9.9.9", "NCCL_PORT": "7001",
        "MLX_USE_CUDA_GRAPHS": "0",
    }  # fmt: skip
    assert choose_backend("pipeline") == "ring"  # which NCCL cannot be


@pytest.mark.parametrize(
    ("shown", "gpu", "taken"), [("", 1, "1"), ("2,3", 0, "2"), ("2,3", 1, "3")]
)
def test_a_rank_takes_its_place_among_the_gpus_that_cuda_shows(
    shown: str, gpu: int, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_VISIBLE_DEVICES": shown})
    prepare(make_spec(tmp_path), gpu=gpu)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken
    with pytest.raises(NoDeviceError, match=r"names 1 of this machine's GPUs, but 2 of its"):
        prepare(make_spec(tmp_path), gpu=1)
