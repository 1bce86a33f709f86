"""Which prompts the next step reads, and how many tokens of each; pure, no MLX.

`TogetherTurns` is for passes that read a piece of every waiting prompt at once, `SerialTurns` for
those of one row, of which a step may have several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .prefill import PrefillPacer


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
    these are kept nowhere else."""

    total: int
    known: int
    own: int
    done: int

    @property
    def rest(self) -> int:
        """How much must be read before the last token, which gives the first one of the answer."""
        return max(self.total - 1 - self.done, 0)


class PromptTurns(ABC):
    """The waiting prompts, in the order of their turns.

    Args:
        pacer: sizes the chunks.
    """

    def __init__(self, pacer: PrefillPacer) -> None:
        self._pacer = pacer
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
        )

    def longest(self, *, decode_rows: int) -> int:
        """How many tokens of a prompt the next step reads at most; 0 if none waits."""
        if not self._prompts:
            return 0
        longest = max(1 + prompt.rest for prompt in self._prompts.values())
        return min(self.chunk(decode_rows=decode_rows), longest)

    @abstractmethod
    def chunk(self, *, decode_rows: int) -> int:
        """How many tokens of each waiting prompt the next step would process."""

    @property
    def has_read(self) -> bool:
        """Whether a prompt needs no more reading: it joins those that decode with the next step."""
        return any(not prompt.rest for prompt in self._prompts.values())

    @abstractmethod
    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""

    @abstractmethod
    def hold(self) -> dict[int, int]:
        """The plan of a step that reads nothing."""

    @abstractmethod
    def plan(self, *, decode_rows: int) -> dict[int, int]:
        """How many tokens to read of which prompts in the next step, by uid, in this order."""

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
    ) -> None:
        """Teaches the pacer what a step took.

        Args:
            reads: the reads of the step.
            sizes: how many tokens each of them has read, by uid.
            depths: how many tokens were before those, by uid.
            decode_rows: rows that decoded in it.
            took_s: the whole step.
        """

    def take(
        self, reads: Sequence[PromptRead], *, decode_rows: int, took_s: float
    ) -> list[tuple[int, int, int, int]]:
        """Records what a step has read.

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
        self.learn(reads, sizes, depths, decode_rows=decode_rows, took_s=took_s)
        return progress


class TogetherTurns(PromptTurns):
    """A pass reads the same number of tokens of every prompt; one step has one such pass."""

    def chunk(self, *, decode_rows: int) -> int:
        """See `PromptTurns.chunk`."""
        return self._pacer.chunk(prefill_rows=len(self._prompts), decode_rows=decode_rows)

    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""
        return self._pacer.shared_pass_s(tokens)

    def plan(self, *, decode_rows: int) -> dict[int, int]:
        """The chunk for all, or 0 if first tokens are due and a long prompt would delay them.

        From the end of its prompt to its first token a row needs two steps. A prompt that takes
        many chunks anyway pauses in these two, which are then short; prompts that end with this
        chunk do not.
        """
        chunk = self.chunk(decode_rows=decode_rows)
        is_paused = bool(self._due) and any(1 + p.rest > chunk for p in self._prompts.values())
        return self.hold() if is_paused else dict.fromkeys(self._prompts, chunk)

    def hold(self) -> dict[int, int]:
        """The generator passes over all prompts, and reads no token of them."""
        return dict.fromkeys(self._prompts, 0)

    def predict_s(self, *, decode_rows: int) -> float:
        """See `PromptTurns.predict_s`."""
        if not self._prompts:
            return 0.0
        rest = max(1 + prompt.rest for prompt in self._prompts.values())
        chunk = self.chunk(decode_rows=decode_rows)
        return self._pacer.predict_chunk_s(
            prefill_rows=len(self._prompts), longest=min(chunk, rest)
        )

    def learn(
        self,
        reads: Sequence[PromptRead],
        sizes: Mapping[int, int],
        depths: Mapping[int, int],
        *,
        decode_rows: int,
        took_s: float,
    ) -> None:
        """One pass of that many rows, padded to the longest."""
        begun = sum(read.is_over for read in reads)
        read_sizes = [size for size in sizes.values() if size]
        self._pacer.saw_chunk(
            prefill_rows=len(read_sizes),
            longest=max(read_sizes, default=0),
            decode_rows=decode_rows + begun,
            took_s=took_s,
            depth=min((depths[uid] for uid, size in sizes.items() if size), default=0),
        )


class SerialTurns(PromptTurns):
    """A pass reads one prompt; one step has as many such passes as its time allows."""

    def chunk(self, *, decode_rows: int) -> int:
        """See `PromptTurns.chunk`."""
        return self._pacer.chunk(prefill_rows=1, decode_rows=decode_rows)

    def shared_pass_s(self, tokens: int) -> float:
        """Nothing: each prompt has its own pass."""
        return 0.0

    def plan(self, *, decode_rows: int) -> dict[int, int]:
        """The prompts whose turn it is.

        The first is read in any case, unless it is long and first tokens are due, which then
        come in a short step. Because each step moves what it has read to the end of the line,
        neither a long prompt nor the short ones wait for more than the other's next chunk.
        """
        chunk = self.chunk(decode_rows=decode_rows)
        left_s = self._pacer.target_s(decode_rows=decode_rows)
        turns: dict[int, int] = {}
        for uid, prompt in self._prompts.items():
            if self._due and prompt.rest > chunk:
                break
            size = min(prompt.rest, chunk)
            took_s = self._predict_pass_s(size)
            if turns and size and not 0.0 < took_s <= left_s:
                break
            left_s -= took_s
            turns[uid] = size
        return turns

    def hold(self) -> dict[int, int]:
        """Nothing but the prompts that need no more reading."""
        return {uid: 0 for uid, prompt in self._prompts.items() if not prompt.rest}

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
