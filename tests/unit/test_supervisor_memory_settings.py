"""The numbers of a config.json under each of the names that architectures give them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.supervisor.memory.settings import head_dim, layer_count, number, query_width


def test_the_number_of_layers_has_five_names() -> None:
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
    assert [layer_count({name: 7}) for name in names] == [7] * 5
    assert layer_count({"layers": 7}) is None


@pytest.mark.parametrize("spelled", ["M*-ME", ["M", "*", "-", "M", "E"]])
def test_a_type_that_spells_its_layers_has_as_many_as_it_spells(spelled: object) -> None:
    assert layer_count({"hybrid_override_pattern": spelled, "num_hidden_layers": 9}) == 5


@pytest.mark.parametrize("spelled", ["", [], None, 5])
def test_a_spelling_that_says_nothing_leaves_the_number(spelled: object) -> None:
    assert layer_count({"hybrid_override_pattern": spelled, "num_hidden_layers": 9}) == 9


def test_the_width_of_a_head_has_two_names_and_goes_before_a_quotient() -> None:
    beside = {"hidden_size": 64, "num_attention_heads": 4}
    assert [head_dim({**beside, name: 10}) for name in ("head_dim", "kv_channels")] == [10, 10]
    assert head_dim({"kv_channels": 11, "head_dim": 10}) == 10


def test_the_width_of_a_head_is_a_quotient_under_any_names() -> None:
    hidden = ("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim", "dim")
    heads = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    assert [head_dim({name: 66, "n_head": 4}) for name in hidden] == [16] * 6
    assert [head_dim({"dim": 66, name: 4}) for name in heads] == [16] * 4
    assert head_dim({"hidden_size": 64}) is head_dim({"num_heads": 4}) is None


def test_queries_are_as_wide_as_all_heads() -> None:
    assert query_width({"num_heads": 4, "head_dim": 10}, 0) == 40
    assert query_width({"num_heads": 4}, 0) is query_width({"head_dim": 10}, 0) is None


def test_queries_of_layers_with_heads_of_their_own_are_as_wide_as_those() -> None:
    config: dict[str, Any] = {"num_query_heads": [2, 3], "head_dim": 10, "num_heads": 4}
    assert [query_width(config, layer) for layer in range(3)] == [20, 30, 40]
    assert query_width({**config, "num_query_heads": 3}, 0) == 40
    assert query_width({"num_query_heads": [2]}, 0) is None


@pytest.mark.parametrize("value", [None, 0, -1, True, "4", 4.0, [4]])
def test_what_is_no_positive_integer_is_passed_over(value: object) -> None:
    assert number({"a": value}, ("a",)) is None
    assert number({"a": value, "b": 1}, ("a", "b")) == 1
