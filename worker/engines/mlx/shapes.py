"""Which shapes of steps have run: with CUDA the first of one may compile kernels; pure.

A prediction lengthens the supervisor's limit of a step, so a step that compiles for half a minute
is not taken for one that is stuck.
"""

from __future__ import annotations

COMPILE_S = 15.0
"""Added to the prediction of a step of a new shape; four times this is added to its limit. Steps of
25 and 30 s were seen when everything was compiled."""

Shape = tuple[int, int, int]
"""Of a step: the rows that it decodes, the prompts that it reads, the tokens of each at most."""


class SeenShapes:
    """The shapes of steps so far, in classes: each number counts by its power of two."""

    def __init__(self) -> None:
        # At most one for each combination of three numbers of bits.
        self._seen: set[Shape] = set()

    def is_new(self, shape: Shape) -> bool:
        """Whether no step of this shape has ended."""
        return _class_of(shape) not in self._seen

    def extra_s(self, shape: Shape) -> float:
        """What to add to the prediction of a step of this shape."""
        return COMPILE_S if self.is_new(shape) else 0.0

    def saw(self, shape: Shape) -> None:
        """A step of this shape has ended."""
        self._seen.add(_class_of(shape))


def _class_of(shape: Shape) -> Shape:
    decode_rows, prompts, tokens = shape
    return decode_rows.bit_length(), prompts.bit_length(), tokens.bit_length()
