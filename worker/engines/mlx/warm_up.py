"""Runs short requests before READY, so that the first one is as fast as the second (B10) and the
cost model knows what a pass costs, and what a token does.

With CUDA they also have the kernels compiled that requests of a usual size need, which may take
half a minute for one of them: while the model loads, each step of them is progress.

With CUDA the first pass of a shape is slow even if everything is compiled, because attention is
planned anew. So passes are padded to few shapes, and what the load has no time for is run while
the worker is idle.

Several sizes are shown, because a cost model that saw 8 tokens cannot tell the cost of a pass from
that of its tokens. Answers wait for a worker that follows a crash: it compiles nothing, because the
kernels are on disk, and shows one size.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import Batching
from mlxsup.protocol.text import log_line

from ...engine import EngineFacts, Row
from .batch import WARMUP_KEY, MlxBatch
from .prefill import FIRST_CHUNK
from .prefix_cache import free_memory_bytes
from .shapes import LARGEST, padded_tokens

SHOWN = (128, 1024)
"""Tokens that one pass reads after the first chunk, in this order, to show what they cost."""

CHEAP_S = 0.1
"""A larger pass is only shown if one as large as before is expected to take less than that."""

COMPILED = (32, 128, 384, 512, 1024)
"""Tokens of the passes whose kernels are compiled, those that are shown later among them."""

BURST_TOKENS = 32
"""Of each prompt of the passes over many of them: a burst of short requests."""

USUAL_BURSTS = ((2, 128), (4, 128), (2, 512), (8, 128), (4, 512), (2, 1024))
"""Prompts and their tokens of more passes: with these, what the first traffic brings can be padded
to a shape that has run."""

COMPILE_LIMIT_S = 120.0
"""Nothing more is compiled before READY after this long; what is left compiles when it is needed,
under the longer limit of a new shape."""

MOST_TOKENS = 2048
"""Of all prompts of a pass that is run while the worker is idle."""

DEEP = 8192
"""Tokens of a prompt that is read in passes of the largest size: what is left of any prompt up to
this length can be padded to one of their shapes."""

PROMPT_TOKENS = 2
"""Of the rows that only have decoding compiled, because nothing reads their prompts together."""

ANSWER_TOKENS = 2

STEPS_TO_JOIN = 4
"""At most this many steps pass from when one row joins those that decode until the next does."""

SAMPLED = Sampling(temperature=0.7, top_p=0.9)
"""Of every other row of several: most requests are sampled."""

logger = logging.getLogger(__name__)


def warm_up(
    batch: MlxBatch, spec: LaunchSpec, facts: EngineFacts, report: Callable[[], None]
) -> WarmUp:
    """Warm up a batch; return what is left for idle times.

    Args:
        batch: empty, before and after.
        spec: the worker's launch spec.
        facts: of the load.
        report: called after each step.
    """
    began = batch.clock()
    work = WarmUp(
        batch,
        vocabulary_size=facts.vocabulary_size,
        context_length=facts.context_length,
        free_bytes=lambda: free_memory_bytes(facts.backend, spec.memory_limit_bytes),
        report=report,
    )
    work.run(
        most_rows=1 if facts.batching is Batching.ONE_ROW else spec.max_concurrency,
        compiles=facts.backend == "cuda",
        is_again=spec.generation > 1,
        reads_together=facts.batching is Batching.TOGETHER,
    )
    if facts.backend == "cpu":
        batch.wait()  # what a pass still holds would count as weights
    else:
        batch.give_back()
    if batch.is_padded:
        most_rows = 1 << spec.max_concurrency.bit_length() - 1
        work.plan_shapes(most_rows)
    logger.info(
        log_line(
            "model warmed up",
            model=spec.model,
            rows=work.rows,
            seconds=batch.clock() - began,
        )
    )
    return work


class WarmUp:
    """Runs requests in an empty batch, and leaves it empty.

    Args:
        batch: warmed up; no prefix of its rows is kept yet.
        vocabulary_size: of the tokenizer; the ids of the prompts are below it.
        context_length: in tokens; larger requests than that are left out.
        free_bytes: how much memory the process may still take.
        report: called after each step.
    """

    def __init__(
        self,
        batch: MlxBatch,
        *,
        vocabulary_size: int,
        context_length: int,
        free_bytes: Callable[[], int],
        report: Callable[[], None],
    ) -> None:
        self._batch = batch
        self._vocabulary_size = vocabulary_size
        self._context_length = context_length
        self._free_bytes = free_bytes
        self._report = report
        self._largest = FIRST_CHUNK
        self._largest_bytes = 0
        self._shapes: list[tuple[int, int]] = []  # rows and tokens of passes that were not run yet
        self._has_run_deep = False
        self.rows = 0

    def plan_shapes(self, most_rows: int) -> None:
        """Note which passes are to be run while there is no request, the usual ones first."""
        self._report = lambda: None
        counts = [rows for rows in powers_up_to(most_rows) if rows == 1 << rows.bit_length() - 1]
        sizes = sorted({padded_tokens(tokens) for tokens in range(1, LARGEST + 1)})
        shapes = [(rows, size) for rows in counts for size in sizes if rows * size <= MOST_TOKENS]
        self._shapes = sorted(shapes, key=lambda shape: shape[0] * shape[1], reverse=True)
        if not self._has_run_deep:
            self._shapes.insert(0, (1, DEEP))

    def run_next_shape(self) -> bool:
        """Run a pass of a shape that this process has not run; return whether there was one."""
        while self._shapes:
            rows, tokens = self._shapes.pop()
            is_known = tokens != DEEP and self._batch.has_run(rows, tokens)
            if is_known or not self._fits(tokens, rows=rows):
                continue
            self._batch.costs.shows_chunk(min(tokens, LARGEST), math.inf)
            self._run([tokens + 1] * rows)
            return True
        return False

    def run(
        self,
        *,
        most_rows: int,
        compiles: bool,
        is_again: bool,
        reads_together: bool,
    ) -> None:
        """Runs what this load needs.

        Args:
            most_rows: rows that may decode in one pass.
            compiles: whether the device compiles what it runs for the first time.
            is_again: whether an earlier life of the same daemon has compiled it.
            reads_together: whether one pass reads many prompts.
        """
        if compiles and reads_together:
            self._batch.pad()
        self._read(FIRST_CHUNK)
        shown: Sequence[int] = SHOWN
        if compiles:
            if not is_again:
                self._compile(most_rows, reads_together=reads_together)
            # Until here, passes had kernels compiled, or loaded from where they are kept.
            self._batch.costs.forget()
            self._read(FIRST_CHUNK)
            # Only the second pass of a shape shows what its tokens cost.
            shown = [size for size in SHOWN[: 1 if is_again else None] for _ in range(2)]
        for tokens in shown:
            if not self._fits(tokens) or not self._batch.costs.shows_chunk(tokens, CHEAP_S):
                break
            self._read(tokens)

    def _compile(self, most_rows: int, *, reads_together: bool) -> None:
        """Run the usual shapes, those first that every request needs."""
        ends_at = self._batch.clock() + COMPILE_LIMIT_S
        for count in powers_up_to(most_rows):
            if self._batch.clock() >= ends_at:
                return
            if not reads_together or not self._read_burst(count, BURST_TOKENS, ends_at):
                self._run([PROMPT_TOKENS] * count, ends_at=ends_at)
        for tokens in COMPILED:
            if self._batch.clock() >= ends_at or not self._fits(tokens):
                return
            self._batch.costs.shows_chunk(tokens, math.inf)
            self._read(tokens, ends_at=ends_at)
        for count, tokens in USUAL_BURSTS if self._batch.is_padded else ():
            if count <= most_rows and self._batch.clock() < ends_at:
                self._read_burst(count, tokens, ends_at)
        if self._batch.is_padded and self._batch.clock() < ends_at and self._fits(DEEP):
            self._has_run_deep = True
            self._batch.costs.shows_chunk(LARGEST, math.inf)
            self._run([DEEP + 1], ends_at=ends_at)

    def _read_burst(self, prompts: int, tokens: int, ends_at: float) -> bool:
        """Read several prompts in one pass if they fit; return whether it did.

        Args:
            prompts: how many.
            tokens: the length of each.
            ends_at: no step begins after this time.
        """
        if not self._fits(tokens, rows=prompts):
            return False
        self._batch.costs.shows_chunk(tokens, math.inf)
        self._read(tokens, rows=prompts, ends_at=ends_at)
        return True

    def _fits(self, tokens: int, *, rows: int = 1) -> bool:
        """True if prompts fit into the context, and the pass that reads them into memory.

        A pass takes at most what attention does, which grows with its tokens and with the keys.
        """
        width = min(tokens, LARGEST)
        most_bytes = rows * tokens * width / self._largest**2 * self._largest_bytes
        return (
            most_bytes <= self._free_bytes() and tokens + 1 + ANSWER_TOKENS <= self._context_length
        )

    def _read(self, tokens: int, *, rows: int = 1, ends_at: float = math.inf) -> None:
        """Requests with one token more, which a pass of their own reads; notes what one took."""
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        lengths = [tokens + 1] * rows
        if rows > 1:
            lengths[-1] = tokens  # one is shorter, as in most bursts: what pads it is compiled, too
        self._run(lengths, ends_at=ends_at)
        if rows == 1:
            self._largest, self._largest_bytes = tokens, max(mx.get_peak_memory() - before, 0)

    def _run(self, lengths: list[int], *, ends_at: float = math.inf) -> None:
        """Requests side by side, until all have decoded in one pass or it is too late for another
        step; their rows are removed in every case (B5)."""
        keys = [RequestKey(WARMUP_KEY - number) for number in range(len(lengths))]
        self.rows += len(keys)
        got: Counter[RequestKey] = Counter()
        try:
            for number, length in enumerate(lengths):
                self._batch.insert(self._row(keys[number], length, of=len(keys)))
            while any(got[key] < ANSWER_TOKENS for key in keys):
                got.update(token.key for token in self._batch.step().tokens)
                self._report()
                if self._batch.clock() >= ends_at:
                    break
            if len(keys) > 1:
                # Copies their caches: on a GPU the first copies are a hundred times as slow.
                self._batch.set_aside(*keys, keep=True)
                self._batch.drop_kept(*keys)
        finally:
            self._batch.remove(*keys)

    def _row(self, key: RequestKey, length: int, *, of: int) -> Row:
        """Make a request as long as the context allows; of several, the first decode until all
        do."""
        length = max(min(length, self._context_length - ANSWER_TOKENS), 1)
        return Row(
            key=key,
            tokens=[token % self._vocabulary_size for token in range(length)],
            max_tokens=ANSWER_TOKENS + STEPS_TO_JOIN * (of - 1),
            sampling=Sampling() if key % 2 else SAMPLED,
            seed=0,
        )


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4 … and the number itself, ascending."""
    return [*(1 << bits for bits in range((most - 1).bit_length())), most]
