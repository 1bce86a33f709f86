"""Which prompts the next step reads, and how many tokens of each; pure, no MLX.

A step decodes one token for every running row and processes at most one chunk of the waiting
prompts. A chunk is padded to its longest row, so its cost is rows × longest row. The speed of a
machine is not known beforehand (ten tokens per second or ten thousand), so the first chunks are
small, and every step teaches the cost model.

Passes are paid for. While rows decode, a prompt takes `1 - decode_share` of the time: a pass opens
a debt, steps that only decode pay it back, and the next pass begins when it is paid. What arrives
meanwhile gathers, and is read together. The more prompts wait, the less is to be paid.

`TogetherScheduler` is for passes that read several prompts at once, `SerialScheduler` for those of
one row, of which a step may have several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .shapes import LARGEST, padded_tokens, pass_size

SMALLEST_CHUNK = 1
LARGEST_CHUNK = LARGEST
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

MOST_READ_TOKENS = 1024
"""Of all prompts in a pass of several ranks: long messages between them were seen to go wrong
(mlx#4342), and `known_answer` tries none that are longer."""

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

USUAL_EASE = 0.1
"""Weight of a new measurement of what a step without any prompt usually takes."""

LATE = 3.0
"""A step that took so many times as long as usual says nothing more about the usual."""

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
        """True if passes were measured that differ enough to tell a pass from its tokens."""
        return self._is_apart(self.largest_cost)

    @property
    def worthwhile(self) -> int:
        """Return the cost whose tokens take as long as the pass: with less, most of it is the
        pass."""
        return int(self.pass_s / self.unit_s) if self.unit_s else 0

    def predict_s(self, cost: int) -> float:
        """Seconds of a pass of that cost; 0 when unknown."""
        return 0.0 if self.unit_s is None else self.pass_s + self.unit_s * cost

    def saw_none(self, took_s: float) -> None:
        """Note the time of a step that has read nothing: a pass takes at least as long."""
        if self._least_s == 0.0 or took_s < self._least_s:
            self._least_s = took_s
        else:
            self._least_s += DRIFT * (took_s - self._least_s)

    def saw(self, cost: int, took_s: float, *, is_slow: bool) -> None:
        """Learn from a pass that has ended.

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
        """Forget passes above this cost, because those that follow are different."""
        self.largest_cost = min(self.largest_cost, cost)
        self._counted_cost = min(self._counted_cost, cost)

    # ---------------------------------------------------------------- inside

    def _unit_of(self, cost: int, took_s: float) -> float:
        """Return the seconds of each token of a pass, beside those that the pass is known to take
        itself."""
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


class CostModel:
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
        self._usual_decode_s = 0.0
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
        """Let the next chunk that is read have `tokens` tokens, to show what they cost; in the
        first step of a shape it shows nothing.

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
        """Forget what was measured until now, which had kernels compiled and will not be as slow
        again."""
        self._cost = PassCost()
        self._depth = 0
        self._decode_s, self._usual_decode_s, self._decode_rows = 0.0, 0.0, 1

    def target_s(self, *, decode_rows: int) -> float:
        """Return the seconds that the reading part of a step is planned to take."""
        return HEADROOM * (self._busy_target_s if decode_rows else self._idle_target_s)

    def begins_deep(self, known: int) -> None:
        """Make the next chunks smaller if a row begins after so many known tokens that these cost
        more.

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
        """Return the seconds that a chunk should take at most; 0 when unknown."""
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
        """Return the seconds that the decode part of a step should take at most; 0 when unknown."""
        return self._decode_s * max(1.0, rows / self._decode_rows) if rows else 0.0

    def usual_decode_s(self, rows: int) -> float:
        """Return how long the decode part of a step usually takes; 0 when unknown. What it takes at
        most would say after each late step that reading a prompt had taken no time."""
        return self._usual_decode_s * max(1.0, rows / self._decode_rows) if rows else 0.0

    def saw_decode(self, *, rows: int, took_s: float) -> None:
        """Learn from a step without prefill that has ended."""
        usual_s = self._usual_decode_s or took_s
        self._usual_decode_s = usual_s + USUAL_EASE * (min(took_s, LATE * usual_s) - usual_s)
        if rows >= self._decode_rows and took_s > self._decode_s:
            self._decode_s = took_s
        else:
            self._decode_s += EASE * (took_s - self._decode_s)
        self._decode_rows = rows
        self._cost.saw_none(took_s)

    def saw_chunk(
        self, *, prefill_rows: int, longest: int, decode_rows: int, took_s: float, depth: int = 0
    ) -> None:
        """Learn from a step with a prefill chunk that has ended; `took_s` is for the whole step,
        and `depth` is the number of tokens before the chunk."""
        cost = prefill_rows * longest
        if cost <= 0:
            return
        is_shown, self._shown = bool(self._shown), 0
        # A share of the step always counts for the chunk: estimates from slower times must not
        # make prefill look free.
        spent_s = max(took_s - self.predict_decode_s(decode_rows), took_s / 2)
        if self.is_first and (is_shown or self._is_preparation(cost, spent_s)):
            return
        if depth < self._depth or cost * APART >= self._cost.largest_cost:
            self._depth = depth
        self._cost.saw(cost, spent_s, is_slow=spent_s > self.target_s(decode_rows=1))

    def _is_preparation(self, cost: int, spent_s: float) -> bool:
        """True if the time of a shape's first pass says nothing about its tokens: it is slower than
        others have taught, but not by so much that the next one could meet the stall limit."""
        is_slower = spent_s > self._cost.predict_s(cost)
        return self._cost.is_told_apart and is_slower and spent_s <= self._ceiling_s


MOST_PASSED_OVER = 3
"""A prompt waits for so many passes over shorter ones; the next pass is its own."""


LITTLE_MORE = 1.25
"""Prompts share a pass even if it is estimated to take so much longer than passes of their own:
what it pads is noise beside the estimate, and it gives each of them its first token sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRead:
    """How far a prompt has been read by one step.

    Attributes:
        uid: the row's uid.
        done: how many tokens the model has read, without those that it knew.
        is_over: whether the row has joined those that decode.
        took_s: how long its pass took, if the row had a pass to itself.
    """

    uid: int
    done: int
    is_over: bool
    took_s: float | None = None


@dataclass(slots=True)
class _Prompt:
    """A row that does not decode yet; `known` of its tokens were read before it came, and `own` of
    these are kept nowhere else; `batch` is shared with those it is read with, once it is read. One
    that `follows` is not read until another prompt has read what both begin with. One with pictures
    `is_alone`: it shares no pass."""

    total: int
    known: int
    own: int
    done: int
    is_alone: bool = False
    batch: int | None = None
    passed_over: int = 0
    follows: bool = False

    @property
    def rest(self) -> int:
        """Return the number of tokens to read before the last one, which gives the answer's first
        token."""
        return max(self.total - 1 - self.done, 0)


WAITING_WEIGHT = 4
"""Rows that decode for which a prompt counts that waits beside another: its user has nothing yet,
while theirs get tokens. A share that does not yield lets the queue grow at traffic near what a
machine can do, and smaller batches make it slower: of 60 arrivals of new lengths at 16 per second
on two cores, the median first token came after 520 ms instead of 198, with 8 % fewer tokens per
second."""


class PrefillScheduler(ABC):
    """The waiting prompts, in the order of their turns.

    Attributes:
        pads: whether passes are padded to few shapes.

    Args:
        costs: sizes the chunks.
        decode_share: of the time, for the rows that decode beside one prompt; from 0 to below 1.
        most_prompts: how many a pass reads at most; None: any number.
    """

    def __init__(
        self, costs: CostModel, *, decode_share: float = 0.0, most_prompts: int | None = None
    ) -> None:
        self._most_prompts = most_prompts
        self.pads = False
        self._costs = costs
        self._decode_share = decode_share
        self._debt_s = 0.0
        self._is_behind = False  # the next step waits for the pass that the last one has sent
        self._prompts: dict[int, _Prompt] = {}
        self._due: set[int] = set()  # rows whose prompt was read, and whose first token is due

    def __len__(self) -> int:
        return len(self._prompts)

    def add(
        self, uid: int, *, total: int, known: int, own: int = 0, is_alone: bool = False
    ) -> None:
        """Add a row, which waits from now on.

        Args:
            uid: the row's uid.
            total: its tokens.
            known: how many of them need not be read.
            own: how many of those nothing but the row itself holds: what was kept for it alone.
            is_alone: whether its prompt shares no pass.
        """
        self._prompts[uid] = _Prompt(
            total=total, known=known, own=own, done=known, is_alone=is_alone
        )
        self._costs.begins_deep(known)

    def read_of(self, uid: int) -> int | None:
        """Return how many first tokens of a prompt are read or known; None if it is no longer here:
        all of them."""
        prompt = self._prompts.get(uid)
        return None if prompt is None else prompt.done

    def follows(self, uid: int) -> bool:
        """True if a prompt waits for another one."""
        return self._prompts[uid].follows

    def follow(self, uid: int) -> None:
        """Keep a prompt, of which nothing was read, from being read until `lead`."""
        self._prompts[uid].follows = True

    def lead(self, uid: int, known: int) -> None:
        """Let a prompt be read again, so many tokens of which are known now."""
        prompt = self._prompts[uid]
        prompt.follows = False
        prompt.known = prompt.done = known
        self._costs.begins_deep(known)

    def regroup(self, uid: int) -> bool:
        """Let a prompt that has been read in part go on in one pass with those that begin next;
        return whether passes are shared so."""
        return False

    def drop(self, uid: int) -> bool:
        """Removes a row; returns whether it holds anything that is kept nowhere else."""
        self._due.discard(uid)
        prompt = self._prompts.pop(uid, None)
        return prompt is None or prompt.done > prompt.known - prompt.own

    def got_tokens(self, uids: Iterable[int]) -> None:
        """Note that these rows have got a token, so their first ones are no longer due."""
        if self._due:
            self._due.difference_update(uids)

    def has_long(self, *, decode_rows: int) -> bool:
        """True if a prompt is left that takes more than the next chunk, or has taken one."""
        if not self._prompts:
            return False
        chunk = self.chunk(decode_rows=decode_rows)
        return any(
            prompt.rest > chunk or (prompt.rest > 0 and prompt.done > prompt.known)
            for prompt in self._prompts.values()
            if not prompt.follows
        )

    @abstractmethod
    def chunk(self, *, decode_rows: int) -> int:
        """Return the number of tokens of each waiting prompt that the next step would process."""

    @property
    def has_read(self) -> bool:
        """True if a prompt needs no more reading: it joins those that decode with the next step."""
        return bool(self.hold())

    @abstractmethod
    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""

    def hold(self) -> dict[int, int]:
        """Return the plan of a step that reads nothing: the prompts that need no more reading."""
        return {
            uid: 0
            for uid, prompt in self._prompts.items()
            if not prompt.rest and not prompt.follows
        }

    def plan(self, *, decode_rows: int) -> dict[int, int]:
        """Return the number of tokens to read of each prompt in the next step, by uid, in this
        order."""
        if not self._prompts:
            return {}
        if decode_rows and self._debt_s > 0.0:
            return self.hold()
        return self._next_turn(decode_rows=decode_rows)

    @abstractmethod
    def _next_turn(self, *, decode_rows: int) -> dict[int, int]:
        """Plan the next step for when the rows that decode have had their time."""

    @abstractmethod
    def predict_s(self, *, decode_rows: int) -> float:
        """Return the seconds that the reading part of the next step should take at most; 0 when
        unknown."""

    @abstractmethod
    def learn(
        self,
        reads: Sequence[PromptRead],
        sizes: Mapping[int, int],
        depths: Mapping[int, int],
        *,
        decode_rows: int,
        took_s: float,
        width: int,
    ) -> None:
        """Teach the cost model what a step took.

        Args:
            reads: the reads of the step.
            sizes: how many tokens each of them has read, by uid.
            depths: how many tokens were before those, by uid.
            decode_rows: rows that decoded in it.
            took_s: the whole step.
            width: see `take`.
        """

    def take(
        self,
        reads: Sequence[PromptRead],
        *,
        decode_rows: int,
        took_s: float,
        guesses_s: float = 0.0,
        width: int = 0,
    ) -> list[tuple[int, int, int, int]]:
        """Records what a step has read.

        Args:
            reads: of the step.
            decode_rows: rows that decoded in it.
            took_s: the whole step.
            guesses_s: of these, what rows that decode took besides, because they guessed.
            width: tokens that its longest pass was padded to; 0: it was not.

        Returns:
            The uid of each prompt that it has read a piece of, the tokens done and in all, and how
            many of them this step computed. The last token counts with them, although the pass over
            it draws the first answer token.
        """
        sizes: dict[int, int] = {}
        depths: dict[int, int] = {}
        progress = []
        for read in reads:
            prompt = self._prompts.pop(read.uid)
            done = prompt.known + read.done
            sizes[read.uid] = max(min(done, prompt.total - 1) - prompt.done, 0)
            depths[read.uid] = prompt.done
            if done >= prompt.total - 1:
                self._due.add(read.uid)
            if sizes[read.uid] or read.is_over:
                progress.append((read.uid, done, prompt.total, done - prompt.done))
            prompt.done = done
            if not read.is_over:
                self._prompts[read.uid] = prompt  # behind the others: each has its turn
        is_reading = [read.uid for read in reads if not read.is_over]
        has_read = any(sizes.values())
        if has_read or is_reading:  # a picture may be all that was read
            self._pass_over(is_reading)
        if has_read:
            own_s = took_s - guesses_s
            self.learn(reads, sizes, depths, decode_rows=decode_rows, took_s=own_s, width=width)
        elif decode_rows and not reads and not self._is_behind:
            self._costs.saw_decode(rows=decode_rows, took_s=took_s - guesses_s)
        has_read = has_read or bool(is_reading)
        self._account(
            decode_rows=decode_rows,
            took_s=took_s,
            guesses_s=guesses_s,
            is_held_up=has_read or self._is_behind,
        )
        self._is_behind = has_read
        return progress

    def _pass_over(self, turn: Collection[int]) -> None:
        """Note which prompts a step has left waiting that has read of these."""
        new_batch = max((p.batch or 0 for p in self._prompts.values()), default=0) + 1
        for uid, prompt in self._prompts.items():
            if uid in turn:
                prompt.passed_over = 0
                if prompt.batch is None:
                    prompt.batch = new_batch
            elif not prompt.follows:
                prompt.passed_over += 1

    def _account(
        self, *, decode_rows: int, took_s: float, guesses_s: float, is_held_up: bool
    ) -> None:
        """Opens the debt of a pass, or pays it back: with what rows usually take for their tokens,
        if the step was held up by a pass. It is never more than that of a pass of twice
        the target: what took longer was a surprise, and says nothing of the next."""
        if not decode_rows:
            self._debt_s = 0.0
            return
        decode_s = took_s
        if is_held_up:
            decode_s = min(self._costs.usual_decode_s(decode_rows) + guesses_s, took_s)
        per_s = self._debt_per_s(decode_rows)
        debt_s = self._debt_s + (took_s - decode_s) * per_s - decode_s
        most_s = 2 * self._costs.target_s(decode_rows=decode_rows) * per_s
        self._debt_s = min(max(debt_s, 0.0), most_s)

    def _debt_per_s(self, decode_rows: int) -> float:
        """Return the seconds that rows are to decode for each second of a pass."""
        waiting = sum(prompt.rest > 0 and not prompt.follows for prompt in self._prompts.values())
        others = WAITING_WEIGHT * max(waiting - 1, 0)
        share = min(self._decode_share, decode_rows / (decode_rows + others))
        return share / (1.0 - share)


class TogetherScheduler(PrefillScheduler):
    """A pass reads the same number of tokens of several prompts; one step has one such pass.

    Prompts that begin in the same pass stay together until their ends; one that is read alone is
    a turn of its own. The shortest rest comes
    first, and a longer one takes what the short ones leave, but waits for few of them.
    """

    def chunk(self, *, decode_rows: int) -> int:
        """See `PrefillScheduler.chunk`."""
        rows = len(self._turn()) if self._prompts else 1
        return self._costs.chunk(prefill_rows=rows, decode_rows=decode_rows)

    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""
        return self._costs.shared_pass_s(tokens)

    def regroup(self, uid: int) -> bool:
        """See `PrefillScheduler.regroup`."""
        prompt = self._prompts.get(uid)
        if prompt is None or prompt.is_alone or not prompt.rest:
            return False
        prompt.known, prompt.own, prompt.batch = prompt.done, 0, None
        return True

    def _next_turn(self, *, decode_rows: int) -> dict[int, int]:
        """Take the prompts whose turn it is, unless first tokens are due and a long prompt would
        delay them.

        From the end of its prompt to its first token a row needs two steps. A prompt that takes
        many chunks anyway pauses in these two, which are then short; prompts that end with this
        chunk do not.
        """
        turn = self._turn()
        if not turn:
            return self.hold()
        chunk = self._costs.chunk(prefill_rows=len(turn), decode_rows=decode_rows)
        longest = max(self._prompts[uid].rest for uid in turn)
        if longest > chunk:
            if self._due:
                return self.hold()
            if self.pads:
                chunk = pass_size(chunk, max(self._prompts[uid].done for uid in turn))
        return {uid: min(self._prompts[uid].rest, chunk) for uid in turn} | self.hold()

    def _turn(self) -> list[int]:
        """Choose the prompts of the next pass."""
        batches: dict[int, list[int]] = {}
        alone: list[list[int]] = []
        new: list[int] = []
        for uid, prompt in self._prompts.items():
            if not prompt.rest or prompt.follows:
                continue
            if prompt.is_alone:
                alone.append([uid])
            elif prompt.batch is None:
                new.append(uid)
            else:
                batches.setdefault(prompt.batch, []).append(uid)
        turns = [*batches.values(), *alone]
        if new:
            turns.append(self._gather(new))
        kept_waiting = [
            turn
            for turn in turns
            if max(self._prompts[uid].passed_over for uid in turn) >= MOST_PASSED_OVER
        ]
        return min(kept_waiting or turns, key=self._longest_rest, default=[])

    def _longest_rest(self, uids: Sequence[int]) -> int:
        return max(self._prompts[uid].rest for uid in uids)

    def _gather(self, uids: Sequence[int]) -> list[int]:
        """Choose, of the prompts that have not begun, those that begin together: the shortest, and
        the next ones as long as padding to them costs less than a pass of their own."""
        waited = [uid for uid in uids if self._prompts[uid].passed_over >= MOST_PASSED_OVER]
        by_length = sorted(uids, key=lambda uid: self._prompts[uid].rest)
        [first] = turn = waited[:1] or by_length[:1]
        longest = self._prompts[first].rest
        for uid in by_length:
            if uid == first:
                continue
            own = self._prompts[uid].rest
            apart_s = self._pass_s(len(turn), longest) + self._pass_s(1, own)
            longest = max(longest, own)
            if self._pass_s(len(turn) + 1, longest) > LITTLE_MORE * apart_s:
                break
            turn.append(uid)
        turn = turn[: self._most_prompts]
        if self.pads and not any(self._prompts[uid].done for uid in turn):
            # Each count is a shape of its own, and only these have run in the warm-up.
            turn = turn[: 1 << len(turn).bit_length() - 1]
        return turn

    def _pass_s(self, rows: int, tokens: int) -> float:
        size = padded_tokens(tokens) if self.pads else tokens
        return self._costs.predict_chunk_s(prefill_rows=rows, longest=size)

    def predict_s(self, *, decode_rows: int) -> float:
        """See `PrefillScheduler.predict_s`."""
        sizes = [size for size in self.plan(decode_rows=decode_rows).values() if size]
        return self._pass_s(len(sizes), max(sizes)) if sizes else 0.0

    def learn(
        self,
        reads: Sequence[PromptRead],
        sizes: Mapping[int, int],
        depths: Mapping[int, int],
        *,
        decode_rows: int,
        took_s: float,
        width: int,
    ) -> None:
        """Learn from one pass of all rows that were read, padded to the longest."""
        begun = sum(read.is_over for read in reads)
        read_sizes = [size for size in sizes.values() if size]
        self._costs.saw_chunk(
            prefill_rows=len(read_sizes),
            longest=width or max(read_sizes),
            decode_rows=decode_rows + begun,
            took_s=took_s,
            depth=min(depths[uid] for uid, size in sizes.items() if size),
        )


class SerialScheduler(PrefillScheduler):
    """A pass reads one prompt; one step has as many such passes as its time allows."""

    def chunk(self, *, decode_rows: int) -> int:
        """See `PrefillScheduler.chunk`."""
        return self._costs.chunk(prefill_rows=1, decode_rows=decode_rows)

    def shared_pass_s(self, tokens: int) -> float:
        """Nothing: each prompt has its own pass."""
        return 0.0

    def _next_turn(self, *, decode_rows: int) -> dict[int, int]:
        """Take the prompts whose turn it is.

        The first is read in any case, unless it is long and first tokens are due, which then
        come in a short step. Because each step moves what it has read to the end of the line,
        neither a long prompt nor the short ones wait for more than the other's next chunk.
        """
        chunk = self.chunk(decode_rows=decode_rows)
        left_s = self._costs.target_s(decode_rows=decode_rows)
        turns: dict[int, int] = {}
        for uid, prompt in self._prompts.items():
            if prompt.follows:
                continue
            if self._due and prompt.rest > chunk:
                break
            size = min(prompt.rest, chunk)
            took_s = self._predict_pass_s(size)
            if turns and size and not 0.0 < took_s <= left_s:
                break
            left_s -= took_s
            turns[uid] = size
        return turns

    def _predict_pass_s(self, size: int) -> float:
        return self._costs.predict_chunk_s(prefill_rows=1, longest=size) if size else 0.0

    def predict_s(self, *, decode_rows: int) -> float:
        """See `PrefillScheduler.predict_s`."""
        return sum(
            self._predict_pass_s(size) for size in self.plan(decode_rows=decode_rows).values()
        )

    def learn(
        self,
        reads: Sequence[PromptRead],
        sizes: Mapping[int, int],
        depths: Mapping[int, int],
        *,
        decode_rows: int,
        took_s: float,
        width: int,
    ) -> None:
        """Learn from each pass by itself; the first has waited for the decode step that was under
        way."""
        for read in reads:
            if sizes[read.uid] and read.took_s is not None:
                self._costs.saw_chunk(
                    prefill_rows=1,
                    longest=sizes[read.uid],
                    decode_rows=decode_rows,
                    took_s=read.took_s,
                    depth=depths[read.uid],
                )
                decode_rows = 0
