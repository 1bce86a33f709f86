"""How long a context may be: what config.json declares, and what is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.context_length import CONTEXT_LENGTH_NAMES, find_context_length

NAMES = (
    "max_position_embeddings", "max_sequence_length", "max_seq_len", "max_seq_length",
    "n_positions", "seq_length", "sequence_len", "n_ctx", "max_context_length",
    "model_max_length", "block_size",
)  # fmt: skip


def test_the_names_of_the_length_are_tried_in_this_order() -> None:
    assert CONTEXT_LENGTH_NAMES == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_length_is_known(name: str) -> None:
    found = find_context_length({name: 8192}, 0)
    assert (found.tokens, found.warnings) == (8192, ())


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
def test_a_text_model_inside_another_one_declares_it(part: str) -> None:
    assert find_context_length({part: {"max_position_embeddings": 8192}}, 0).tokens == 8192
    both = {"n_ctx": 100, part: {"max_position_embeddings": 8192}}
    assert find_context_length(both, 0).tokens == 100, "what stands outside counts first"


def test_one_token_is_a_length() -> None:
    found = find_context_length({"max_position_embeddings": 1}, 0)
    assert (found.tokens, found.warnings) == (1, ())


@pytest.mark.parametrize("asked", [1, 8191, 8192])
def test_less_may_be_asked_for(asked: int) -> None:
    found = find_context_length({"max_position_embeddings": 8192}, asked)
    assert (found.tokens, found.warnings) == (asked, ())


def test_more_than_is_declared_is_not_given_and_both_are_named() -> None:
    found = find_context_length({"max_position_embeddings": 8192}, 32768)
    assert (found.tokens, found.warnings) == (
        8192,
        ("context_length = 32768 is more than the 8192 tokens of config.json "
         "(max_position_embeddings): 8192 are used",),
    )  # fmt: skip


def test_what_is_asked_for_counts_where_nothing_is_declared() -> None:
    found = find_context_length({"model_type": "mamba"}, 32768)
    assert (found.tokens, found.warnings) == (32768, ())


def test_the_length_of_a_model_that_declares_none_is_said() -> None:
    found = find_context_length({"model_type": "mamba"}, 0)
    assert (found.tokens, found.warnings) == (
        4096,
        ("config.json declares no context length: 4096 tokens are used; "
         "set context_length to allow more",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (-1, "-1"),
        (True, "true"),
        ("4096", '"4096"'),
        ([4096], "[4096]"),
        (0.5, "0.5"),
        (2**31, "2147483648"),
        (int(1e30), "1000000000000000019…"),
        (float("inf"), "Infinity"),
        (float("nan"), "NaN"),
        ("x" * 100, '"xxxxxxxxxxxxxxxxxx…'),
        ("x" * 18, '"xxxxxxxxxxxxxxxxxx"'),
        ("x" * 19, '"xxxxxxxxxxxxxxxxxx…'),
    ],
)
def test_what_is_no_length_is_shown_and_not_used(value: Any, shown: str) -> None:
    found = find_context_length({"max_position_embeddings": value}, 0)
    assert (found.tokens, found.warnings) == (
        4096,
        (f"max_position_embeddings of config.json is no context length ({shown}): 4096 tokens are "
         "used; set context_length to allow more",),
    )  # fmt: skip
    asked = find_context_length({"max_position_embeddings": value}, 32768)
    assert (asked.tokens, asked.warnings) == (32768, ())
    other = find_context_length({"max_position_embeddings": value, "n_ctx": 512}, 0)
    assert (other.tokens, other.warnings) == (512, ())


def test_of_several_that_are_no_length_the_first_is_shown() -> None:
    found = find_context_length({"max_position_embeddings": 0, "n_ctx": "x"}, 0)
    (warning,) = found.warnings
    assert warning.startswith("max_position_embeddings of config.json is no context length (0)")


def test_nothing_and_whole_numbers_with_a_point() -> None:
    assert find_context_length({"max_position_embeddings": 2**31 - 1}, 0).tokens == 2**31 - 1
    assert find_context_length({"max_position_embeddings": 8192.0}, 0).tokens == 8192
    assert "declares no" in find_context_length({"max_position_embeddings": None}, 0).warnings[0]
    assert "declares no" in find_context_length({"text_config": "x"}, 0).warnings[0]
