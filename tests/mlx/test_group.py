"""A model over two ranks of MLX's ring: the answers of one process, whatever else happens."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.launch import ExitCode, GroupHost
from mlxsup.protocol.states import FinishReason

from support.model_types.build import make_model
from support.model_types.listed import model_types
from support.models.tiny_model import make_tiny_model
from support.worker.worker_harness import WorkerHarness

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

LOCAL = (GroupHost(), GroupHost())

FORMATION_S = 300.0
"""Two ranks import MLX and wait for each other, perhaps on a machine with two busy cores."""

GRAMMAR = {"type": "json_object"}

REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "the first of all"},
    {"prompt": "a longer one, of which one chunk is not enough: " + "na " * 400},
    {"prompt": "seeded", "temperature": 1.0, "seed": 7},
    {"prompt": "filtered", "temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 8},
    {"prompt": "penalties", "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"prompt": "biased", "logit_bias": {"300": 4.0}, "logprobs": True, "top_logprobs": 2},
    {"prompt": "constrained", "response_format": GRAMMAR, "temperature": 1.0, "seed": 9},
)


def make_folder(parallel: str, folder: Path) -> Path:
    """Make a model that can be divided in this way: llama cannot be a pipeline."""
    if parallel == "tensor":
        return make_tiny_model(folder)
    (model_type,) = model_types(["qwen2"])
    return make_model(folder, model_type)


def answers(worker: WorkerHarness, *, disturbed: bool) -> list[tuple[object, ...]]:
    """Return the tokens and ends of all requests; disturbed by another one that is cancelled."""
    worker.wait_until_ready(FORMATION_S)
    gone = worker.dispatch("cancelled", max_tokens=3000, temperature=1.0) if disturbed else 0
    keys = [worker.dispatch(**{"max_tokens": 24, **asked}) for asked in REQUESTS]
    if disturbed:
        worker.finish(keys[0], timeout_s=FORMATION_S)
        worker.cancel(gone)
        (cancelled,) = worker.finish(gone, timeout_s=FORMATION_S)
        assert cancelled.finish is FinishReason.CANCELLED
    streams = worker.finish(*keys, timeout_s=FORMATION_S)
    assert worker.ask_for_exit() == ExitCode.ASKED
    return [(stream.finish, *stream.tokens) for stream in streams]


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_two_ranks_answer_as_one_process(parallel: str, tmp_path: Path) -> None:
    path = str(make_folder(parallel, tmp_path / "model"))
    with WorkerHarness(engine="mlx", path=path) as alone:
        expected = answers(alone, disturbed=False)
    with WorkerHarness(engine="mlx", path=path, hosts=LOCAL, parallel=parallel) as group:
        assert answers(group, disturbed=True) == expected


def test_a_later_life_makes_the_same_passes_on_a_copy_of_the_folder(tmp_path: Path) -> None:
    """The times of a copy's files differ, and so its fingerprint."""
    path = make_tiny_model(tmp_path / "model")
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    os.utime(copy / "model.safetensors", (1, 1))
    hosts = (GroupHost(), GroupHost(path=str(copy)))
    options: dict[str, Any] = {"engine": "mlx", "path": str(path), "hosts": hosts}
    with WorkerHarness(**options, parallel="tensor") as group:
        ready = group.wait_until_ready(FORMATION_S)
    known = {"fingerprint": ready.fingerprint, "batching": ready.batching.value, "reason": ""}
    with WorkerHarness(**options, parallel="tensor", known_batching=known) as group:
        assert group.wait_until_ready(FORMATION_S).batching is ready.batching


def dies_of(path: Path, hosts: tuple[GroupHost, ...] = LOCAL, parallel: str = "tensor") -> str:
    """Return the exit code of a group that cannot load, and the sentence about it."""
    with WorkerHarness(
        engine="mlx", path=str(path), hosts=hosts, parallel=parallel, log_may_hold=("Traceback",)
    ) as worker:
        code = worker.exit_code(FORMATION_S)
        log = worker.log()
        cause = next(line for line in log.splitlines() if "cause=" in line)
        return f"{code} {cause.partition('cause=')[2]}"


def test_what_two_ranks_cannot_load(tmp_path: Path) -> None:
    """Each is one attempt: the supervisor repeats none of these codes."""
    model = make_tiny_model(tmp_path / "model")
    other = make_tiny_model(tmp_path / "other", seed=1)
    odd = make_tiny_model(tmp_path / "odd", config={"num_key_value_heads": 3})
    cut = make_tiny_model(tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    elsewhere = (GroupHost(), GroupHost(path=str(other)))
    assert "rank 1 (127.0.0.1) has other model files" in dies_of(model, elsewhere)
    cut_there = (GroupHost(), GroupHost(path=str(cut)))
    said = dies_of(model, cut_there)
    assert said.startswith(f"{ExitCode.BAD_MODEL} ")
    assert f"{weights} is incomplete" in said
    missing = (GroupHost(), GroupHost(path=str(tmp_path / "none")))
    assert dies_of(model, missing).startswith(f"{ExitCode.MODEL_MISSING} ")
    said = dies_of(odd)
    assert said.startswith(f"{ExitCode.BAD_LAUNCH} ")
    assert "num_key_value_heads is 3, which 2 hosts cannot divide" in said
    said = dies_of(model, parallel="pipeline")
    assert said.startswith(f"{ExitCode.BAD_MODEL} ")
    assert "models of type llama cannot be divided by pipeline" in said
