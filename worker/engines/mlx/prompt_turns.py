"""Which prompts the next step reads, and how many tokens of each; pure, no MLX.

`TogetherTurns` is for passes that read several prompts at once, `SerialTurns` for those of one row,
of which a step may have several.

Passes are paid for. While rows decode, prompts take `1 - decode_share` of the time: a pass opens a
debt, steps that only decode pay it back, and the next pass begins when it is paid. What arrives
meanwhile gathers, and is read together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .prefill import PrefillPacer
from .shapes import largest_size, padded_tokens

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
    that `follows` is not read until another prompt has read what both begin with."""

    total: int
    known: int
    own: int
    done: int
    batch: int | None = None
    passed_over: int = 0
    follows: bool = False

    @property
    def rest(self) -> int:
        """How much must be read before the last token, which gives the first one of the answer."""
        return max(self.total - 1 - self.done, 0)


class PromptTurns(ABC):
    """The waiting prompts, in the order of their turns.

    Attributes:
        pads: whether passes are padded to few shapes.

    Args:
        pacer: sizes the chunks.
        decode_share: of the time, for the rows that decode; from 0 to below 1.
    """

    def __init__(self, pacer: PrefillPacer, *, decode_share: float = 0.0) -> None:
        self.pads = False
        self._pacer = pacer
        self._debt_per_s = decode_share / (1.0 - decode_share)
        self._debt_s = 0.0
        self._prompts: dict[int, _Prompt] = {}
        self._due: set[int] = set()  # rows whose prompt was read, and whose first token is due

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, uid: int, *, total: int, known: int, own: int = 0) -> None:
        """A row waits from now on.

        Args:
            uid: the row's uid.
            total: its tokens.
            known: how many of them need not be read.
            own: how many of those nothing but the row itself holds: what was kept for it alone.
        """
        self._prompts[uid] = _Prompt(total=total, known=known, own=own, done=known)
        self._pacer.begins_deep(known)

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
        self._pacer.begins_deep(known)

    def drop(self, uid: int) -> bool:
        """Removes a row; returns whether it holds anything that is kept nowhere else."""
        self._due.discard(uid)
        prompt = self._prompts.pop(uid, None)
        return prompt is None or prompt.done > prompt.known - prompt.own

    def got_token(self, uid: int) -> None:
        """A row has got a token, so its first one is no longer due."""
        self._due.discard(uid)

    def has_long(self, *, decode_rows: int) -> bool:
        """Whether a prompt is left that takes more than the next chunk, or has taken one."""
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
        """How many tokens of each waiting prompt the next step would process."""

    @property
    def has_read(self) -> bool:
        """Whether a prompt needs no more reading: it joins those that decode with the next step."""
        return bool(self.hold())

    @abstractmethod
    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""

    def hold(self) -> dict[int, int]:
        """The plan of a step that reads nothing: the prompts that need no more reading."""
        return {
            uid: 0
            for uid, prompt in self._prompts.items()
            if not prompt.rest and not prompt.follows
        }

    def plan(self, *, decode_rows: int) -> dict[int, int]:
        """How many tokens to read of which prompts in the next step, by uid, in this order."""
        if decode_rows and self._debt_s > 0.0:
            return self.hold()
        return self._next_turn(decode_rows=decode_rows)

    @abstractmethod
    def _next_turn(self, *, decode_rows: int) -> dict[int, int]:
        """The same if the rows that decode have had their time."""

    @abstractmethod
    def predict_s(self, *, decode_rows: int) -> float:
        """How long the reading part of the next step should take at most; 0 when unknown."""

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
        """Teaches the pacer what a step took.

        Args:
            reads: the reads of the step.
            sizes: how many tokens each of them has read, by uid.
            depths: how many tokens were before those, by uid.
            decode_rows: rows that decoded in it.
            took_s: the whole step.
            width: see `take`.
        """

    def take(
        self, reads: Sequence[PromptRead], *, decode_rows: int, took_s: float, width: int = 0
    ) -> list[tuple[int, int, int, int]]:
        """Records what a step has read.

        Args:
            reads: of the step.
            decode_rows: rows that decoded in it.
            took_s: the whole step.
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
        has_read = any(sizes.values())
        if has_read:
            self._pass_over(sizes)
            self.learn(reads, sizes, depths, decode_rows=decode_rows, took_s=took_s, width=width)
        elif decode_rows and not reads:
            self._pacer.saw_decode(rows=decode_rows, took_s=took_s)
        self._account(decode_rows=decode_rows, took_s=took_s, has_read=has_read)
        return progress

    def _pass_over(self, sizes: Mapping[int, int]) -> None:
        """Notes which prompts a pass has left waiting."""
        new_batch = max((p.batch or 0 for p in self._prompts.values()), default=0) + 1
        for uid, prompt in self._prompts.items():
            if sizes.get(uid):
                prompt.passed_over = 0
                if prompt.batch is None:
                    prompt.batch = new_batch
            elif not prompt.follows:
                prompt.passed_over += 1

    def _account(self, *, decode_rows: int, took_s: float, has_read: bool) -> None:
        """Opens the debt of a pass, or pays it back. It is never more than that of a pass of twice
        the target: what took longer was a surprise, and says nothing of the next."""
        if not decode_rows:
            self._debt_s = 0.0
            return
        decode_s = min(self._pacer.predict_decode_s(decode_rows), took_s) if has_read else took_s
        debt_s = self._debt_s + (took_s - decode_s) * self._debt_per_s - decode_s
        most_s = 2 * self._pacer.target_s(decode_rows=decode_rows) * self._debt_per_s
        self._debt_s = min(max(debt_s, 0.0), most_s)


class TogetherTurns(PromptTurns):
    """A pass reads the same number of tokens of several prompts; one step has one such pass.

    Prompts that begin in the same pass stay together until their ends. The shortest rest comes
    first, and a longer one takes what the short ones leave, but waits for few of them.
    """

    def chunk(self, *, decode_rows: int) -> int:
        """See `PromptTurns.chunk`."""
        rows = len(self._turn()) if self._prompts else 1
        return self._pacer.chunk(prefill_rows=rows, decode_rows=decode_rows)

    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""
        return self._pacer.shared_pass_s(tokens)

    def _next_turn(self, *, decode_rows: int) -> dict[int, int]:
        """The prompts whose turn it is, unless first tokens are due and a long prompt would delay
        them.

        From the end of its prompt to its first token a row needs two steps. A prompt that takes
        many chunks anyway pauses in these two, which are then short; prompts that end with this
        chunk do not.
        """
        turn = self._turn()
        if not turn:
            return self.hold()
        chunk = self._pacer.chunk(prefill_rows=len(turn), decode_rows=decode_rows)
        longest = max(self._prompts[uid].rest for uid in turn)
        if longest > chunk:
            if self._due:
                return self.hold()
            if self.pads:
                chunk = largest_size(chunk)
        return {uid: min(self._prompts[uid].rest, chunk) for uid in turn} | self.hold()

    def _turn(self) -> list[int]:
        """The prompts of the next pass."""
        batches: dict[int, list[int]] = {}
        new: list[int] = []
        for uid, prompt in self._prompts.items():
            if not prompt.rest or prompt.follows:
                continue
            if prompt.batch is None:
                new.append(uid)
            else:
                batches.setdefault(prompt.batch, []).append(uid)
        turns = list(batches.values())
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
        """Of the prompts that none was read of, those that begin together: the shortest, and the
        next ones as long as padding to them costs less than a pass of their own."""
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
        if self.pads:
            turn = turn[: 1 << len(turn).bit_length() - 1]  # each count is a shape of its own
        return turn

    def _pass_s(self, rows: int, tokens: int) -> float:
        size = padded_tokens(tokens) if self.pads else tokens
        return self._pacer.predict_chunk_s(prefill_rows=rows, longest=size)

    def predict_s(self, *, decode_rows: int) -> float:
        """See `PromptTurns.predict_s`."""
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
        """One pass of that many rows, padded to the longest."""
        begun = sum(read.is_over for read in reads)
        read_sizes = [size for size in sizes.values() if size]
        self._pacer.saw_chunk(
            prefill_rows=len(read_sizes),
            longest=width or max(read_sizes),
            decode_rows=decode_rows + begun,
            took_s=took_s,
            depth=min(depths[uid] for uid, size in sizes.items() if size),
        )


class SerialTurns(PromptTurns):
    """A pass reads one prompt; one step has as many such passes as its time allows."""

    def chunk(self, *, decode_rows: int) -> int:
        """See `PromptTurns.chunk`."""
        return self._pacer.chunk(prefill_rows=1, decode_rows=decode_rows)

    def shared_pass_s(self, tokens: int) -> float:
        """Nothing: each prompt has its own pass."""
        return 0.0

    def _next_turn(self, *, decode_rows: int) -> dict[int, int]:
        """The prompts whose turn it is.

        The first is read in any case, unless it is long and first tokens are due, which then
        come in a short step. Because each step moves what it has read to the end of the line,
        neither a long prompt nor the short ones wait for more than the other's next chunk.
        """
        chunk = self.chunk(decode_rows=decode_rows)
        left_s = self._pacer.target_s(decode_rows=decode_rows)
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
        return self._pacer.predict_chunk_s(prefill_rows=1, longest=size) if size else 0.0

    def predict_s(self, *, decode_rows: int) -> float:
        """See `PromptTurns.predict_s`."""
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
        """Each pass by itself; the first has waited for the decode step that was under way."""
        for read in reads:
            if sizes[read.uid] and read.took_s is not None:
                self._pacer.saw_chunk(
                    prefill_rows=1,
                    longest=sizes[read.uid],
                    decode_rows=decode_rows,
                    took_s=read.took_s,
                    depth=depths[read.uid],
                )
                decode_rows = 0
