"""The memory limit of a model, held against its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.protocol.text import size_text
from mlxsup.supervisor.config.values import parse_size
from mlxsup.worker.engine import BadLaunchError
from mlxsup.worker.engines.mlx.memory_need import check_weights, memory_warnings

GIB = 2**30
MODEL = Path("/models/m")


def test_weights_above_the_limit_are_refused_with_both_numbers_and_the_key() -> None:
    with pytest.raises(BadLaunchError) as caught:
        check_weights(MODEL, 3 * GIB, 2 * GIB)
    assert str(caught.value) == (
        'the weights of /models/m take 3.00 GiB and memory allows 2.00 GiB: set memory to at least '
        '"3.75 GiB"'
    )  # fmt: skip


@pytest.mark.parametrize("limit", [None, 3 * GIB, 4 * GIB])
def test_weights_within_the_limit_are_loaded(limit: int | None) -> None:
    check_weights(MODEL, 3 * GIB, limit)


def test_a_limit_that_is_nearly_used_up_is_warned_of() -> None:
    assert memory_warnings(3 * GIB, None) == ()
    assert memory_warnings(4 * GIB, 5 * GIB) == ()
    assert memory_warnings(4 * GIB + 1, 5 * GIB) == (
        "4.01 GiB of the 5.00 GiB that memory allows are in use before the first request, which "
        'makes answers slow: set memory to at least "5.01 GiB"',
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "1 B"), (1025, "1.1 KiB"), (2**20, "1.0 MiB"), (10 * 2**20 + 1, "10.1 MiB"),
     (GIB, "1.00 GiB"), (int(1.499 * GIB), "1.50 GiB")],
)  # fmt: skip
def test_sizes_can_be_put_into_the_configuration(size: int, text: str) -> None:
    assert size_text(size) == text
    assert parse_size(text) >= size


@pytest.mark.parametrize("size", [7, 123_456_789, 987_654_321, 5_555_555_555, 81_234_567_890])
def test_the_limit_that_is_named_is_enough(size: int) -> None:
    (warning,) = memory_warnings(size, size)
    named = parse_size(warning.split('"')[1])
    check_weights(MODEL, size, named)
    assert memory_warnings(size, named) == ()
