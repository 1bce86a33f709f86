"""The batch: the rows that the passes run, by their requests' keys, one `step` at a time.

Everything here belongs to the thread that made the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason

from ...engine import Row, RowLogprobs, RowPrefill, RowSetAside, RowToken, StepResult
from ...text.grammar import RowGrammar
from .adapters import path_of
from .batch_modes import BatchMode
from .drafts import Drafts
from .limits import clear_cache
from .loader import judging_errors
from .logprobs import LogprobReader, PromptLogprobs
from .pictures import prefix_ids
from .prefill import CostModel, PrefillScheduler
from .prefix_cache import Found, KeptRows, PrefixCache
from .prefix_index import Tokens, as_tokens, shared_length
from .prompt_batch import NewRow
from .sampler import make_draws
from .shapes import PLAN_S, SeenShapes, Shape, padded_tokens, pass_shape

WARMUP_KEY = RequestKey(-1)
"""The first key of the rows that warm up the engine, which have it and those below it: they end by
their length, and leave nothing behind."""

MOST_TOLD = 256
"""Tokens that a step reads of each prompt at most while one wants to know how likely they are: the
texts of 20 others at each place take the thread that steps 15 ms."""

LEAST_SHARED = 256
"""A prompt waits for another one that begins with so many of the same tokens, unless reading them
costs less than a pass by itself."""

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def _warms_up(key: RequestKey) -> bool:
    return key <= WARMUP_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """A row whose prompt waits for that of another row.

    Attributes:
        row: the one that waits.
        leader: the other row's uid.
        fork: how many first tokens both have.
    """

    row: Row
    leader: int
    fork: int


class MlxBatch:
    """Rows that prefill and decode.

    Attributes:
        mode: how rows share passes.
        clock: seconds that this process has worked, to time the steps with.
        logits_width: width of the model's output, known after the first token.
        gives_numbers: whether no log-probability of the first token was NaN; minus infinity is
            that of an id that can never be drawn.

    Args:
        mode: how rows share passes; closed with the batch.
        scheduler: decides which prompts are read next.
        stream: made on this thread.
        stop_tokens: ids that end an answer.
        spared_tokens: ids that XTC never leaves out.
        costs: sizes the prefill chunks; the same as those of `scheduler`.
        prefixes: caches of earlier rows.
        adapters: their names, by slot from 1.
        shapes: of its steps; None: the device compiles nothing for a new one.
        drafts: what the rows of `mode` guess by; None: they do not.
        clock: see the attribute.
    """

    def __init__(
        self,
        mode: BatchMode,
        scheduler: PrefillScheduler,
        *,
        stream: mx.Stream,
        stop_tokens: Sequence[int],
        spared_tokens: Sequence[int] = (),
        costs: CostModel,
        prefixes: PrefixCache,
        adapters: Iterable[str] = (),
        shapes: SeenShapes | None = None,
        drafts: Drafts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.mode = mode
        self._scheduler = scheduler
        self._stream = stream
        self._costs = costs
        self._prefixes = prefixes
        self._slot_of = {name: slot for slot, name in enumerate(adapters, 1)}
        self._slots: dict[int, int] = {}  # of rows with an adapter
        self._shapes = shapes
        self._drafts = drafts
        self.clock = mode.clock = clock
        self._kept = KeptRows()
        self._ended: list[tuple[list[Any], list[int]]] = []  # in the last step: caches, tokens
        self._uids: dict[RequestKey, int] = {}
        self._keys: dict[int, RequestKey] = {}
        self._wanted_logprobs: dict[int, int] = {}
        self._grammars: dict[int, RowGrammar] = {}
        self._prompts: dict[int, PromptLogprobs] = {}  # of rows whose prompt is not read yet
        self._ids: dict[int, Tokens] = {}  # that rows began with, if others may share them
        self._followers: dict[int, Follower] = {}
        self._lent: dict[int, int] = {}  # how many tokens followers have got, until they are read
        self._silent: set[int] = set()  # rows that end without a token
        self._stop_tokens = list(stop_tokens)
        self._spared = list(spared_tokens)
        self._logprobs = LogprobReader()
        self.logits_width: int | None = None
        self.gives_numbers = True

    def pad(self) -> None:
        """Pad passes over prompts to few shapes from now on."""
        self._shapes = self._shapes or SeenShapes()
        self._scheduler.pads = True
        self.mode.width_of = self._width_of
        if self._drafts is not None:
            self._drafts.pads = True

    def _width_of(self, rows: int, tokens: int, held: int, is_even: bool) -> int:
        """See `SeenShapes.width_for`; the rows of the warm-up are there to show new shapes."""
        assert self._shapes is not None
        is_warm_up = _warms_up(next(iter(self._uids), WARMUP_KEY))
        plan_s = 0.0 if is_warm_up else PLAN_S
        token_s = self._costs.token_s
        return self._shapes.width_for(
            rows, tokens, held, is_even=is_even, plan_s=plan_s, token_s=token_s
        )

    @property
    def is_padded(self) -> bool:
        """True if passes over prompts are padded to few shapes."""
        return self._scheduler.pads

    def has_run(self, rows: int, tokens: int) -> bool:
        """True if a pass over the beginnings of that many prompts has run, padded as it is."""
        shape = pass_shape(rows, padded_tokens(tokens), 0, is_even=True)
        return self._shapes is not None and self._shapes.has_pass(shape)

    @property
    def costs(self) -> CostModel:
        """Sizes the prefill chunks."""
        return self._costs

    @judging_errors
    def insert(self, row: Row) -> int:
        """Adds a row; its prefill starts with the next step.

        Returns:
            How many of its tokens need no prefill.

        Raises:
            ValueError: its key is in the batch already.
        """
        if row.key in self._uids:
            raise ValueError(f"request {row.key} is in the batch already")
        self.settle()
        tokens = prefix_ids(row.tokens, row.pictures) + row.delivered
        slot = self._slot_of[row.adapter] if row.adapter else 0
        path = path_of(tokens, slot)
        ids = as_tokens(path)
        with mx.stream(self._stream):
            prompt = None
            own = self._kept.take(row.key, path)
            if row.prompt_logprobs is None:
                found = own or self._find(ids)
            else:  # nothing kept tells how likely tokens were
                own, found = None, Found()
                prompt = PromptLogprobs(row.tokens, row.prompt_logprobs)
            cached = found.count
            ending = self._ending_of(row)
            uid = self._uids[row.key] = self.mode.insert(
                NewRow(
                    tokens=tokens[cached:],
                    known=tokens[:cached],
                    cache=found.cache,
                    checkpoints=self._prefixes.plan_checkpoints(row, found),
                    max_tokens=max(row.max_tokens - len(row.delivered), 1),
                    draws=make_draws(row, ending=ending, spared=self._spared, adapter=slot),
                    stops=StopSequences([(token,) for token in ending]),
                    prompt=prompt,
                    pictures=row.pictures,
                )
            )
        if slot:
            self._slots[uid] = slot
        if prompt is not None:
            self._prompts[uid] = prompt
        if not row.max_tokens:
            self._silent.add(uid)
        self._keys[uid] = row.key
        self._scheduler.add(
            uid,
            total=len(tokens),
            known=cached,
            own=cached if own else 0,
            is_alone=bool(row.pictures),
        )
        if prompt is None and self._prefixes.room.max_bytes and not _warms_up(row.key):
            self._ids[uid] = ids
            if own is None:
                self._follow(uid, row)
        if row.top_logprobs is not None:
            self._wanted_logprobs[uid] = row.top_logprobs
        if row.grammar is not None:
            self._grammars[uid] = row.grammar
        return cached

    def _find(self, ids: Tokens) -> Found:
        """What is known of a prompt: from rows that have ended, or from one that is there, which
        lends what it has read if its cache can be cut back to what both have."""
        found = self._prefixes.find(ids)
        shared = {uid: shared_length(own[:-1], ids[:-1]) for uid, own in self._ids.items()}
        lenders = [uid for uid, count in shared.items() if self._has_read(uid, count)]
        lender = max(lenders, key=lambda uid: shared[uid], default=None)
        cuttable = self._prefixes.room.cuttable_tokens
        if lender is None or cuttable == 0 or not self._is_much(shared[lender] - found.count):
            return found
        cache, held = self.mode.copy(lender)
        if cuttable is None or len(held) <= cuttable:
            self._prefixes.keep(self._path(lender, held), cache)
        return self._prefixes.find(ids)

    def _path(self, uid: int, tokens: list[int]) -> list[int]:
        return path_of(tokens, self._slots.get(uid, 0))

    def _has_read(self, uid: int, count: int) -> bool:
        done = self._scheduler.read_of(uid)
        return done is None or done >= count

    def _is_much(self, shared: int) -> bool:
        return shared >= LEAST_SHARED and not self._scheduler.shared_pass_s(shared)

    def _follow(self, uid: int, row: Row) -> None:
        """Let a prompt wait if one that is not read yet has much of it, which is then read once."""
        mine, known = self._ids[uid], self._scheduler.read_of(uid)
        if known is None:
            return
        leader, fork = uid, known
        for other, own in self._ids.items():
            count = 0 if other == uid else shared_length(own[:-1], mine[:-1])
            if (
                count > fork
                and not self._has_read(other, count)
                and not self._scheduler.follows(other)
            ):
                leader, fork = other, count
        if self._is_much(fork - known):
            fork = self.mode.stop_at(leader, fork)
            self._scheduler.follow(uid)
            self._followers[uid] = Follower(row=row, leader=leader, fork=fork)

    def _progress_of_followers(self, moved: Collection[RequestKey]) -> Iterator[RowPrefill]:
        """Yield how far those have come that wait for one of these rows: what it has read of their
        prompts, so that their clients hear of it, too."""
        for uid, one in self._followers.items():
            done = self._scheduler.read_of(one.leader)
            if self._keys.get(one.leader) in moved and done is not None:
                total = len(self._ids[uid])
                yield RowPrefill(key=one.row.key, done=min(done, one.fork), total=total)

    def _let_followers_go(self) -> None:
        """Let prompts be read that wait for one that has read what they share, or has left; the
        rest of that one is then read in the same pass."""
        leaders = set()
        for uid, one in list(self._followers.items()):
            if one.leader in self._ids and not self._has_read(one.leader, one.fork):
                continue
            del self._followers[uid]
            ids = self._ids[uid]
            known = self._scheduler.read_of(uid) or 0
            with mx.stream(self._stream):
                found = self._find(ids)
            if found.cache is not None and found.count > known:
                known = found.count
                self._lent[uid] = min(known, len(one.row.tokens))
                self.mode.restart(uid, known, found.cache)
                leaders.add(one.leader)
            self._scheduler.lead(uid, known)
            self._follow(uid, one.row)
        for uid in leaders:
            if self._scheduler.regroup(uid):
                with mx.stream(self._stream):
                    cache, held = self.mode.copy(uid)
                self.mode.restart(uid, len(held), cache)

    def _ending_of(self, row: Row) -> list[int]:
        """The ids that end this row's answer."""
        if _warms_up(row.key):
            return []
        own = [] if row.ignore_eos else self._stop_tokens
        return [*own, *row.stop_token_ids]

    @judging_errors
    def remove(self, *keys: RequestKey) -> None:
        """Takes rows out at once, in one change; unknown keys are ignored (D6)."""
        self._keep(self._take_out(keys).values())

    @judging_errors
    def set_aside(self, *keys: RequestKey, keep: bool) -> list[RowSetAside]:
        """See `Engine.set_aside`.

        What is kept is all tokens but the one that was computed ahead: the row reads that one when
        it returns, as the next step would have.
        """
        ahead = self._compute_ahead(keys)
        over = {key for key, token in ahead.items() if token.finish is not None}
        # Of a prompt whose logits are wanted, those of its beginning are read again with the rest.
        over |= {key for key in keys if self._uids.get(key) in self._prompts}
        caches = self._take_out(keys, of_warm_up=keep)
        if keep:
            with mx.stream(self._stream):
                for key in caches.keys() - over:
                    self._kept.keep(key, *caches.pop(key))
        else:
            self._kept.drop(*keys)
        self._keep(caches.values())
        return [
            RowSetAside(key=key, token=ahead.get(key), is_kept=key in self._kept) for key in keys
        ]

    def drop_kept(self, *keys: RequestKey) -> None:
        """See `Engine.drop_kept`."""
        self._kept.drop(*keys)

    def free_kept(self, *, spared: RequestKey | None = None) -> None:
        """See `Engine.free_kept`."""
        self._kept.clear(spared=spared)

    @property
    def kept_bytes(self) -> int:
        """The size of what is kept of rows that were set aside."""
        return self._kept.held_bytes

    def _compute_ahead(self, keys: Iterable[RequestKey]) -> dict[RequestKey, RowToken]:
        """The tokens of these rows that the next step would return; they must leave now."""
        uids = [self._uids[key] for key in keys if key in self._uids]
        responses = self.mode.ahead(uids)
        for response in responses:
            if response.uid in self._grammars:
                self._grammars[response.uid].accept(response.token)
        logprobs = self._read_logprobs(responses)
        tokens = [self._take_token(*each) for each in zip(responses, logprobs, strict=True)]
        return {token.key: token for token in tokens}

    def _read_logprobs(self, responses: Sequence[Any]) -> Sequence[RowLogprobs | None]:
        wanted = self._wanted_logprobs
        return self._logprobs.read(responses, wanted) if wanted else [None] * len(responses)

    def _take_out(
        self, keys: Iterable[RequestKey], *, of_warm_up: bool = False
    ) -> dict[RequestKey, tuple[list[Any], list[int]]]:
        """Takes rows out in one change; gives the caches that hold anything new, those of the
        warm-up only if asked for."""
        out: dict[int, RequestKey] = {}
        slots: dict[int, int] = {}
        kept: set[int] = set()
        for key in keys:
            uid = self._uids.pop(key, None)
            if uid is None:
                continue
            out[uid] = key
            slots[uid] = self._slots.pop(uid, 0)
            del self._keys[uid]
            self._wanted_logprobs.pop(uid, None)
            self._grammars.pop(uid, None)
            self._prompts.pop(uid, None)
            self._silent.discard(uid)
            self._forget_start(uid)
            if self._scheduler.drop(uid) and (of_warm_up or not _warms_up(key)):
                kept.add(uid)
        caches = self.mode.remove(list(out), kept=kept) if out else {}
        return {
            out[uid]: (cache, path_of(tokens, slots[uid]))
            for uid, (cache, tokens) in caches.items()
        }

    def _forget_start(self, uid: int) -> None:
        self._ids.pop(uid, None)
        self._followers.pop(uid, None)
        self._lent.pop(uid, None)

    def _keep(self, caches: Iterable[tuple[list[Any], list[int]]]) -> None:
        """Keeps what rows have read for other rows with the same prefix; these may go on then."""
        with mx.stream(self._stream):
            for cache, tokens in caches:
                self._prefixes.keep(tokens, cache)
        if self._followers:
            self._let_followers_go()

    @judging_errors
    def settle(self) -> None:
        """See `Engine.settle`; nothing reads or frees what is kept before this was done."""
        if self._ended:
            ended, self._ended = self._ended, []
            self._keep(ended)

    @judging_errors
    def give_back(self, *, keeps_prefixes: bool = False) -> None:
        """See `Engine.give_back`."""
        self.settle()
        if not keeps_prefixes:
            self._prefixes.clear()
        self.wait()
        clear_cache()
        # CUDA's pool gives others what was freed at the next wait, and there may be none for long.
        self.wait()

    def wait(self) -> None:
        """Waits for the pass under way: until its end the memory of rows that left is not free."""
        mx.synchronize(self._stream)

    def row_count(self) -> int:
        """How many rows there are, in prefill or decode."""
        return len(self._keys)

    def books(self) -> tuple[int, ...]:
        """How many entries each book has that is kept of rows: all 0 once there is no row."""
        rows = (self._keys, self._uids, self._scheduler, self._kept, self._silent, self._ended)
        asked = (self._wanted_logprobs, self._grammars, self._prompts)
        shared = (self._ids, self._followers, self._lent, self._slots)
        return tuple(len(book) for book in (*rows, *asked, *shared))

    def predict_step_s(self) -> float:
        """How long the next step should take at most; 0 when unknown."""
        # Rows whose prompt is done join the decoding ones within the step.
        predicted_s = self._costs.predict_decode_s(len(self._keys)) + self._scheduler.predict_s(
            decode_rows=self._decode_rows()
        )
        if self._drafts is not None and (rows := self._decode_rows()):
            predicted_s += self._drafts.predict_s(rows)
        if self._shapes is not None and self._keys:
            plan = self._scheduler.plan(decode_rows=self._decode_rows())
            predicted_s += self._shapes.extra_s(self._shape(plan))
        return predicted_s

    def has_long_prompt(self) -> bool:
        """See `Engine.has_long_prompt`."""
        return self._scheduler.has_long(decode_rows=self._decode_rows())

    def has_decoding(self) -> bool:
        """See `Engine.has_decoding`."""
        return self._decode_rows() > 0 or self._scheduler.has_read

    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""
        return self._scheduler.shared_pass_s(tokens)

    def _decode_rows(self) -> int:
        return len(self._keys) - len(self._scheduler)

    def _shape(self, plan: Mapping[int, int]) -> Shape:
        """Of a step with this plan."""
        sizes = [size for size in plan.values() if size]
        return self._decode_rows(), len(sizes), max(sizes, default=0)

    def step(self) -> StepResult:
        """One token for each row that decodes, or more, and the next chunk of the prompts.

        Raises:
            MemoryError: MLX ran out of memory.
            GpuFaultElsewhereError: another process's fault on the GPU.
            Exception: any other; the batch is unusable.
        """
        plan = self._scheduler.plan(decode_rows=self._decode_rows())
        if self._prompts:
            plan = {uid: min(size, MOST_TOLD) for uid, size in plan.items()}
        return self._run(plan)

    def decode(self) -> StepResult:
        """One token for each row that decodes; raises what `step` raises."""
        return self._run(self._scheduler.hold())

    @judging_errors
    def _run(self, plan: dict[int, int]) -> StepResult:
        self.settle()
        decoding = self._decode_rows()
        shape = self._shape(plan)
        started = self.clock()
        reads, tokens = self.mode.step(plan)
        passes_s = self.clock() - started
        if checkpoints := self.mode.take_checkpoints():
            self._keep(
                (cache, self._path(uid, tokens)) for uid, (cache, tokens) in checkpoints.items()
            )
        passes = self.mode.take_shapes()
        if self._shapes is not None:
            self._costs.is_first = self._shapes.saw(shape, passes)
        logprobs = self._read_logprobs(tokens)
        if self.logits_width is None and tokens:
            self.logits_width = int(tokens[0].logprobs.shape[-1])
            with mx.stream(self._stream):
                self.gives_numbers = not mx.any(mx.isnan(tokens[0].logprobs)).item()
        guessed, guesses_s = None, 0.0
        if self._drafts is not None:
            counts, guesses_s = self._drafts.take()
            guessed = {self._keys[uid]: each for uid, each in counts.items()} or None
        self._scheduler.got_tokens(token.uid for token in tokens)
        taken = []
        for token, own in zip(tokens, logprobs, strict=True):
            taken.append(self._take_token(token, own))
            if token.finish_reason is not None:
                self._forget_ended(token)
        # Those that a grammar has ended; the others left by themselves.
        if ended := [token.key for token in taken if token.finish is not None]:
            self._ended += self._take_out(ended).values()
        decode_s = self._costs.predict_decode_s(decoding) + guesses_s
        progress = [
            self._progress(uid, done, total, computed)
            for uid, done, total, computed in self._scheduler.take(
                reads,
                decode_rows=decoding,
                took_s=passes_s,
                guesses_s=guesses_s,
                width=max((width for _, width, *_ in passes), default=0),
            )
        ]
        if self._followers:
            progress += self._progress_of_followers({read.key for read in progress})
            self._let_followers_go()
        took_s = self.clock() - started
        return StepResult(
            tokens=taken,
            prefill=progress,
            took_s=took_s,
            decode_s=min(decode_s, took_s),
            is_new_shape=self._costs.is_first,
            guessed=guessed,
        )

    def _progress(self, uid: int, done: int, total: int, computed: int) -> RowPrefill:
        key, prompt = self._keys[uid], self._prompts.get(uid)
        if prompt is None:
            known = self._lent.pop(uid, None)
            return RowPrefill(key=key, done=done, total=total, computed=computed, known=known)
        if done >= total - 1:
            del self._prompts[uid]
        found = prompt.take()
        return RowPrefill(key=key, done=done, total=total, computed=computed, logprobs=found)

    def _take_token(self, response: Any, logprobs: RowLogprobs | None) -> RowToken:
        key = self._keys[response.uid]
        finish = None if response.finish_reason is None else _FINISH[response.finish_reason]
        is_text = finish is not FinishReason.STOP
        if finish is not None and response.uid in self._silent:
            return RowToken(key=key, token=None, finish=FinishReason.LENGTH)
        grammar = self._grammars.get(response.uid)
        # The grammar has read this token already: the next one's mask is under way.
        if is_text and grammar is not None and grammar.is_over:
            finish = FinishReason.STOP
            # A model without an end-of-text token draws the grammar's, which is not part either.
            is_text = not grammar.is_end(response.token)
        if not is_text:
            return RowToken(key=key, token=None, finish=finish, ended_by=response.token)
        return RowToken(key=key, token=response.token, finish=finish, logprobs=logprobs)

    def _forget_ended(self, response: Any) -> None:
        """A row that has left the batch by itself; its prompt may serve others."""
        self._grammars.pop(response.uid, None)
        key = self._keys.pop(response.uid)
        del self._uids[key]
        self._wanted_logprobs.pop(response.uid, None)
        self._silent.discard(response.uid)
        self._forget_start(response.uid)
        path = self._path(response.uid, response.all_tokens)
        self._slots.pop(response.uid, None)
        if not _warms_up(key):
            self._ended.append((response.prompt_cache, path))

    @judging_errors
    def close(self) -> None:
        """Removes every row; the process's limits are restored afterwards (E2, E3)."""
        self.remove(*self._uids)
        self._ended.clear()
        self._kept.clear()
        self._prefixes.clear()
        self.wait()
        self.mode.close()
