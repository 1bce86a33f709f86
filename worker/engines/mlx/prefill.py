"""How many prompt tokens the next step may process, from measured speed; pure, no MLX.

A step decodes one token for every running row and processes at most one chunk of the waiting
prompts. The chunk is padded to its longest row, so its cost is rows × longest row. Nobody knows
the machine beforehand (ten tokens per second or ten thousand), so the first chunks are small, and
every step teaches (`PassCost`).
"""

from __future__ import annotations

from collections import deque

SMALLEST_CHUNK = 1
LARGEST_CHUNK = 2048
LARGEST_CPU_CHUNK = 256
"""On a CPU, where attention computes the scores of all pairs of a chunk's tokens, and then masks
half of them: a prompt of 1,334 tokens that is read at once takes half as long again as in chunks of
64 to 256, and nothing is won by larger passes, which cost a CPU a few milliseconds."""
FIRST_CHUNK = 8
"""The first chunk, before anything is measured; 8 tokens are safe at 3 tokens per second."""

IDLE_TARGET_S = 2.0
"""How long a chunk may take while no row decodes: cancels and admissions wait for it."""

STEP_TIMEOUT_SHARE = 0.1
"""No chunk may come closer to the stall limit (F5: legitimate work is never killed)."""

HEADROOM = 0.7
"""The share of the target to plan for; the rest absorbs a machine that slows down meanwhile."""

GROWTH = 2.0
"""A chunk is at most this many times the last one: small chunks do not show at which size the
speed falls."""

DEEP = 2048
"""Known tokens from which a prompt costs noticeably more: attention looks at all of them."""

FIXED_CHUNK = 256
"""The chunk size if answers must not depend on measurements: on a GPU the size of a chunk affects
rounding."""

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
    """The cost of a pass: so much for the pass, and so much for each token of a row.

    A machine that needs 18 ms for whatever it is asked to read, and 15 µs for each token of it,
    looks as slow as 2 ms a token after eight tokens. Two sizes tell the parts apart. A cost is
    rows × tokens of the longest.

    Attributes:
        unit_s: seconds for each token of a row; None: nothing was measured.
        largest_cost: of the passes that were measured, as far as they are not forgotten.
    """

    def __init__(self) -> None:
        self.unit_s: float | None = None
        self.largest_cost = 0
        self._counted_cost = 0  # the one that counted at once because it was much larger
        self._small: deque[tuple[int, float]] = deque(maxlen=SMALL_PASSES)
        self._least_s = 0.0

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
        if self.unit_s is None or cost >= APART * self._counted_cost:
            self.unit_s, self._counted_cost = unit_s, cost
        elif unit_s < self.unit_s:
            self.unit_s += EASE * (unit_s - self.unit_s)
        elif seen_s > self.unit_s and (cost * APART >= self.largest_cost or is_slow):
            # A small pass is mostly overhead: it only means that the machine is slow if it was
            # slow by itself.
            self.unit_s = seen_s
        self.largest_cost = max(self.largest_cost, cost)
        self._note_small(cost, took_s)

    def forget_large(self, cost: int) -> None:
        """What follows is not what was measured with passes above this cost."""
        self.largest_cost = min(self.largest_cost, cost)
        self._counted_cost = min(self._counted_cost, cost)

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


class PrefillPacer:
    """Sizes prefill chunks and predicts steps.

    Attributes:
        is_first: whether the step that was measured is the first of its shape: a GPU prepares it.

    Args:
        decode_stall_target_s: how long a chunk may hold up rows that decode.
        step_timeout_s: the stall limit of a step.
        is_fixed: whether every chunk has the same size, however long it takes.
        largest_chunk: no chunk has more tokens of a row.
    """

    def __init__(
        self,
        *,
        decode_stall_target_s: float,
        step_timeout_s: float,
        is_fixed: bool = False,
        largest_chunk: int = LARGEST_CHUNK,
    ) -> None:
        self.is_first = False
        self._is_fixed = is_fixed
        self._largest_chunk = largest_chunk
        self._ceiling_s = step_timeout_s * STEP_TIMEOUT_SHARE
        self._busy_target_s = min(decode_stall_target_s, self._ceiling_s)
        self._idle_target_s = min(IDLE_TARGET_S, self._ceiling_s)
        self._cost = PassCost()
        self._depth = 0  # the tokens before the chunk that was measured last
        self._shown = 0
        self._decode_s = 0.0
        self._decode_rows = 1

    def chunk(self, *, prefill_rows: int, decode_rows: int) -> int:
        """Prompt tokens of each row to process in the next step: 1 to the largest chunk."""
        if self._is_fixed:
            return FIXED_CHUNK
        if self._shown:
            return self._shown
        rows = max(prefill_rows, 1)
        unit_s = self._cost.unit_s
        if unit_s is None:
            return max(SMALLEST_CHUNK, FIRST_CHUNK // rows)
        planned = (self.target_s(decode_rows=decode_rows) - self._cost.pass_s) / unit_s
        # With less, most of each pass would not be spent on tokens, and it would not be shorter by
        # much, unless it comes too close to the stall limit.
        worthwhile = min(self._cost.worthwhile, (self._ceiling_s - self._cost.pass_s) / unit_s)
        cost = min(max(planned, worthwhile), GROWTH * self._cost.largest_cost)
        return int(min(max(cost // rows, SMALLEST_CHUNK), self._largest_chunk))

    def shows_chunk(self, tokens: int, limit_s: float) -> bool:
        """The next chunk that is read has that many tokens, to show what they cost.

        Returns:
            False, and nothing changes, if chunks are fixed, or one as large as the largest so far
            takes longer than `limit_s`.
        """
        is_cheap = 0.0 < self._cost.predict_s(self._cost.largest_cost) <= limit_s
        if self._is_fixed or not is_cheap:
            return False
        self._shown = tokens
        return True

    def forget(self) -> None:
        """What was measured until now had kernels compiled, and will not be as slow again."""
        self._cost = PassCost()
        self._depth = 0
        self._decode_s, self._decode_rows = 0.0, 1

    def target_s(self, *, decode_rows: int) -> float:
        """How long the reading part of a step is planned to take."""
        return HEADROOM * (self._busy_target_s if decode_rows else self._idle_target_s)

    def begins_deep(self, known: int) -> None:
        """A row begins after that many known tokens.

        Attention looks at all of them. If the last chunk was measured after fewer, a token costs
        more than that by as much at most; so the chunks begin that much smaller, and grow again.
        """
        # After few tokens attention is a part of the cost only, which then grows less than they do.
        measured = max(self._depth, DEEP // 2)
        unit_s = self._cost.unit_s
        if known < DEEP or known <= measured or unit_s is None:
            return
        planned = (self.target_s(decode_rows=1) - self._cost.pass_s) / unit_s
        first = planned * measured / known
        self._cost.forget_large(max(int(first / GROWTH), FIRST_CHUNK))

    def predict_chunk_s(self, *, prefill_rows: int, longest: int) -> float:
        """How long a chunk should take at most; 0 when unknown."""
        return self._cost.predict_s(prefill_rows * longest)

    @property
    def token_s(self) -> float:
        """Seconds that each token of a row takes; 0 when unknown."""
        return self._cost.unit_s or 0.0

    def shared_pass_s(self, tokens: int) -> float:
        """Seconds that a pass over one prompt takes besides its tokens; 0 if those take longer, or
        nothing was measured.
        """
        return self._cost.pass_s if tokens <= self._cost.worthwhile else 0.0

    def predict_decode_s(self, rows: int) -> float:
        """How long the decode part of a step should take at most; 0 when unknown."""
        return self._decode_s * max(1.0, rows / self._decode_rows) if rows else 0.0

    def saw_decode(self, *, rows: int, took_s: float) -> None:
        """A step without prefill has ended."""
        if rows >= self._decode_rows and took_s > self._decode_s:
            self._decode_s = took_s
        else:
            self._decode_s += EASE * (took_s - self._decode_s)
        self._decode_rows = rows
        self._cost.saw_none(took_s)

    def saw_chunk(
        self, *, prefill_rows: int, longest: int, decode_rows: int, took_s: float, depth: int = 0
    ) -> None:
        """A step with a prefill chunk has ended; `took_s` is for the whole step, and `depth` says
        how many tokens were before the chunk."""
        cost = prefill_rows * longest
        if cost <= 0:
            return
        is_shown, self._shown = bool(self._shown), 0
        # A share of the step always counts for the chunk: estimates from slower times must not
        # make prefill look free.
        spent_s = max(took_s - self.predict_decode_s(decode_rows), took_s / 2)
        if self.is_first and not is_shown and self._is_preparation(cost, spent_s):
            return
        if depth < self._depth or cost * APART >= self._cost.largest_cost:
            self._depth = depth
        self._cost.saw(cost, spent_s, is_slow=spent_s > self.target_s(decode_rows=1))

    def _is_preparation(self, cost: int, spent_s: float) -> bool:
        """Whether what the first pass of a shape took says nothing about its tokens: it is slower
        than others have taught, but not by so much that the next one could meet the stall limit."""
        is_slower = spent_s > self._cost.predict_s(cost)
        return self._cost.is_told_apart and is_slower and spent_s <= self._ceiling_s
