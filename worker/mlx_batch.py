"""The batch: rows in and out of mlx-lm's BatchGenerator, one `next()` for each step.

Everything here belongs to the thread that made the stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason

from .engine import Row, RowLogprobs, RowPrefill, RowToken, StepResult
from .grammar import Grammar
from .mlx_load import raise_if_innocent, raise_if_memory
from .mlx_logprobs import LogprobReader
from .mlx_prefix_cache import PrefixCache
from .mlx_sampling import greedy, make_processors, make_sampler
from .prefill import LARGEST_CHUNK, PrefillPacer

WARMUP_KEY = RequestKey(-1)
"""Of the row that warms the engine up: it ends by its length alone, and leaves nothing behind."""

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True)
class _Prompt:
    """A row that does not decode yet; `cached` of its tokens came from the prefix cache."""

    total: int
    cached: int = 0
    done: int = 0


class MlxBatch:
    """Rows that prefill and decode together.

    Attributes:
        logits_width: of the model's output, known after the first token.

    Args:
        model: materialised.
        stream: made on this thread.
        stop_tokens: ids that end an answer.
        spared_tokens: ids that XTC never leaves out.
        max_concurrency: rows at most.
        pacer: sizes the prefill chunks.
        prefixes: what earlier rows have computed.
    """

    def __init__(
        self,
        model: Any,
        *,
        stream: mx.Stream,
        stop_tokens: Sequence[int],
        spared_tokens: Sequence[int] = (),
        max_concurrency: int,
        pacer: PrefillPacer,
        prefixes: PrefixCache,
    ) -> None:
        self._stream = stream
        self._pacer = pacer
        self._prefixes = prefixes
        self._uids: dict[RequestKey, int] = {}
        self._keys: dict[int, RequestKey] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._due: set[int] = set()  # rows whose prompt was read, and whose first token is due
        self._wanted_logprobs: dict[int, int] = {}
        self._grammars: dict[int, Grammar] = {}
        self._spared = list(spared_tokens)
        self._logprobs = LogprobReader()
        self.logits_width: int | None = None
        # The constructor wires as much memory as the machine recommends, each worker for itself;
        # several workers together would wire more than there is. `MemoryLimits` sets it back.
        with mx.stream(stream):
            self._generator = BatchGenerator(
                model,
                sampler=greedy,
                stop_tokens=[(token,) for token in stop_tokens],
                completion_batch_size=max_concurrency,
                prefill_batch_size=max_concurrency,
                prefill_step_size=LARGEST_CHUNK,
                stream=stream,
            )

    def insert(self, row: Row) -> int:
        """Adds a row; its prefill starts with the next step.

        Returns:
            How many of its tokens need no prefill.

        Raises:
            ValueError: its key is in the batch already.
        """
        if row.key in self._uids:
            raise ValueError(f"request {row.key} is in the batch already")
        tokens = row.tokens + row.delivered
        with mx.stream(self._stream):
            cache, cached = self._prefixes.find(tokens)
            # mlx-lm goes row by row as soon as two rows differ here, so most rows have none.
            processors = make_processors(row)
            sampler = make_sampler(row, self._spared)
            uid = self._generator.insert(
                [tokens[cached:]],
                max_tokens=[row.max_tokens - len(row.delivered)],
                caches=[cache],
                all_tokens=[tokens[:cached]],
                samplers=[sampler],
                logits_processors=[processors] if processors else None,
                stop_sequences=[StopSequences()] if row.key == WARMUP_KEY else None,
            )[0]
        self._uids[row.key] = uid
        self._keys[uid] = row.key
        self._prompts[uid] = _Prompt(total=len(tokens), cached=cached, done=cached)
        self._pacer.begins_deep(cached)
        if row.top_logprobs is not None:
            self._wanted_logprobs[uid] = row.top_logprobs
        if row.grammar is not None:
            self._grammars[uid] = row.grammar
        return cached

    def remove(self, key: RequestKey) -> None:
        """Takes a row out at once; unknown keys are ignored (D6)."""
        uid = self._uids.pop(key, None)
        if uid is None:
            return
        del self._keys[uid]
        self._due.discard(uid)
        prompt = self._prompts.pop(uid, None)
        self._wanted_logprobs.pop(uid, None)
        self._grammars.pop(uid, None)
        has_computed = prompt is None or prompt.done > prompt.cached
        is_kept = has_computed and key != WARMUP_KEY
        with mx.stream(self._stream):
            removed = self._generator.remove([uid], return_prompt_caches=is_kept)
            for cache, tokens in removed.values():
                self._prefixes.keep(tokens, cache)

    def give_back(self) -> None:
        """Frees what is kept for speed alone."""
        self._prefixes.clear()
        # A pass that is under way would give its memory back too late.
        mx.synchronize(self._stream)
        mx.clear_cache()

    def has_rows(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._keys)

    def row_count(self) -> int:
        """How many rows there are, in prefill or decode."""
        return len(self._keys)

    def predict_step_s(self) -> float:
        """How long the next step should take at most; 0 when unknown."""
        waiting = len(self._prompts)
        decoding = len(self._keys) - waiting
        if not waiting:
            return self._pacer.predict_decode_s(decoding)
        chunk = self.prefill_chunk()
        rest = max(prompt.total - prompt.done for prompt in self._prompts.values())
        # Rows whose prompt is done join the decoding ones within the step.
        return self._pacer.predict_decode_s(len(self._keys)) + self._pacer.predict_chunk_s(
            prefill_rows=waiting, longest=min(chunk, rest)
        )

    def prefill_chunk(self) -> int:
        """How many tokens of each waiting prompt the next step would process."""
        waiting = len(self._prompts)
        return self._pacer.chunk(prefill_rows=waiting, decode_rows=len(self._keys) - waiting)

    def _next_chunk(self) -> int:
        """As `prefill_chunk`, or 0 where first tokens are due and a long prompt would delay them.

        From the end of its prompt to its first token a row needs two steps. A prompt that takes
        many chunks anyway is not read on in these two, which are short then; prompts that end with
        this chunk are.
        """
        chunk = self.prefill_chunk()
        longest = max(prompt.total - prompt.done for prompt in self._prompts.values())
        return 0 if self._due and longest > chunk else chunk

    def step(self) -> StepResult:
        """One `next()`.

        Raises:
            MemoryError: MLX ran out of memory.
            GpuFaultElsewhereError: another process's fault on the GPU.
            Exception: any other; the batch is unusable.
        """
        waiting = len(self._prompts)
        decoding = len(self._keys) - waiting
        if waiting:
            self._generator.prefill_step_size = self._next_chunk()
        started = time.perf_counter()
        try:
            prompts, tokens = self._generator.next()
        except RuntimeError as error:
            raise_if_memory(error)
            raise_if_innocent(error)
            raise
        took_s = time.perf_counter() - started
        result = StepResult()
        wanted = self._wanted_logprobs
        logprobs = self._logprobs.read(tokens, wanted) if wanted else {}
        if self.logits_width is None and tokens:
            self.logits_width = int(tokens[0].logprobs.shape[-1])
        for token in tokens:
            result.tokens.append(self._take_token(token, logprobs.get(token.uid)))
        if waiting:
            self._take_prompts(prompts, result, decoding=decoding, took_s=took_s)
        elif decoding:
            self._pacer.saw_decode(rows=decoding, took_s=took_s)
        return result

    def _take_token(self, response: Any, logprobs: RowLogprobs | None) -> RowToken:
        self._due.discard(response.uid)
        key = self._keys[response.uid]
        finish = None if response.finish_reason is None else _FINISH[response.finish_reason]
        is_text = finish is not FinishReason.STOP
        grammar = self._grammars.get(response.uid)
        # The grammar has read this token already: the next one's mask is under way.
        if is_text and grammar is not None and grammar.is_over:
            finish = FinishReason.STOP
            # A model without an end-of-text token draws the grammar's, which is no part either.
            is_text = not grammar.is_end(response.token)
        if response.finish_reason is not None:
            self._forget_ended(response)
        elif finish is not None:
            self.remove(key)
        if not is_text:
            return RowToken(key=key, token=None, finish=finish)
        return RowToken(key=key, token=response.token, finish=finish, logprobs=logprobs)

    def _forget_ended(self, response: Any) -> None:
        """A row that has left the generator by itself; its prompt may serve others."""
        self._grammars.pop(response.uid, None)
        key = self._keys.pop(response.uid)
        del self._uids[key]
        self._wanted_logprobs.pop(response.uid, None)
        if key != WARMUP_KEY:
            with mx.stream(self._stream):
                self._prefixes.keep(response.all_tokens, response.prompt_cache)

    def _take_prompts(
        self, responses: Sequence[Any], result: StepResult, *, decoding: int, took_s: float
    ) -> None:
        longest = 0
        rows = 0
        for response in responses:
            prompt = self._prompts[response.uid]
            done, total = prompt.cached + response.progress[0], prompt.total
            if done >= total - 1:
                self._due.add(response.uid)
            if response.end_of_prompt:
                del self._prompts[response.uid]
                decoding += 1
            elif done > prompt.done:
                longest = max(longest, done - prompt.done)
                rows += 1
            prompt.done = done
            result.prefill.append(RowPrefill(key=self._keys[response.uid], done=done, total=total))
        self._pacer.saw_chunk(
            prefill_rows=rows, longest=longest, decode_rows=decoding, took_s=took_s
        )

    def close(self) -> None:
        """Removes every row; the process's limits are set back after it (E2, E3)."""
        for key in list(self._uids):
            self.remove(key)
        self._prefixes.clear()
        mx.synchronize(self._stream)
        self._generator.close()
