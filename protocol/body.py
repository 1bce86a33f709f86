"""A request's body: the prompt and how to answer it. Opaque to the supervisor, read in the worker.

The client checks a body before it sends it and the worker checks it again before it acts on it,
with the same code, so both name the same parameter and the same range.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import ErrorCode, RemoteError

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """What a client asks of an engine. Exactly one of the three inputs is given.

    Attributes:
        prompt: text that is tokenised as it stands.
        prompt_tokens: token ids, taken as they are.
        messages: a chat, rendered with the model's template; each has `role` and `content`.
        max_tokens: tokens to generate at most; None for what still fits into the context.
        temperature: 0 picks the likeliest token; larger spreads further.
        top_p: sample from the smallest set of tokens whose probabilities reach this sum.
        stop: texts that end the answer; they are not part of it.
        seed: makes sampling repeatable; drawn at admission where absent.
    """

    prompt: str | None = None
    prompt_tokens: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: list[str] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("prompt", "prompt_tokens", "messages")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise invalid(
                "prompt",
                "exactly one of prompt, prompt_tokens and messages",
                shown=" and ".join(given) or "none of them",
            )
        self._check_input()
        self._check_parameters()

    def _check_input(self) -> None:
        if self.prompt is not None:
            if not isinstance(self.prompt, str):
                raise invalid("prompt", "a string", self.prompt)
            if not self.prompt:
                raise invalid("prompt", "a string that is not empty", shown="an empty one")
            _check_encodable("prompt", self.prompt)
        elif self.prompt_tokens is not None:
            tokens = self.prompt_tokens
            if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
                raise invalid("prompt_tokens", "a list of integers", tokens)
            if not tokens:
                raise invalid("prompt_tokens", "at least one token id", shown="an empty list")
            if min(tokens) < 0 or max(tokens) >= 2**32:
                raise invalid("prompt_tokens", "ids from 0 to 4294967295", shown="one outside")
        elif not isinstance(self.messages, list) or not self.messages:
            raise invalid("messages", "a list of at least one message", self.messages)
        else:
            for message in self.messages:
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise invalid("messages", "maps with a role (text) and its content", message)

    def _check_parameters(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_number("temperature", self.temperature, 0.0, 10.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_integer("seed", self.seed, 0, MAX_SEED)
        if self.stop is not None:
            stop = self.stop
            if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
                raise invalid(
                    "stop", "a list of strings that are not empty", shown="one that holds others"
                )
            if len(stop) > MAX_STOP_STRINGS or any(len(s) > MAX_STOP_LENGTH for s in stop):
                raise invalid(
                    "stop",
                    f"at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters",
                    shown=f"{len(stop)} strings, the longest of {max(map(len, stop))}",
                )
            for text in stop:
                _check_encodable("stop", text)

    def to_wire(self) -> dict[str, Any]:
        """The map that is sent: what differs from the defaults, in the order of the fields."""
        return {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default
        }

    @classmethod
    def from_wire(cls, value: object) -> RequestBody:
        """Reads what a client sent.

        Raises:
            RemoteError: `invalid_request`, naming the parameter and what was expected.
        """
        if not isinstance(value, dict):
            raise invalid("body", "a map", value)
        known = {f.name for f in fields(cls)}
        for name in value:
            if name not in known:
                raise RemoteError(
                    ErrorCode.INVALID_REQUEST,
                    f"unknown parameter {str(name)[:64]!r}; known are {', '.join(sorted(known))}",
                    detail={"parameter": str(name)[:64]},
                )
        return cls(**value)


def invalid(parameter: str, expected: str, got: object = None, *, shown: str = "") -> RemoteError:
    """The error for a value that is not what its parameter takes; never repeats a prompt.

    Args:
        parameter: its name.
        expected: what it takes, as a noun phrase.
        got: the value, of which only its kind or a number is shown.
        shown: what to say instead of that.
    """
    return RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"{parameter} takes {expected}, not {shown or _describe(got)}",
        detail={"parameter": parameter, "expected": expected},
    )


def _describe(value: object) -> str:
    if value is None or isinstance(value, bool | int | float):
        return repr(value)[:40]
    kinds = {"str": "text", "list": "this list", "dict": "this map", "bytes": "bytes"}
    return kinds.get(type(value).__name__, f"a {type(value).__name__}")


def _check_number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    expected = (
        f"a number {'above' if open_low else 'from'} {low:g} {'up ' if open_low else ''}to {high:g}"
    )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, expected, value)
    if not low <= value <= high or (open_low and value == low):
        raise invalid(name, expected, value)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(name, f"an integer from {low} to {high}", value)


def _check_encodable(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(name, "text that can be encoded as UTF-8", shown="lone surrogates") from None
