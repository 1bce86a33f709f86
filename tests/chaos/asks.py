"""What is asked, what the right answer is, and what has come of it so far."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgpack


class Kind(StrEnum):
    """What a request does to the process that answers it."""

    ORDINARY = "ordinary"
    POISON = "poison"
    """Kills its engine in each life."""
    STALL = "stall"
    """Stalls its engine in one life."""
    OUT_OF_MEMORY = "out of memory"
    """Ends one life as one that has run out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What comes if nothing disturbs it.

    Attributes:
        tokens: their ids.
        text_of: the text of the first ids of it; of half a character, nothing, unless final.
        finish: the reason of its end.
        prompt_tokens: how many the prompt has.
    """

    tokens: Sequence[int]
    text_of: Callable[[Sequence[int], bool], str]
    finish: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request; no two are equal, so that no two count as the same one after crashes.

    Attributes:
        number: of the request in this run; it makes the body unique.
        id: by which a raw client asks; of one that is sent again, another.
        model: who is to answer.
        prompt: text.
        max_tokens: tokens of the answer at most.
        seed: of a sampled answer; None for a greedy one.
        resume: whether it outlives its worker.
        timeout_s: its deadline; None for none.
        cancel_after: it is cancelled when that many tokens have come; None for never.
        client: on whose behalf.
        kind: what it does.
        answer: the right one.
    """

    number: int
    id: str
    model: str
    prompt: str
    max_tokens: int
    seed: int | None = None
    resume: bool = True
    timeout_s: float | None = None
    cancel_after: int | None = None
    client: str | None = None
    kind: Kind = Kind.ORDINARY
    answer: Answer

    def parameters(self) -> dict[str, Any]:
        """The body, and what the client library takes of it."""
        sampling = {} if self.seed is None else {"seed": self.seed, "temperature": 0.8}
        stop = [f"\x00{self.number}"]
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "stop": stop, **sampling}

    def limits(self) -> dict[str, Any]:
        """What a client says beside the body."""
        limits = {"timeout_s": self.timeout_s, "client": self.client}
        return {k: v for k, v in limits.items() if v is not None} | {"resume": self.resume}

    def frames(self) -> list[bytes]:
        """The request as it travels, written without any code of the product."""
        header = {"type": "generate", "id": self.id, "model": self.model, "v": 2}
        return [msgpack.packb(header | self.limits()), msgpack.packb(self.parameters())]


@dataclass(slots=True, kw_only=True, eq=False)
class Open:
    """What has come of a request so far.

    Attributes:
        ask: what was asked.
        id: by which the daemon knows it.
        sent_s: when, monotonic seconds.
        tokens, text: what has come.
        first_token_s, last_token_s: when.
        is_cancelled: whether its client has cancelled it.
        left_at_cancel: how many tokens were still to come then; 0 if it was not cancelled.
        was_struck: whether it ran when a process was killed.
        pauses: how many times it was to be paused.
        seen_paused: how many times, after its first token, it was seen to be.
        is_being_paused: from the command until it has been resumed.
        is_held: it has been seen to be paused, and nobody has resumed it yet.
    """

    ask: Ask
    id: str
    sent_s: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first_token_s: float | None = None
    last_token_s: float | None = None
    is_cancelled: bool = False
    left_at_cancel: int = 0
    was_struck: bool = False
    pauses: int = 0
    seen_paused: int = 0
    is_being_paused: bool = False
    is_held: bool = False

    @property
    def may_pause(self) -> bool:
        """Whether it may be paused, and is not."""
        return self.ask.resume and not self.is_being_paused

    def take(self, tokens: Sequence[int], text: str) -> None:
        """A piece has come."""
        self.text += text
        if tokens:
            self.last_token_s = time.monotonic()
            self.first_token_s = self.first_token_s or self.last_token_s
            self.tokens += tokens

    def cancel(self) -> None:
        """Its client is about to cancel it."""
        self.is_cancelled = True
        self.left_at_cancel = len(self.ask.answer.tokens) - len(self.tokens)

    @property
    def is_due_for_cancel(self) -> bool:
        """Whether its client is to cancel it now."""
        after = self.ask.cancel_after
        return after is not None and not self.is_cancelled and len(self.tokens) >= after


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a request ended, as its client saw it.

    Attributes:
        code: `stop`, `length` and `cancelled` of one that ended well, else the error's.
        is_error: which of the two.
        usage: prompt and completion tokens.
        seed: what sampling used.
        resumed: how often it continued after a crash.
        paused: how often it continued after a pause.
        detail: of the error.
    """

    code: str
    is_error: bool = False
    usage: tuple[int, int] = (0, 0)
    seed: int | None = None
    resumed: int = 0
    paused: int = 0
    detail: dict[str, Any] = field(default_factory=dict)


def text_of_bytes(ids: Sequence[int], is_whole: bool) -> str:
    """The text of the fake engine's tokens: each is a byte, three higher."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(bytes(token - 3 for token in ids), final=is_whole)
