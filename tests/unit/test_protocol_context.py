"""Contexts: what the caches of a batch take, and how long one may be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.cache_cost import (
    CHUNK_TOKENS,
    GROWTH_TOKENS,
    cache_bytes,
    joining_bytes,
    tokens_within,
)
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.context_length import (
    declared_context_length,
    find_context_length,
    limited_context_length,
)

FULL = CacheLayers(layers=3, token_bytes=10)

WINDOWED = CacheLayers(layers=2, token_bytes=4, window=100)

STATE = CacheLayers(layers=5, row_bytes=7)


@pytest.mark.parametrize(
    ("layers", "rows", "longest", "size"),
    [
        ([FULL], 1, 1000, (3 + 1) * 10 * (1000 + GROWTH_TOKENS)),
        ([FULL], 4, 1000, 4 * (3 + 1) * 10 * (1000 + GROWTH_TOKENS)),
        ([FULL], 0, 10, 0),
        ([], 3, 10, 0),
        ([WINDOWED], 1, 50, 3 * 4 * (50 + GROWTH_TOKENS)),
        ([WINDOWED], 1, 10_000, 3 * 4 * (100 + CHUNK_TOKENS)),
        ([WINDOWED], 1, 1_000_000, 3 * 4 * (100 + CHUNK_TOKENS)),
        ([STATE], 2, 1, 2 * (5 + 1) * 7),
        ([STATE], 2, 100_000, 2 * (5 + 1) * 7),
        (
            [FULL, WINDOWED, STATE], 1, 10,
            (3 * 10 + 2 * 4) * (10 + GROWTH_TOKENS) + 5 * 7 + 10 * (10 + GROWTH_TOKENS),
        ),
    ],
)  # fmt: skip
def test_cache_bytes(layers: list[CacheLayers], rows: int, longest: int, size: int) -> None:
    assert cache_bytes(layers, rows=rows, longest=longest) == size


layers = st.lists(
    st.builds(
        CacheLayers,
        layers=st.integers(0, 80),
        token_bytes=st.integers(0, 2**20),
        row_bytes=st.integers(0, 2**24),
        window=st.none() | st.integers(1, 8192),
    ),
    max_size=4,
)


@given(layers=layers, rows=st.integers(1, 64), most=st.integers(1, 2**20), size=st.integers(0))
def test_longest_context_that_fits_is_found(
    layers: list[CacheLayers], rows: int, most: int, size: int
) -> None:
    tokens = tokens_within(size, layers, rows=rows, most=most)
    assert 0 <= tokens <= most
    if tokens:
        assert cache_bytes(layers, rows=rows, longest=tokens) <= size
    if tokens < most:
        assert cache_bytes(layers, rows=rows, longest=tokens + 1) > size


def test_joining_row_needs_room_for_all() -> None:
    alone = cache_bytes([FULL], rows=1, longest=100)
    assert joining_bytes([FULL], [100]) == alone
    grown = cache_bytes([FULL], rows=3, longest=300 + GROWTH_TOKENS)
    assert joining_bytes([FULL], [100, 300, 7]) == grown


# ---------------------------------------------------------------- how long a context may be

NAMES = (
    "max_position_embeddings", "max_sequence_length", "max_seq_len", "max_seq_length",
    "n_positions", "seq_length", "sequence_len", "n_ctx", "max_context_length",
    "model_max_length", "block_size",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_length_is_known(name: str) -> None:
    found = find_context_length({name: 8192}, 0)
    assert (found.tokens, found.warnings) == (8192, ())


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
def test_text_model_inside_another_declares_its_length(part: str) -> None:
    assert find_context_length({part: {"max_position_embeddings": 8192}}, 0).tokens == 8192
    both = {"n_ctx": 100, part: {"max_position_embeddings": 8192}}
    assert find_context_length(both, 0).tokens == 100, "what stands outside counts first"


UNDECLARED = (
    "config.json declares no context length: 4096 tokens are used; set context_length to allow more"
)
CUT = (
    "context_length = 32768 is more than the 8192 tokens of config.json "
    "(max_position_embeddings): 8192 are used"
)


@pytest.mark.parametrize(
    ("config", "asked", "tokens", "warnings"),
    [
        ({"max_position_embeddings": 1}, 0, 1, ()),
        ({"max_position_embeddings": 2**31 - 1}, 0, 2**31 - 1, ()),
        ({"max_position_embeddings": 8192.0}, 0, 8192, ()),
        ({"max_position_embeddings": 8192}, 1, 1, ()),
        ({"max_position_embeddings": 8192}, 8191, 8191, ()),
        ({"max_position_embeddings": 8192}, 8192, 8192, ()),
        ({"max_position_embeddings": 8192}, 32768, 8192, (CUT,)),
        ({"model_type": "mamba"}, 32768, 32768, ()),
        ({"model_type": "mamba"}, 0, 4096, (UNDECLARED,)),
        ({"max_position_embeddings": None}, 0, 4096, (UNDECLARED,)),
        ({"text_config": "x"}, 0, 4096, (UNDECLARED,)),
    ],
)
def test_declared_length_counts_unless_less_is_asked_for(
    config: dict[str, Any], asked: int, tokens: int, warnings: tuple[str, ...]
) -> None:
    found = find_context_length(config, asked)
    assert (found.tokens, found.warnings) == (tokens, warnings)
    assert limited_context_length(declared_context_length(config), asked) == tokens, "as planned"


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
def test_wrong_length_is_shown_and_not_used(value: Any, shown: str) -> None:
    found = find_context_length({"max_position_embeddings": value, "n_ctx": "x"}, 0)
    assert (found.tokens, found.warnings) == (
        4096,
        (f"max_position_embeddings in config.json is not a context length ({shown}): 4096 tokens "
         "are used; set context_length to allow more",),
    )  # fmt: skip
    asked = find_context_length({"max_position_embeddings": value}, 32768)
    assert (asked.tokens, asked.warnings) == (32768, ())
    other = find_context_length({"max_position_embeddings": value, "n_ctx": 512}, 0)
    assert (other.tokens, other.warnings) == (512, ())
