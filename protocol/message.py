"""The classes of all messages, and types that both links use."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

from .ids import RequestId
from .version import PROTOCOL_VERSION

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with slots, as a checker of types sees it.

    While it runs, the class has an `__init__` alone: forty classes with generated methods would
    cost every command 20 ms, and every token the time of frozen assignments. `Record` has the other
    methods, once for all. A class that adds no field has empty `__slots__` instead.
    """
    return dataclass(slots=True, kw_only=True, repr=False, eq=False)(cls)


class Record:
    """The methods that records share: they compare and print by their fields."""

    __slots__: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine: Any = self  # a dataclass, as all that `record` makes
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(mine))

    def __repr__(self) -> str:
        mine: Any = self
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(mine))
        return f"{type(self).__name__}({shown})"


class Message(Record):
    """A message that can be encoded; `TYPE` is its name on the wire."""

    __slots__ = ()
    TYPE: ClassVar[str]


@record
class Command(Message):
    """Client → supervisor: a message that opens, changes or asks something.

    Attributes:
        id: the client's name for it, unique among its open ones.
        v: the sender's protocol version.
    """

    id: RequestId
    v: int = PROTOCOL_VERSION


@record
class TokenLogprob(Record):
    """The likelihood of a token: the natural logarithm of its probability, at least -9999.

    Attributes:
        token: its id.
        logprob: after biases, penalties and grammar, before temperature and the filters; of a
            token of the prompt, before all of them. None: the first one of a prompt.
        text: the token alone; half a character shows as a replacement character.
        raw_bytes: of a token that is no whole text, if the tokenizer tells them; otherwise empty.
    """

    token: int
    logprob: float | None
    text: str = ""
    raw_bytes: bytes = b""


@record
class Logprobs(Record):
    """The likelihood of one token of an answer, and the likeliest others in its place.

    Attributes:
        chosen: the token of the answer.
        top: the likeliest ones, the likeliest first; `chosen` may be among them.
    """

    chosen: TokenLogprob
    top: list[TokenLogprob] = field(default_factory=list)
