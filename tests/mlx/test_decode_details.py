"""Rows that decode one by one: memory for reuse, and rows that nobody knows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxsup.worker.engines.mlx.decode import LoneDecode

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
