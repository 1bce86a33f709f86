"""Which steps may have to be compiled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.shapes import COMPILE_S, SeenShapes

sizes = st.integers(0, 4096)


@pytest.mark.parametrize(
    ("seen", "shape", "is_new"),
    [
        ((4, 0, 0), (4, 0, 0), False),
        ((4, 0, 0), (7, 0, 0), False),
        ((4, 0, 0), (8, 0, 0), True),
        ((4, 0, 0), (3, 0, 0), True),
        ((4, 1, 32), (4, 1, 63), False),
        ((4, 1, 32), (4, 1, 64), True),
        ((4, 1, 32), (4, 2, 32), True),
        ((4, 1, 32), (4, 0, 0), True),
    ],
)
def test_a_shape_is_new_until_one_of_its_class_has_run(
    seen: tuple[int, int, int], shape: tuple[int, int, int], is_new: bool
) -> None:
    shapes = SeenShapes()
    assert shapes.extra_s(shape) == COMPILE_S
    shapes.saw(seen)
    assert shapes.extra_s(shape) == (COMPILE_S if is_new else 0.0)


@given(st.lists(st.tuples(sizes, sizes, sizes)))
def test_what_has_run_is_never_new_again(ran: list[tuple[int, int, int]]) -> None:
    shapes = SeenShapes()
    for shape in ran:
        shapes.saw(shape)
    assert all(shapes.extra_s(shape) == 0.0 for shape in ran)
