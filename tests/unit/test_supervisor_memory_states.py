"""How large the states of layers without keys are: figures by hand, one layer of each family."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.supervisor.memory.states import State, find_state

Shapes = dict[str, tuple[int, ...]]

CONVOLUTION: Shapes = {"conv1d.weight": (10, 4, 1)}
"""Keeps three inputs for each of ten channels."""

DECAY: Shapes = {"A_log": (6,)}
"""A layer with six heads."""


def test_a_layer_without_a_state_has_none() -> None:
    assert find_state({}, {}) is None
    assert find_state({"k_proj.weight": (8, 64), "v_proj.weight": (8, 64)}, {"head_dim": 8}) is None


# ---------------------------------------------------------------- convolutions


@pytest.mark.parametrize("shape", [(10, 4, 1), (10, 1, 4)], ids=["mlx", "torch"])
def test_a_convolution_keeps_all_inputs_but_the_newest_for_each_channel(
    shape: tuple[int, ...],
) -> None:
    assert find_state({"conv.weight": shape}, {}) == State(inputs=30, numbers=0, is_known=True)


def test_the_names_of_convolutions_are_known_and_no_others() -> None:
    names = [f"{kind}conv{end}" for kind in ("", "q_", "k_", "v_") for end in ("", "1d", "_1d")]
    wrong = [n for n in names if find_state({f"{n}.weight": (10, 4, 1)}, {}) != State(inputs=30)]
    assert wrong == []
    assert find_state({"mixer.conv1d.weight": (10, 4, 1)}, {}) == State(inputs=30)
    for name in (
        "deconv.weight",
        "conv2d.weight",
        "conv1d.bias",
        "conv1d",
        "weight",
        "o_conv.weight",
    ):
        assert find_state({name: (10, 4, 1)}, {}) is None, name


def test_all_convolutions_of_a_layer_are_added_up() -> None:
    sizes = {"q": 1, "k": 2, "v": 3}
    shapes: Shapes = {f"{kind}_conv1d.weight": (size, 4, 1) for kind, size in sizes.items()}
    assert find_state(shapes, {}) == State(inputs=3 * 6)


def test_a_convolution_that_keeps_nothing_makes_no_state() -> None:
    assert find_state({"conv.weight": (10, 1, 1)}, {}) is None
    assert find_state({"conv.weight": (10, 4)}, {}) is None
    assert find_state({"conv.weight": (10, 4, 1, 1)}, {}) is None


# ---------------------------------------------------------------- recurrent units and time mixing


def test_a_recurrent_unit_keeps_as_many_numbers_as_it_is_wide() -> None:
    unit: Shapes = {"rg_lru.recurrent_param": (20,), "rg_lru.input_gate_weight": (2, 10, 10)}
    assert find_state({**CONVOLUTION, **unit}, {}) == State(inputs=30, numbers=20)
    assert find_state({"rg_lru.recurrent_param": (1,)}, {}) == State(numbers=1)


def test_a_recurrent_unit_without_its_array_is_of_unknown_size() -> None:
    unit: Shapes = {"rg_lru.input_gate_weight": (2, 10, 10)}
    assert find_state({**CONVOLUTION, **unit}, {}) == State(inputs=30, numbers=0, is_known=False)


def test_time_mixing_keeps_two_inputs_and_a_square_for_each_head() -> None:
    shapes: Shapes = {"r_k": (4, 16), "a_lora.weight": (8, 64)}
    mixed = State(inputs=2 * 64, numbers=64 * 16)
    assert find_state(shapes, {"hidden_size": 64, "head_dim": 16}) == mixed
    assert find_state(shapes, {"hidden_size": 64, "num_heads": 4}) == mixed


@pytest.mark.parametrize("config", [{}, {"hidden_size": 64}, {"head_dim": 16}])
def test_time_mixing_of_unknown_width_is_unknown(config: dict[str, Any]) -> None:
    assert find_state({"r_k": (4, 16)}, config) == State(inputs=0, numbers=0, is_known=False)


# ---------------------------------------------------------------- linear attention


def test_linear_attention_keeps_a_square_for_each_head() -> None:
    config = {"num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2}
    shapes: Shapes = {"g_norm.weight": (64,)}
    assert find_state(shapes, config) == State(numbers=4 * 16 * 16)
    assert find_state({**CONVOLUTION, **shapes}, config) == State(inputs=30, numbers=4 * 16 * 16)


@pytest.mark.parametrize("config", [{}, {"num_attention_heads": 4}, {"head_dim": 16}])
def test_linear_attention_of_unknown_width_keeps_at_least_its_inputs(
    config: dict[str, Any],
) -> None:
    shapes: Shapes = {**CONVOLUTION, "g_norm.weight": (64,)}
    assert find_state(shapes, config) == State(inputs=30, numbers=0, is_known=False)


# ---------------------------------------------------------------- states that decay


def test_a_decay_for_each_channel_and_number_is_as_large_as_the_state() -> None:
    shapes: Shapes = {**CONVOLUTION, "A_log": (20, 16)}
    assert find_state(shapes, {"mamba_d_head": 5, "mamba_d_state": 7}) == State(
        inputs=30, numbers=20 * 16
    )
    assert find_state({"A_log": (1, 20, 16)}, {}) == State(numbers=20 * 16)
    assert find_state({"A_log": (2, 2)}, {}) == State(numbers=4)


@pytest.mark.parametrize("shape", [(6,), (1, 1, 6, 1), (6, 1)])
def test_a_decay_for_each_head_counts_the_heads(shape: tuple[int, ...]) -> None:
    assert find_state({"A_log": shape}, {"head_dim": 5}) == State(numbers=6 * 25)


def test_the_decay_may_belong_to_an_inner_part() -> None:
    assert find_state({"ssm.A_log": (6,)}, {"head_dim": 5}) == State(numbers=6 * 25)
    # Another array that only sounds like it.
    assert find_state({"A_log_scale": (6,)}, {"head_dim": 5}) is None


FAMILIES: list[dict[str, Any]] = [
    {"mamba_d_head": 5, "mamba_d_state": 7},
    {"mamba_head_dim": 5, "ssm_state_size": 7},
    {"hidden_size_per_head": 5, "mamba_d_state": 7},
    {"linear_value_head_dim": 5, "linear_key_head_dim": 7},
    {"head_dim": 5, "ssm_state_size": 7},
    {"head_dim": 5, "state_size": 7},
]
"""What config.json calls the two dimensions of a head's state."""


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: "-".join(config))
def test_the_state_of_a_head_is_a_product_of_its_dimensions(config: dict[str, Any]) -> None:
    beside = {"hidden_size": 64, "num_attention_heads": 4}
    assert find_state({**CONVOLUTION, **DECAY}, config | beside) == State(
        inputs=30, numbers=6 * 5 * 7
    )


def test_the_dimensions_of_a_mixer_go_before_those_of_an_attention_beside_it() -> None:
    beside = {"head_dim": 100, "state_size": 100}
    for config in FAMILIES[:4]:
        assert find_state(DECAY, {**beside, **config}) == State(numbers=6 * 5 * 7)


def test_half_of_a_familys_dimensions_is_none_and_the_heads_count() -> None:
    for config in ({"mamba_d_head": 5}, {"mamba_d_state": 5}, {"state_size": 5}):
        wide = {**config, "hidden_size": 64, "num_attention_heads": 4}
        assert find_state(DECAY, wide) == State(numbers=6 * 16 * 16)
        assert find_state(DECAY, config) == State(is_known=False)


def test_kimi_linear_says_it_in_a_table_of_its_own() -> None:
    config = {"linear_attn_config": {"head_dim": 8}, "head_dim": 5, "hidden_size": 64}
    assert find_state(DECAY, config) == State(numbers=6 * 8 * 8)
    nothing = {**config, "linear_attn_config": {}}
    assert find_state({**CONVOLUTION, **DECAY}, nothing) == State(inputs=30, is_known=False)
    no_table = {**config, "linear_attn_config": None}
    assert find_state(DECAY, no_table) == State(numbers=6 * 5 * 5)
