"""The ways of running rows, step by step: what they ask of mlx-lm, read, keep and forget."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import StopSequences, greedy_sampler

from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx import drawing_batch
from mlxsup.worker.engines.mlx.decode import BatchDecode, LoneDecode
from mlxsup.worker.engines.mlx.draws import draw_by_noise
from mlxsup.worker.engines.mlx.new_row import NewRow
from mlxsup.worker.engines.mlx.passes import (
    SerialPasses,
    TogetherPasses,
    WaitingPrompt,
    make_passes,
)
from mlxsup.worker.engines.mlx.prefill import LARGEST_CHUNK
from mlxsup.worker.engines.mlx.prompt_turns import PromptRead
from mlxsup.worker.engines.mlx.sampling import PLAIN, RowDraws

pytestmark = pytest.mark.mlx

STOPS = StopSequences([])


def row_of(count: int, known: int = 0, **changes: Any) -> NewRow:
    """A row whose tokens are their places."""
    values: dict[str, Any] = {
        "cache": ["known"] if known else None, "max_tokens": 9, "draws": PLAIN, "stops": STOPS,
    }  # fmt: skip
    return NewRow(
        tokens=list(range(known, known + count)), known=list(range(known)), **(values | changes)
    )


class Generator:
    """As much of mlx-lm's as notes what it is given, and reads what a test says."""

    sampler = staticmethod(greedy_sampler)

    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.options = model, options
        self.inserted: list[tuple[Any, dict[str, Any]]] = []
        self.coming: list[Any] = []
        self.extracted: list[list[int]] = []
        self.removed: list[list[int]] = []
        self.is_closed = False

    def insert_segments(self, segments: Any, **options: Any) -> list[int]:
        self.inserted.append((segments, options))
        return [4 + len(self.inserted)]

    insert = insert_segments

    def next(self) -> Any:
        return self.coming.pop(0)

    def extract_cache(self, uids: list[int]) -> dict[int, Any]:
        self.extracted.append(list(uids))
        return {uid: ([f"cache {uid}"], [uid]) for uid in uids}

    def remove(self, uids: list[int]) -> None:
        self.removed.append(uids)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def stream() -> mx.Stream:
    return mx.default_stream(mx.default_device())


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch, stream: mx.Stream) -> tuple[TogetherPasses, Any]:
    monkeypatch.setattr(drawing_batch, "BatchGenerator", Generator)
    passes = TogetherPasses("model", stream=stream, max_concurrency=3)
    return passes, passes.generator


def read_of(uid: int, done: int, of: int, *, ends: bool = True, is_over: bool = False) -> Any:
    return SimpleNamespace(uid=uid, progress=(done, of), end_of_segment=ends, end_of_prompt=is_over)


def test_each_way_has_its_passes(monkeypatch: pytest.MonkeyPatch, stream: mx.Stream) -> None:
    monkeypatch.setattr(drawing_batch, "BatchGenerator", Generator)

    def made(way: Batching) -> Any:
        return make_passes(way, "model", stream=stream, max_concurrency=3, draw=draw_by_noise)

    options = {
        "completion_batch_size": 3, "prefill_batch_size": 3, "prefill_step_size": LARGEST_CHUNK,
        "stream": stream, "sampler": draw_by_noise,
    }  # fmt: skip
    whole = made(Batching.TOGETHER)
    assert type(whole) is TogetherPasses
    assert whole.generator.model == "model"
    assert whole.generator.options == options
    serial, lone = made(Batching.SERIAL_PREFILL), made(Batching.ONE_ROW)
    assert (type(serial), type(serial.decode)) == (SerialPasses, BatchDecode)
    assert serial.decode.generator.model == "model"
    assert serial.decode.generator.options == options
    assert (type(lone), type(lone.decode)) == (SerialPasses, LoneDecode)


def test_a_row_is_handed_over_in_pieces_that_end_at_its_checkpoints(
    together: tuple[TogetherPasses, Any],
) -> None:
    passes, generator = together
    draws = RowDraws(seed=3)
    assert passes.insert(row_of(6, known=4, checkpoints=(6, 8), draws=draws)) == 5
    assert passes.insert(row_of(2)) == 6
    options: dict[str, Any] = {"max_tokens": [9], "stop_sequences": [STOPS]}
    known = {"caches": [["known"]], "all_tokens": [[0, 1, 2, 3]], "samplers": [draws]}
    unknown = {"caches": [None], "all_tokens": [[]], "samplers": [PLAIN]}
    assert generator.inserted == [
        ([[[4, 5], [6, 7], [8, 9]]], options | known),
        ([[[0, 1]]], options | unknown),
    ]


def test_the_most_that_is_asked_is_read_of_every_prompt(
    together: tuple[TogetherPasses, Any],
) -> None:
    passes, generator = together
    generator.coming = [([read_of(5, 2, 6), read_of(6, 3, 3, is_over=True)], ["token"]), ([], [])]
    assert passes.step({5: 2, 6: 3}) == (
        [PromptRead(uid=5, done=2, is_over=False), PromptRead(uid=6, done=3, is_over=True)],
        ["token"],
    )
    assert generator.prefill_step_size == 3
    assert passes.step({}) == ([], [])
    assert generator.prefill_step_size == 3


def test_a_cache_is_copied_once_where_a_segment_ends_at_a_checkpoint(
    together: tuple[TogetherPasses, Any],
) -> None:
    passes, generator = together
    passes.insert(row_of(6, known=4, checkpoints=(6, 8)))
    passes.insert(row_of(6))

    def after(*reads: Any) -> list[Any]:
        generator.coming.append((list(reads), []))
        passes.step({})
        return passes.take_checkpoints()

    assert after(read_of(5, 2, 6), read_of(6, 2, 6)) == [(["cache 5"], [5])]
    assert passes.take_checkpoints() == []
    assert after(read_of(5, 2, 6, ends=False)) == []
    assert after(read_of(5, 3, 4)) == []
    assert after(read_of(5, 4, 6)) == [(["cache 5"], [5])]
    assert after(read_of(5, 6, 6, is_over=True)) == []
    assert after(read_of(5, 4, 6)) == [], "the prompt is over"
    assert generator.extracted == [[5], [5]]


def test_rows_that_leave_are_forgotten_with_their_checkpoints(
    together: tuple[TogetherPasses, Any],
) -> None:
    passes, generator = together
    passes.insert(row_of(6, checkpoints=(2,)))
    passes.insert(row_of(6, checkpoints=(2,)))
    assert passes.remove([5], kept={5}) == {5: (["cache 5"], [5])}
    assert passes.remove([6], kept=()) == {}
    assert (generator.removed, generator.extracted) == ([[5], [6]], [[5]])
    generator.coming.append(([read_of(5, 2, 6), read_of(6, 2, 6)], []))
    passes.step({})
    assert passes.take_checkpoints() == []
    passes.close()
    assert generator.is_closed


class Model:
    """Notes the ids of each pass."""

    def __init__(self) -> None:
        self.passes: list[Any] = []

    def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
        self.passes.append(tokens.tolist())


def test_a_pass_ends_at_each_checkpoint_and_before_the_last_token() -> None:
    prompt = WaitingPrompt(row_of(8, known=3, checkpoints=(5, 6)), [])
    model = Model()
    seen = []
    for left in (3, 2, 1, 0):
        prompt.read(model, 3)
        seen.append((prompt.done, prompt.is_at_checkpoint, prompt.held))
        assert prompt.is_read is (left == 0)
    assert model.passes == [[[3, 4]], [[5]], [[6, 7, 8]], [[9]]]
    assert seen == [
        (2, True, [0, 1, 2, 3, 4]),
        (3, True, [0, 1, 2, 3, 4, 5]),
        (6, False, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (7, False, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ]
    prompt.read(model, 3)
    assert (prompt.done, len(model.passes)) == (7, 4), "the last one is not read here"


class Decode:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.inserted: list[Any] = []
        self.is_closed = False

    def insert(self, uid: int, row: NewRow, cache: list[Any], held: list[int]) -> None:
        self.inserted.append((uid, row, cache, held))

    def remove(self, uids: list[int], *, kept: Any) -> dict[int, Any]:
        return {uid: (["decoded"], [uid]) for uid in uids if uid in kept}

    def drawn(self, uids: Any) -> dict[int, int]:
        return dict.fromkeys(uids, 70)

    def next(self) -> list[Any]:
        return ["token"]

    def close(self) -> None:
        self.is_closed = True


class Layer:
    """A cache that knows itself from a copy."""

    state: Any = ()


def test_a_prompt_that_is_read_alone_joins_those_that_decode(
    monkeypatch: pytest.MonkeyPatch, stream: mx.Stream
) -> None:
    times = iter([1.0, 1.25, 2.0, 2.5, 3.0, 3.125])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    decode: Any = Decode()
    passes = SerialPasses(Model(), stream=stream, decode=decode)
    layer = Layer()
    long, short = row_of(6, known=2, cache=[layer], checkpoints=(5,)), row_of(1, 4, cache=[])
    assert (passes.insert(long), passes.insert(short)) == (0, 1)
    reads, tokens = passes.step({0: 4})
    assert tokens == ["token"]
    assert reads == [PromptRead(uid=0, done=3, is_over=False, took_s=0.25)]
    [(copies, held)] = passes.take_checkpoints()
    assert held == [0, 1, 2, 3, 4]
    assert type(copies[0]) is Layer
    assert copies[0] is not layer, "a copy: the prompt continues in its own"
    assert passes.take_checkpoints() == []
    reads, _ = passes.step({0: 4, 1: 4})
    assert reads == [
        PromptRead(uid=0, done=6, is_over=True, took_s=0.5),
        PromptRead(uid=1, done=1, is_over=True, took_s=0.125),
    ]
    assert decode.inserted == [(0, long, [layer], list(range(7))), (1, short, [], [0, 1, 2, 3])]
    assert passes.waiting == {}
    assert passes.take_checkpoints() == []
    assert passes.drawn([1]) == {1: 70}


def test_what_leaves_while_it_waits_keeps_what_was_read(stream: mx.Stream) -> None:
    decode: Any = Decode()
    passes = SerialPasses(Model(), stream=stream, decode=decode)
    for _ in range(4):
        passes.insert(row_of(6, known=2, cache=[]))
    passes.step({0: 2})
    removed = passes.remove([0, 1, 8, 9], kept={0, 9})
    assert removed == {0: ([], [0, 1, 2, 3]), 9: (["decoded"], [9])}
    assert list(passes.waiting) == [2, 3]
    passes.close()
    assert (passes.waiting, decode.is_closed) == ({}, True)
