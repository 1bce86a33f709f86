"""Which layers keep a window of tokens, and how large it is: by hand, from what mlx-lm does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mlxsup.supervisor.memory.windows import find_window

S, F = "sliding_attention", "full_attention"

LISTED = (
    "afmoe", "exaone_moe", "gear", "gemma3n", "iquestcoder", "laguna", "llama", "llava", "mellum",
    "ministral3", "mistral", "mistral3", "muse_spark", "pixtral", "xverse",
)  # fmt: skip
"""Have windows where a list says so, and nowhere without one."""

UNSAID: Mapping[str, str] = {
    **dict.fromkeys(LISTED, "."),
    **dict.fromkeys(("baichuan_m1", "exaone4", "mimo_v2_flash"), "."),
    **dict.fromkeys(("muse_glimmer", "olmo3", "spark2_5", "cohere2"), "www."),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), "wwww."),
    **dict.fromkeys(("gemma3", "gemma3_text"), "wwwww."),
    **dict.fromkeys(("gpt_oss", "step3p5"), "w."),
    "plamo3": "wwwwwww.",
    "recurrent_gemma": "w",
}
"""Where each type has windows (`w`) if config.json does not say which layers have one, over and
over."""

SAID = {
    "layer_types": [F, S, F, F, S, F],
    "sliding_window_layers": [0, 4],
    "hybrid_layer_pattern": [0, 0, 1, 2, 0, 1],
}
BY_LIST, BY_NUMBER, BY_HYBRID = ".w..w.", "w...w.", "..w..w"
BY_PERIOD_OF_3, BY_SPELLING, ALWAYS = "ww.ww.", "w..w..", "wwwwww"

GOES_BY: Mapping[str, str] = {
    **dict.fromkeys((*LISTED, "muse_glimmer", "olmo3", "spark2_5", "gpt_oss", "step3p5"), BY_LIST),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), BY_LIST),
    **dict.fromkeys(("cohere2", "gemma3", "gemma3_text", "plamo3"), BY_PERIOD_OF_3),
    "baichuan_m1": BY_NUMBER,
    "mimo_v2_flash": BY_HYBRID,
    "recurrent_gemma": ALWAYS,
}
"""Where each type has windows if config.json says it in every way; exaone4 spells it."""

SIZES = {
    "sliding_window": 64, "sliding_window_size": 65, "attention_window_size": 66, "window_size": 67,
}  # fmt: skip

SIZE_OF = {"mimo_v2_flash": 65, "recurrent_gemma": 66, "plamo3": 64 + 1}
"""The types whose window has another name, and one that the worker widens; all others take 64."""


def places(config: Mapping[str, Any], count: int) -> str:
    """`w` for each layer with a window."""
    return "".join("." if find_window(config, n) is None else "w" for n in range(count))


def test_a_type_that_is_not_told_which_layers_have_a_window_has_them_in_its_own_ones() -> None:
    found = {name: places({"model_type": name, **SIZES}, 24) for name in UNSAID}
    assert found == {name: (pattern * 24)[:24] for name, pattern in UNSAID.items()}


def test_each_type_goes_by_its_own_way_of_saying_which_layers_have_a_window() -> None:
    said = {**SIZES, **SAID, "sliding_window_pattern": 3}
    found = {name: places({"model_type": name, **said}, 6) for name in GOES_BY}
    assert found == GOES_BY
    spelled = {"model_type": "exaone4", **said, "sliding_window_pattern": "LGG"}
    assert places(spelled, 6) == BY_SPELLING


def test_the_types_that_take_a_list_or_a_period_take_the_period_without_a_list() -> None:
    for name in ("gemma4", "gemma4_text", "gemma4_unified"):
        config = {"model_type": name, **SIZES, "sliding_window_pattern": 3}
        assert places(config, 6) == BY_PERIOD_OF_3
        assert places({**config, "layer_types": None}, 6) == BY_PERIOD_OF_3


def test_each_type_takes_the_size_from_the_name_that_it_has_there() -> None:
    found = {
        name: {
            find_window({"model_type": name, **SIZES, **SAID, "sliding_window_pattern": pattern}, n)
            for n in range(6)
            for pattern in (3, "LGG")
        }
        - {None}
        for name in UNSAID
    }
    assert found == {name: {SIZE_OF.get(name, 64)} for name in UNSAID}


def test_other_types_keep_all_tokens_whatever_is_said() -> None:
    said = {**SIZES, **SAID, "sliding_window_pattern": 3}
    for config in ({"model_type": "qwen2"}, {"model_type": "novel"}, {"model_type": None}, {}):
        assert places({**said, **config}, 6) == "......"


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"model_type": "gemma3_text", "sliding_window": 512}, [512] * 5 + [None]),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 2},
         [512, None] * 3),
        ({"model_type": "cohere2"}, [4096, 4096, 4096, None, 4096, 4096]),
        ({"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LLG"},
         [64, 64, None] * 2),
        ({"model_type": "olmo3", "sliding_window": 64}, [64, 64, 64, None, 64, 64]),
        ({"model_type": "plamo3", "window_size": 64, "sliding_window_pattern": 3},
         [65, 65, None] * 2),
        ({"model_type": "baichuan_m1", "sliding_window": 8, "sliding_window_layers": [1]},
         [None, 8, None, None, None, None]),
        ({"model_type": "mimo_v2_flash", "sliding_window_size": 8,
          "hybrid_layer_pattern": [1, 0, 1]}, [8, None, 8, None, None, None]),
        ({"model_type": "mistral", "sliding_window": 4096}, [None] * 6),
        ({"model_type": "mistral", "sliding_window": 4096,
          "layer_types": ["sliding_attention", "full_attention"] * 3}, [4096, None] * 3),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, [None] * 6),
    ],
)  # fmt: skip
def test_windows_are_where_mlx_lm_makes_them(
    settings: dict[str, Any], windows: list[int | None]
) -> None:
    assert [find_window(settings, layer) for layer in range(6)] == windows


# ---------------------------------------------------------------- what makes no sense


@pytest.mark.parametrize("size", [0, -1, True, "64", 64.0, None])
def test_a_size_that_is_none_counts_as_not_given(size: object) -> None:
    listed = {"sliding_window": size, "layer_types": [S]}
    assert find_window({"model_type": "laguna", **listed}, 0) == 512
    assert find_window({"model_type": "mistral", **listed}, 0) is None
    assert find_window({"model_type": "plamo3", **listed}, 0) == 2048 + 1
    assert find_window({"model_type": "plamo3", **listed, "window_size": 9}, 0) == 9 + 1


def test_a_window_of_one_token_is_one() -> None:
    assert find_window({"model_type": "gemma3", "sliding_window": 1}, 0) == 1


NOTHING_SAID: list[tuple[str, str, list[object]]] = [
    ("mistral", "layer_types", [None, S, {0: S}, [], ["sliding"]]),
    ("gemma3", "sliding_window_pattern", [0, -2, 1, True, 2.0, "LG"]),
    ("exaone4", "sliding_window_pattern", [None, "", 3, ["L"], "l"]),
    ("mimo_v2_flash", "hybrid_layer_pattern", [None, "1", {0: 1}, []]),
    ("baichuan_m1", "sliding_window_layers", [None, 1, {0: 1}, []]),
]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [(name, key, value) for name, key, values in NOTHING_SAID for value in values],
)
def test_what_says_nothing_about_layers_gives_none_a_window(
    name: str, key: str, value: object
) -> None:
    assert places({"model_type": name, **SIZES, key: value}, 4) == "...."


def test_layers_behind_the_end_of_a_list_have_no_window() -> None:
    for name, key, value in (
        ("mistral", "layer_types", [S, S]),
        ("olmo3", "layer_types", [S, S]),
        ("gemma4", "layer_types", [S, S]),
        ("gpt_oss", "layer_types", [S, S]),
        ("mimo_v2_flash", "hybrid_layer_pattern", [1, 1]),
        ("baichuan_m1", "sliding_window_layers", [0, 1]),
    ):
        assert places({"model_type": name, **SIZES, key: value}, 4) == "ww.."


def test_an_empty_list_is_none_where_every_other_layer_has_a_window() -> None:
    for name in ("gpt_oss", "step3p5"):
        assert places({"model_type": name, **SIZES, "layer_types": []}, 4) == "w.w."
