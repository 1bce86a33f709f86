"""How many prompt tokens the next step may process, from measured speed; pure, no MLX.

A step decodes one token for every running row and processes at most one chunk of the waiting
prompts. The chunk is padded to its longest row, so its cost is rows × longest row. Nobody knows
the machine beforehand (ten tokens per second or ten thousand), so the first chunks are small, and
every step teaches (`PassCost`).
"""

from __future__ import annotations

from .pass_cost import EASE, PassCost

SMALLEST_CHUNK = 1
LARGEST_CHUNK = 2048
FIRST_CHUNK = 8
"""The first chunk, before anything is measured; 8 tokens are safe at 3 tokens per second."""

IDLE_TARGET_S = 2.0
"""How long a chunk may take while no row decodes: cancels and admissions wait for it."""

STEP_TIMEOUT_SHARE = 0.1
"""No chunk may come closer to the stall limit (F5: legitimate work is never killed)."""

HEADROOM = 0.75
"""The share of the target to plan for; the rest absorbs a machine that slows down meanwhile."""

GROWTH = 2.0
"""A chunk is at most this many times the last one: small chunks do not show at which size the
speed falls."""

DEEP = 2048
"""Known tokens from which a prompt costs noticeably more: attention looks at all of them."""

FIXED_CHUNK = 256
"""The chunk size if answers must not depend on measurements: on a GPU the size of a chunk affects
rounding."""


class PrefillPacer:
    """Sizes prefill chunks and predicts steps.

    Args:
        decode_stall_target_s: how long a chunk may hold up rows that decode.
        step_timeout_s: the stall limit of a step.
        is_fixed: whether every chunk has the same size, however long it takes.
    """

    def __init__(
        self, *, decode_stall_target_s: float, step_timeout_s: float, is_fixed: bool = False
    ) -> None:
        self._is_fixed = is_fixed
        self._ceiling_s = step_timeout_s * STEP_TIMEOUT_SHARE
        self._busy_target_s = min(decode_stall_target_s, self._ceiling_s)
        self._idle_target_s = min(IDLE_TARGET_S, self._ceiling_s)
        self._cost = PassCost()
        self._decode_s = 0.0
        self._decode_rows = 1

    def chunk(self, *, prefill_rows: int, decode_rows: int) -> int:
        """Prompt tokens of each row to process in the next step: 1 to 2,048."""
        if self._is_fixed:
            return FIXED_CHUNK
        rows = max(prefill_rows, 1)
        unit_s = self._cost.unit_s
        if unit_s is None:
            return max(SMALLEST_CHUNK, FIRST_CHUNK // rows)
        planned = (self.target_s(decode_rows=decode_rows) - self._cost.pass_s) / unit_s
        # With less, most of each pass would not be spent on tokens, and it would not be shorter by
        # much, unless it comes too close to the stall limit.
        worthwhile = min(self._cost.worthwhile, (self._ceiling_s - self._cost.pass_s) / unit_s)
        cost = min(max(planned, worthwhile), GROWTH * self._cost.largest_cost)
        return int(min(max(cost // rows, SMALLEST_CHUNK), LARGEST_CHUNK))

    def target_s(self, *, decode_rows: int) -> float:
        """How long the reading part of a step is planned to take."""
        return HEADROOM * (self._busy_target_s if decode_rows else self._idle_target_s)

    def begins_deep(self, known: int) -> None:
        """A row begins after that many known tokens; after many of them each new one costs more
        than was measured with fewer, so the chunks begin small again."""
        if known >= DEEP:
            self._cost.forget_large(FIRST_CHUNK)

    def predict_chunk_s(self, *, prefill_rows: int, longest: int) -> float:
        """How long a chunk should take at most; 0 when unknown."""
        return self._cost.predict_s(prefill_rows * longest)

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
        self, *, prefill_rows: int, longest: int, decode_rows: int, took_s: float
    ) -> None:
        """A step with a prefill chunk has ended; `took_s` is for the whole step."""
        cost = prefill_rows * longest
        if cost <= 0:
            return
        # A share of the step always counts for the chunk: estimates from slower times must not
        # make prefill look free.
        spent_s = max(took_s - self.predict_decode_s(decode_rows), took_s / 2)
        self._cost.saw(cost, spent_s, is_slow=spent_s > self._busy_target_s)
