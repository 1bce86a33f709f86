"""What attentions keep per token, from the shapes of their arrays: one layer of each spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mlxsup.supervisor.memory.attention import token_numbers

Shapes = dict[str, tuple[int, ...]]

QUERIES: Mapping[str, Any] = {"num_attention_heads": 6, "head_dim": 10}
"""60 numbers for the queries of a token."""


def kept(shapes: Shapes, config: Mapping[str, Any] | None = None, layer: int = 0) -> list[int]:
    return token_numbers(shapes, config or {}, layer)


def test_a_layer_that_makes_no_keys_keeps_nothing() -> None:
    assert kept({}) == []
    assert kept({"q_proj": (64, 64), "o_proj": (64, 64), "norm": (64,)}, QUERIES) == []


def test_keys_and_values_count_by_their_outputs_whatever_they_are_called() -> None:
    pairs = (("k_proj", "v_proj"), ("c_k", "c_v"), ("attn_key", "attn_value"))
    found = [kept({f"attn.{keys}": (8, 64), f"attn.{values}": (5, 64)}) for keys, values in pairs]
    assert found == [[13], [13], [13]]


def test_each_attention_of_a_layer_has_a_cache() -> None:
    shapes: Shapes = {
        "0.k_proj": (8, 64), "1.k_proj": (4, 64), "0.v_proj": (8, 64), "1.v_proj": (2, 64),
    }  # fmt: skip
    assert kept(shapes) == [16, 6]


def test_what_is_made_at_once_is_keys_and_values_besides_the_queries() -> None:
    names = ("qkv_proj", "q_k_v_proj", "query_key_value", "Wqkv", "wqkv", "W_pack", "c_attn")
    found = {name: kept({name: (60 + 16, 64)}, QUERIES) for name in names}
    assert found == {name: [16] for name in names}
    assert kept({"qkvg_proj": (60 + 60 + 16, 64)}, QUERIES) == [16]


def test_what_is_made_at_once_is_in_three_equal_parts_if_the_queries_are_not_known() -> None:
    assert kept({"qkv_proj": (90, 64)}) == [60]
    assert kept({"qkvg_proj": (90, 64)}, {"num_attention_heads": 6}) == [60]


def test_gpt2_has_its_outputs_last() -> None:
    assert kept({"c_attn": (64, 192)}) == [128]
    assert kept({"qkv_proj": (64, 192)}) == [64 * 2 // 3]


def test_a_layer_with_another_number_of_query_heads_is_told_apart() -> None:
    config = {**QUERIES, "num_query_heads": [2, 3]}
    shapes: Shapes = {"qkv_proj": (76, 64)}
    assert [kept(shapes, config, layer) for layer in range(3)] == [[56], [46], [16]]


# ---------------------------------------------------------------- compressed keys

LATENT: Shapes = {"kv_a_proj_with_mqa": (24, 64), "kv_b_proj": (500, 16)}
WIDTHS = {"qk_nope_head_dim": 2, "qk_rope_head_dim": 3, "v_head_dim": 4}
EXPANDED = {"num_attention_heads": 6, **WIDTHS}


def test_most_types_keep_what_is_compressed() -> None:
    for name in ("deepseek_v3", "kimi_k2", "novel", None):
        assert kept(LATENT, {"model_type": name, **EXPANDED}) == [24]


@pytest.mark.parametrize("name", ["deepseek_v2", "minicpm3", "youtu_llm"])
def test_some_keep_the_keys_and_values_of_all_heads(name: str) -> None:
    assert kept(LATENT, {"model_type": name, **EXPANDED}) == [6 * (2 + 3 + 4)]


@pytest.mark.parametrize("missing", list(EXPANDED))
def test_without_one_of_the_widths_what_is_compressed_counts(missing: str) -> None:
    config = {key: value for key, value in EXPANDED.items() if key != missing}
    assert kept(LATENT, {"model_type": "deepseek_v2", **config}) == [24]


def test_an_indexer_has_a_cache_of_its_own() -> None:
    with_values: Shapes = {"kv_a_proj_with_mqa": (24, 64), "indexer.wk": (7, 64)}
    assert kept(with_values) == [24, 14]
    beside: Shapes = {"k_proj": (8, 64), "v_proj": (8, 64), "index_k_proj": (7, 64)}
    assert kept(beside) == [16, 7]


# ---------------------------------------------------------------- keys that are values


@pytest.mark.parametrize("parent", ["", "self_attn."])
def test_keys_that_are_values_too_count_twice(parent: str) -> None:
    shapes: Shapes = {f"{parent}k_proj": (8, 64), f"{parent}q_proj": (60, 64)}
    assert kept(shapes, {"attention_k_eq_v": True}) == [16]
    assert kept(shapes, {"attention_k_eq_v": False}) == [8]
    assert kept(shapes, {"attention_k_eq_v": "yes"}) == [8]
    assert kept(shapes) == [8]


@pytest.mark.parametrize("parent", ["", "self_attn."])
def test_a_layer_that_makes_values_does_not_take_its_keys_for_them(parent: str) -> None:
    shapes: Shapes = {f"{parent}k_proj": (8, 64), f"{parent}v_proj": (5, 64)}
    assert kept(shapes, {"attention_k_eq_v": True}) == [13]


def test_other_keys_never_count_twice() -> None:
    assert kept({"attn.c_k": (8, 64)}, {"attention_k_eq_v": True}) == [8]
