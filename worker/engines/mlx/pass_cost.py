"""What a pass over prompt tokens costs: so much for the pass, and so much for each token; pure.

A machine that needs 18 ms for whatever it is asked to read, and 15 µs for each token of it, looks
as slow as 2 ms a token to whoever has only seen eight tokens. Two sizes tell the parts apart.
"""

from __future__ import annotations

from collections import deque

APART = 4
"""Two sizes that differ by this factor tell the cost of a pass from that of its tokens."""

LEAST_SHARE = 1 / 4
"""Of a pass that is the cost of its tokens, at least."""

LEAST_SHARE_APART = 1 / 16
"""The same if a much smaller pass was seen."""

SMALL_PASSES = 3
"""The quickest of this many small passes counts: a pause of the machine is not the pass's."""

EASE = 0.3
"""Weight of a new measurement that is faster than the estimate; a slower one counts at once."""

DRIFT = 0.02
"""Weight of a slower measurement of what a step without any prompt takes: a lower bound."""

LEAST_S = 1e-9


class PassCost:
    """An estimate of `pass + unit × cost`; a cost is rows × tokens of the longest.

    Attributes:
        unit_s: seconds for each token of a row; None: nothing was measured.
        largest_cost: of the passes that were measured, as far as they are not forgotten.
    """

    def __init__(self) -> None:
        self.unit_s: float | None = None
        self.largest_cost = 0
        self._learned_cost = 0  # the one that counted at once because it was much larger
        self._small: deque[tuple[int, float]] = deque(maxlen=SMALL_PASSES)
        self._least_s = 0.0
        self._seen_cost = 0  # the largest of this life

    @property
    def pass_s(self) -> float:
        """Seconds of a pass besides its tokens: what small passes leave beside theirs, once a much
        larger one tells what tokens cost, and no less than a step that reads nothing."""
        if self.unit_s is None or not self.is_told_apart:
            return self._least_s
        rest_s = min(took_s - self.unit_s * cost for cost, took_s in self._small)
        return max(self._least_s, rest_s)

    @property
    def is_told_apart(self) -> bool:
        """Whether passes were measured that differ enough to tell a pass from its tokens."""
        return self._is_apart(self.largest_cost)

    @property
    def was_told_apart(self) -> bool:
        """The same of this life's passes alone, without those that it was given."""
        return self._is_apart(self._seen_cost)

    @property
    def worthwhile(self) -> int:
        """The cost whose tokens take as long as the pass: with less, most of it is the pass."""
        return int(self.pass_s / self.unit_s) if self.unit_s else 0

    def predict_s(self, cost: int) -> float:
        """Seconds of a pass of that cost; 0 when unknown."""
        return 0.0 if self.unit_s is None else self.pass_s + self.unit_s * cost

    def saw_none(self, took_s: float) -> None:
        """A step has read nothing: a pass takes at least as long."""
        if self._least_s == 0.0 or took_s < self._least_s:
            self._least_s = took_s
        else:
            self._least_s += DRIFT * (took_s - self._least_s)

    def saw(self, cost: int, took_s: float, *, is_slow: bool) -> None:
        """A pass has ended.

        Args:
            cost: rows × tokens of the longest, at least 1.
            took_s: of the pass alone.
            is_slow: whether it took so long that tokens must be slow, however few it read.
        """
        # A share of the pass is its tokens' in any case: a noisy clock must not make them free.
        share = LEAST_SHARE_APART if self._is_apart(cost) else LEAST_SHARE
        seen_s = self._unit_of(cost, took_s)
        unit_s = max(seen_s, share * took_s / cost, LEAST_S / cost)
        if self.unit_s is None or cost >= APART * self._learned_cost:
            self.unit_s, self._learned_cost = unit_s, cost
        elif unit_s < self.unit_s:
            self.unit_s += EASE * (unit_s - self.unit_s)
        elif seen_s > self.unit_s and (cost * APART >= self.largest_cost or is_slow):
            # A small pass is mostly overhead: it only means that the machine is slow if it was
            # slow by itself.
            self.unit_s = seen_s
        self.largest_cost = max(self.largest_cost, cost)
        self._seen_cost = max(self._seen_cost, cost)
        self._note_small(cost, took_s)

    def forget_large(self, cost: int) -> None:
        """What follows is not what was measured with passes above this cost."""
        self.largest_cost = min(self.largest_cost, cost)
        self._learned_cost = min(self._learned_cost, cost)

    def resume(self, *, unit_s: float, small: tuple[int, float], largest_cost: int) -> None:
        """Begins with what was learned before; the first much larger pass counts at once.

        Args:
            unit_s: see the attribute.
            small: the cost and the seconds of a small pass.
            largest_cost: see the attribute.
        """
        self.unit_s, self.largest_cost = unit_s, largest_cost
        self._seen_cost = 0
        self._learned_cost = small[0]
        self._small.clear()
        self._small.append(small)

    # ---------------------------------------------------------------- inside

    def _unit_of(self, cost: int, took_s: float) -> float:
        """What each token of a pass took, beside what the pass is known to take itself."""
        if not self._is_apart(cost):
            return (took_s - self.pass_s) / cost
        small, small_s = min(self._small, key=lambda one: one[1])
        return (took_s - max(small_s, self._least_s)) / (cost - small)

    def _is_apart(self, cost: int) -> bool:
        return bool(self._small) and cost >= APART * max(small for small, _ in self._small)

    def _note_small(self, cost: int, took_s: float) -> None:
        """Keeps the smallest passes; what a larger one took, they take at most."""
        least = min((small for small, _ in self._small), default=cost)
        if cost <= least * 2:
            self._small.append((cost, took_s))
        self._small = deque(
            ((small, min(small_s, took_s) if small <= cost else small_s)
             for small, small_s in self._small),
            maxlen=SMALL_PASSES,
        )  # fmt: skip
