"""Which shapes of steps have run, and to which sizes passes are padded: with CUDA the first of a
shape compiles kernels or plans attention; pure.

A prediction lengthens the supervisor's limit of a step, so a step that compiles for half a minute
is not taken for one that is stuck.
"""

from __future__ import annotations

from collections.abc import Sequence

COMPILE_S = 15.0
"""Added to the prediction of a step of a new shape; four times this is added to its limit. Steps of
25 and 30 s were seen when everything was compiled."""

PLAN_S = 0.05
"""The first pass of a shape takes so much longer than others, on an H200 40 to 65 ms."""

SMALL = 256
"""Up to this many tokens a pass takes a GPU the same time, so few sizes are enough for them."""

LARGEST = 1024
"""No pass has more tokens of a row: on an H200 an 8B model reads 30,000 tokens in passes of 2,048
a tenth faster, but rows that decode then wait twice as long for each."""

LEAST_TOKENS = 8
LEAST_KEYS = 256
MOST_KEYS_APART = 1024
"""Two sizes of keys are no further apart, so the largest passes end at one."""

Shape = tuple[int, int, int]
"""Of a step: the rows that it decodes, the prompts that it reads, the tokens of each at most."""

PassShape = tuple[int, int, int, bool]
"""Of a pass over prompts: rows, tokens of each, keys that it looks at, whether it has no mask."""


def padded_tokens(tokens: int) -> int:
    """Return how many tokens a pass has that reads so many of a prompt: two sizes for each power of
    two up to 256, then four."""
    return round_up(tokens, _token_step(tokens))


def pass_size(tokens: int, held: int = 0) -> int:
    """Return how many of the next tokens of a long prompt a pass should read.

    It is the largest number that needs no padding and ends at a size of keys, so that the pass
    needs no mask. If all of these are less than half of what it may read, it ends at a size of keys
    anyway, so that the next ones need none.

    Args:
        tokens: at most, at least 1.
        held: keys before them.
    """
    padded = 0
    end = held + tokens
    while True:
        end = end // _key_step(end) * _key_step(end)
        size = end - held
        if 2 * size < tokens:
            return padded or tokens // _token_step(tokens) * _token_step(tokens) or tokens
        if padded_tokens(size) == size:
            return size
        padded = padded or size
        end -= 1


def padded_keys(keys: int) -> int:
    """Return how many keys a pass looks at that has so many: a multiple of 256, and at most four
    sizes for each power of two up to 4,096, then every 1,024."""
    return round_up(keys, _key_step(keys))


def pass_shape(rows: int, tokens: int, held: int, *, is_even: bool) -> PassShape:
    """Return the shape of a pass over so many tokens behind `held` keys; even if no row is padded
    on the left."""
    keys = padded_keys(held + tokens)
    return rows, tokens, keys, is_even and keys == held + tokens


def round_up(count: int, step: int) -> int:
    """Return the next multiple of `step`."""
    return -(-count // step) * step


def _token_step(tokens: int) -> int:
    """Return what the sizes of passes near this one are multiples of."""
    return max(_power_below(tokens) // (2 if tokens <= SMALL else 4), LEAST_TOKENS)


def _key_step(keys: int) -> int:
    """Return what the sizes of keys near this one are multiples of."""
    return min(max(_power_below(keys) // 4, LEAST_KEYS), MOST_KEYS_APART)


def _power_below(count: int) -> int:
    return 1 << max(count - 1, 1).bit_length() - 1


class SeenShapes:
    """The shapes of steps so far, in classes: each number counts by its power of two. Those of
    padded passes are few, and count as they are."""

    def __init__(self) -> None:
        # At most one for each combination of three numbers of bits.
        self._seen: set[Shape] = set()
        self._passes: set[PassShape] = set()

    def extra_s(self, shape: Shape) -> float:
        """Return what to add to the prediction of a step of this shape."""
        return 0.0 if _class_of(shape) in self._seen else COMPILE_S

    def has_pass(self, shape: PassShape) -> bool:
        """True if a padded pass of this shape has ended."""
        return shape in self._passes

    def width_for(
        self, rows: int, tokens: int, held: int, *, is_even: bool, plan_s: float, token_s: float
    ) -> int:
        """Return how many tokens a pass has that reads so many of each row: the next size, or the
        next one that has run, if reading what pads it takes less time than a new shape.

        Args:
            rows: of the pass.
            tokens: of the longest row.
            held: keys of each row before the pass.
            is_even: whether no row is padded on the left.
            plan_s: seconds that the first pass of a shape takes longer than others.
            token_s: seconds that a token of a row takes.
        """
        width = exact = padded_tokens(tokens)
        while width <= LARGEST and (width - exact) * rows * token_s <= plan_s:
            if self.has_pass(pass_shape(rows, width, held, is_even=is_even)):
                return width
            width = padded_tokens(width + 1)
        return exact

    def saw(self, shape: Shape, passes: Sequence[PassShape]) -> bool:
        """Note that a step has ended; return whether it was the first of a shape.

        Args:
            shape: of the step.
            passes: the shapes of its padded passes.
        """
        is_new = _class_of(shape) not in self._seen or not self._passes.issuperset(passes)
        self._seen.add(_class_of(shape))
        self._passes.update(passes)
        return is_new


def _class_of(shape: Shape) -> Shape:
    decode_rows, prompts, tokens = shape
    return decode_rows.bit_length(), prompts.bit_length(), tokens.bit_length()
