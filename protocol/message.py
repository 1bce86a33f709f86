"""What all messages have in common, and types that both links use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


class Message:
    """A message that can be encoded; `TYPE` is its name on the wire."""

    __slots__ = ()
    TYPE: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely a token was: the natural logarithm of its probability, at least -9999.

    Attributes:
        token: its id.
        logprob: after biases, penalties and grammar, before temperature and the filters.
        text: the token alone; half a character shows as a replacement character.
    """

    token: int
    logprob: float
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """How likely one token of an answer was, and which others were the likeliest in its place.

    Attributes:
        chosen: the token of the answer.
        top: the likeliest ones, the likeliest first; `chosen` may be among them.
    """

    chosen: TokenLogprob
    top: list[TokenLogprob] = field(default_factory=list)
