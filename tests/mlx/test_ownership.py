"""Which thread calls MLX, and in which order: every function of it is watched, of a whole life."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import Resume
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.text import MlxText
from mlxsup.worker.thread_guard import OwnedEngine

from support.loop_driver import LoopDriver
from support.mlx_calls import KINDS, Calls
from support.mlx_rows import make_spec
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

QUESTIONS = {"device_info", "default_device", "is_available"}
"""Functions of `mx` that make no work and no array; limits are set besides."""

COUNTERS = {"get_active_memory", "get_cache_memory", "get_peak_memory"}
"""Functions of `mx` that read a number of the allocator, which the memory guard does from the
threads of prompts and heartbeats."""

READY = "(ready)"
"""Stands between the calls of the load and those of requests."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    calls.watch(monkeypatch.setattr)
    return calls


@pytest.fixture
def encoding_on(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that tokenise."""
    threads: set[int] = set()
    encode = MlxText.encode

    def watched_encode(self: MlxText, body: Any) -> Any:
        threads.add(threading.get_ident())
        return encode(self, body)

    monkeypatch.setattr(MlxText, "encode", watched_encode)
    return threads


def live(folder: Path, calls: Calls) -> None:
    """A load, requests of every kind, a cancel, a resume, and the end."""
    engine = OwnedEngine(MlxEngine(make_spec(folder, max_concurrency=4)), 30.0)
    facts = engine.load(lambda phase, progress: None)
    calls.names.append(READY)
    driver = LoopDriver(engine, facts)
    messages = [{"role": "user", "content": "Hello"}]
    keys = [
        driver.dispatch(prompt="Once upon a time", max_tokens=20, logprobs=True, top_logprobs=3),
        driver.dispatch(messages=messages, max_tokens=20, temperature=1.0, seed=7, top_p=0.9),
        driver.dispatch(
            prompt="a b c", max_tokens=20, repetition_penalty=1.2, logit_bias={"300": 2.0}
        ),
    ]
    leaves = driver.dispatch(prompt="x " * 300, max_tokens=200)
    for _ in range(8):
        driver.turn()
    driver.cancel(leaves)
    whole, *others = driver.finish(*keys)
    [left] = driver.finish(leaves)
    assert left.finish is FinishReason.CANCELLED
    assert all(len(answer.tokens) == 20 for answer in (whole, *others))
    resume: Resume = whole.resume_after(10)
    assert driver.answer(resume).tokens == whole.tokens[10:]
    assert driver.answer(prompt="Once upon a time", max_tokens=3).tokens == whole.tokens[:3]
    engine.give_back()
    driver.close()
    engine.close()


def test_one_thread_calls_mlx_from_the_load_to_the_close_A1_A6(
    calls: Calls, encoding_on: set[int], tmp_path: Path
) -> None:
    live(make_tiny_model(tmp_path / "tiny"), calls)
    me = threading.get_ident()
    of_others = {name for thread, names in calls.threads.items() if thread != me for name in names}
    assert of_others <= COUNTERS, calls.threads
    expected = {
        "new_stream", "eval", "__init__", "insert_segments", "next", "remove", "cumsum",
        "put_along_axis", "synchronize", "clear_cache", "close", "get_active_memory",
    }  # fmt: skip
    assert expected - calls.threads[me] == set(), "what was to be watched was not called"
    assert me not in encoding_on
    assert encoding_on, "prompts are made by the helper threads"


def test_the_stream_of_passes_is_created_before_any_work_and_no_other_follows_A2(
    calls: Calls, tmp_path: Path
) -> None:
    """But for the one that log-probabilities are read on, which waits for no pass."""
    live(make_tiny_model(tmp_path / "tiny"), calls)
    before = calls.names[: calls.names.index("new_stream")]
    assert set(before) <= QUESTIONS, before
    made = [number for number, name in enumerate(calls.names) if name == "new_stream"]
    assert len(made) == 2
    assert made[-1] < calls.names.index(READY), "none for a request"


def test_the_first_request_has_nothing_to_make_that_the_second_has_not_B10(tmp_path: Path) -> None:
    """In a separate process: whatever is traced, compiled or opened late would be called once."""
    folder = make_tiny_model(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-m", "support.mlx_calls", str(folder)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made.keys() == KINDS.keys()
    for kind, requests in made.items():
        first, second, third = (Counter[str](request) for request in requests)
        assert second == third, f"{kind}: else nothing could be said"
        assert (kind, first - second, second - first) == (kind, Counter(), Counter())
