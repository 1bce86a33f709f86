"""How many prompt tokens the next step may process, from measured speed; pure, no MLX.

A step decodes one token for every running row and processes at most one chunk of the waiting
prompts. The chunk is padded to its longest row, so its cost is rows × longest row. Nobody knows
the machine beforehand (ten tokens per second or ten thousand), so the first chunks are small, and
every step teaches (`PassCost`).
"""

from __future__ import annotations

from .pace import Pace
from .pass_cost import APART, EASE, LEAST_SHARE_APART, PassCost

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

CAUTION = 2.0
"""How much slower than an earlier life has learned a token is taken to be before a chunk was read:
the first chunk is about half as large as it might be."""

DEEP = 2048
"""Known tokens from which a prompt costs noticeably more: attention looks at all of them."""

FIXED_CHUNK = 256
"""The chunk size if answers must not depend on measurements: on a GPU the size of a chunk affects
rounding."""


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
        self._earlier: Pace | None = None  # of the life before
        self._depth = 0  # the tokens before the chunk that was measured last
        self._shown = 0
        self._decode_s = 0.0
        self._decode_rows = 1
        self._burst = (0, 0)  # prompts, and tokens of each at most

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
        self._earlier = None
        self._depth = 0
        self._decode_s, self._decode_rows = 0.0, 1
        self._burst = (0, 0)

    def learned(self) -> Pace | None:
        """What is worth keeping for the next life; None until two sizes in this
        one have told the cost of a pass from that of its tokens."""
        unit_s = self._cost.unit_s
        if unit_s is None or not self._cost.was_told_apart:
            return None
        return Pace(
            unit_s=unit_s,
            pass_s=self._cost.pass_s,
            largest_cost=self._cost.largest_cost,
            decode_s=self._decode_s,
            decode_rows=self._decode_rows,
            burst_prompts=self._burst[0],
            burst_tokens=self._burst[1],
        )

    def resume(self, pace: Pace) -> None:
        """Begins with what an earlier life has learned, after a pass of the first chunk.

        The machine may have become slower since: until a chunk of this life tells, its tokens
        count as slow as that pass was, and slower still; they are never free.
        """
        self._earlier = pace
        seen_s = self._cost.predict_s(FIRST_CHUNK)
        slower = max(1.0, seen_s / pace.predict_s(FIRST_CHUNK))
        least_s = LEAST_SHARE_APART * seen_s / FIRST_CHUNK
        self._cost.resume(
            unit_s=max(CAUTION * slower * pace.unit_s, least_s),
            small=(FIRST_CHUNK, pace.predict_s(FIRST_CHUNK)),
            largest_cost=pace.largest_cost,
        )
        self._decode_s, self._decode_rows = slower * pace.decode_s, pace.decode_rows
        self._burst = pace.burst_prompts, pace.burst_tokens

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

    def shared_pass_s(self, tokens: int) -> float:
        """Seconds that a pass over one prompt takes besides its tokens; 0 if those take longer, or
        nothing was measured.

        Caution with what an earlier life has learned would only have the prompts of a burst read in
        several passes, so it does not count here.
        """
        if (pace := self._trusted()) is not None:
            return pace.pass_s if pace.unit_s * tokens <= pace.pass_s else 0.0
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
        if prefill_rows > 1 and not decode_rows and not depth:
            self._burst = prefill_rows, longest
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
        is_slower = spent_s > (self._trusted() or self._cost).predict_s(cost)
        return self._cost.is_told_apart and is_slower and spent_s <= self._ceiling_s

    def _trusted(self) -> Pace | None:
        """What an earlier life has learned, until this one has told a pass from its tokens."""
        return None if self._cost.was_told_apart else self._earlier
