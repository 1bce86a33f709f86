"""Rows that decode one by one: memory for reuse, and rows that nobody knows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlxsup.worker.engines.mlx.caches import row_bytes
from mlxsup.worker.engines.mlx.decode import BatchDecode, LoneDecode
from mlxsup.worker.engines.mlx.new_row import NewRow
from mlxsup.worker.engines.mlx.probe import Run, Script
from mlxsup.worker.engines.mlx.sampling import RowDraws

from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx


def test_memory_for_reuse_is_given_back_every_512_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mlx-lm does: a row's cache grows in new buffers, and the old ones would stay."""
    steps: list[list[Any]] = []
    given_back_in: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: given_back_in.append(1 + len(steps)))
    decode = LoneDecode(None)
    while len(steps) < 1100:
        steps.append(decode.next())
    assert given_back_in == [512, 1024]


def test_only_rows_that_are_kept_give_their_caches_back() -> None:
    decode = LoneDecode(None)
    row: Any = object()
    for uid in (3, 5, 7):
        decode.insert(uid, row, [f"cache {uid}"], [uid])
    assert decode.drawn([3, 5, 9]) == {}, "none of them has begun"
    assert decode.remove([3, 5, 9], kept={5, 9}) == {5: (["cache 5"], [5])}
    assert (list(decode.new), decode.rows) == ([7], {})
    decode.close()
    assert (decode.new, decode.rows) == ({}, {})


def test_a_row_that_has_ended_by_itself_is_gone(tmp_path: Path) -> None:
    model, stream = load_model(make_tiny_model(tmp_path))[0], mx.new_stream(mx.default_device())
    decode = BatchDecode(model, stream=stream, max_concurrency=2)
    with mx.stream(stream):
        for uid, most in ((3, 1), (5, 9)):
            row = NewRow(
                tokens=[uid],
                known=[],
                cache=None,
                max_tokens=most,
                draws=RowDraws(forced=[7] * 9),
                stops=StopSequences(),
            )
            decode.insert(uid, row, make_prompt_cache(model), [])
        ended: list[int] = []
        while not ended:
            ended = [one.uid for one in decode.next() if one.finish_reason is not None]
        assert ended == [3]
        assert (list(decode.own_uids), list(decode.uids.values())) == ([5], [5]), "it is forgotten"
        assert list(decode.drawn([3, 5])) == [5]
        assert list(decode.remove([3, 5], kept={3, 5})) == [5]
    decode.close()


def test_a_layer_that_has_read_nothing_takes_nothing() -> None:
    assert row_bytes([KVCache(), KVCache()], 100) == 0
    read = KVCache()
    read.update_and_fetch(mx.zeros((1, 1, 1, 2)), mx.zeros((1, 1, 1, 2)))
    assert row_bytes([KVCache(), read], 100) == 100 * (8 + 8)


class Passes:
    """Notes the rows that are in it."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def insert(self, row: NewRow) -> int:
        uid = 10 + len(self.rows)
        self.rows.add(uid)
        return uid

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> None:
        assert not kept
        self.rows.difference_update(uids)


def test_a_probe_leaves_no_row_behind() -> None:
    passes: Any = Passes()
    script = Script(prompts=[[1], [2], [3]], answers=[[4], [5], [6]])
    run = Run(passes, script, lambda: None)
    run.insert(0, 1, 2)
    run.remove(1)
    assert passes.rows == {10, 12}
    run.clear()
    assert passes.rows == set()
