"""A model over two ranks of MLX's ring: the answers of one process, whatever else happens."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.launch import ExitCode, GroupHost
from mlxsup.protocol.states import FinishReason

from support.model_types.build import make_model
from support.model_types.listed import model_types
from support.models.tiny_model import VOCABULARY_SIZE, make_tiny_model
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


def answers(worker: WorkerHarness, parallel: str = "") -> list[tuple[object, ...]]:
    """Return the tokens and ends of all requests; in a group, another one is cancelled."""
    ready = worker.wait_until_ready(FORMATION_S)
    assert ready.parallel == parallel
    gone = worker.dispatch("cancelled", max_tokens=3000, temperature=1.0) if parallel else 0
    keys = [worker.dispatch(**{"max_tokens": 24, **asked}) for asked in REQUESTS]
    if parallel:
        worker.finish(keys[0], timeout_s=FORMATION_S)
        worker.cancel(gone)
        (cancelled,) = worker.finish(gone, timeout_s=FORMATION_S)
        assert cancelled.finish is FinishReason.CANCELLED
    streams = worker.finish(*keys, timeout_s=FORMATION_S)
    assert [stream.error for stream in streams] == [None] * len(keys)
    assert worker.ask_for_exit() == ExitCode.ASKED
    return [(stream.finish, *stream.tokens) for stream in streams]


def make_qwen2(folder: Path) -> Path:
    """Make a model that can be a pipeline, as llama cannot; its tokenizer can be constrained."""
    [model] = model_types(["qwen2"])
    wider = {"vocab_size": VOCABULARY_SIZE + 256}
    return make_model(folder, replace(model, config=model.config | wider))


@pytest.mark.parametrize(
    ("make", "parallel"), [(make_tiny_model, "tensor"), (make_qwen2, "pipeline")]
)
def test_two_ranks_answer_as_one_process(
    make: Callable[[Path], Path], parallel: str, tmp_path: Path
) -> None:
    path = str(make(tmp_path / "model"))
    with WorkerHarness(engine="mlx", path=path) as alone:
        expected = answers(alone)
    with WorkerHarness(engine="mlx", path=path, hosts=LOCAL) as group:
        assert answers(group, parallel) == expected


def test_a_rank_whose_disk_is_full_serves(tmp_path: Path) -> None:
    path = str(make_tiny_model(tmp_path / "model"))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -f 0; exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    with WorkerHarness(
        engine="mlx", path=path, hosts=(GroupHost(), GroupHost(python=str(python)))
    ) as group:
        group.wait_until_ready(FORMATION_S)
        (stream,) = group.finish(group.dispatch("hello", max_tokens=3), timeout_s=FORMATION_S)
        assert len(stream.tokens) == 3
        assert group.ask_for_exit() == ExitCode.ASKED


def test_a_later_life_makes_the_same_passes_on_a_copy_of_the_folder(tmp_path: Path) -> None:
    """The times of a copy's files differ, and so its fingerprint."""
    path = make_tiny_model(tmp_path / "model")
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    os.utime(copy / "model.safetensors", (1, 1))
    hosts = (GroupHost(), GroupHost(path=str(copy)))
    options: dict[str, Any] = {"engine": "mlx", "path": str(path), "hosts": hosts}
    with WorkerHarness(**options) as group:
        ready = group.wait_until_ready(FORMATION_S)
    known = {"fingerprint": ready.fingerprint, "batching": ready.batching.value, "reason": ""}
    with WorkerHarness(**options, known_batching=known) as group:
        assert group.wait_until_ready(FORMATION_S).batching is ready.batching


def test_a_rank_that_is_lost_while_they_connect_ends_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for that rank in native code, and holds its interpreter."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "from mlxsup.worker.engines.mlx import ranks\n"
        "ranks.LOAD_LIMIT_S = 3.0\n"
        "plain = ranks._join_ring\n"
        "def join(rank):\n"
        "    return os.kill(os.getpid(), signal.SIGKILL) if rank.number else plain(rank)\n"
        "ranks._join_ring = join\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = str(make_tiny_model(tmp_path / "model"))
    with WorkerHarness(engine="mlx", path=path, hosts=LOCAL) as group:
        assert group.exit_code(FORMATION_S) == 1
        assert "ranks.py" in group.log()


def dies_of(path: Path, hosts: tuple[GroupHost, ...]) -> str:
    """Return the exit code of a group that cannot load, and the sentence about it."""
    with WorkerHarness(
        engine="mlx", path=str(path), hosts=hosts, log_may_hold=("Traceback",)
    ) as worker:
        code = worker.exit_code(FORMATION_S)
        log = worker.log()
        cause = next(line for line in log.splitlines() if "cause=" in line)
        return f"{code} {cause.partition('cause=')[2]}"


def test_what_two_ranks_cannot_load(tmp_path: Path) -> None:
    """Each is one attempt: the supervisor repeats none of these codes."""
    model = make_tiny_model(tmp_path / "model")
    other = make_tiny_model(tmp_path / "other", seed=1)
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


@pytest.mark.parametrize(
    ("make", "collective", "says"),
    [
        (make_tiny_model, "all_sum", "the hosts compute layer 1 together otherwise"),
        (make_qwen2, "send", "numbers for 1024 tokens do not arrive as they were sent"),
    ],
)
def test_long_messages_that_are_wrong_in_all_ranks_end_the_load(
    make: Callable[[Path], Path],
    collective: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import mlx.core as mx\n"
        f"plain = mx.distributed.{collective}\n"
        "def wrong(array, *rest, **named):\n"
        "    return plain(array * (0.5 if array.shape[1] > 500 else 1.0), *rest, **named)\n"
        f"mx.distributed.{collective} = wrong\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    died = dies_of(make(tmp_path / "model"), LOCAL)
    assert died.startswith(f"{ExitCode.STEP_ERROR} ")
    assert says in died
