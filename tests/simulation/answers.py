"""What a played engine answers: tokens and text that follow from the acceptance alone.

Another seed, other parameters, another prompt or another place give other tokens, so that whatever
is lost or changed on the way shows in the answer.
"""

from __future__ import annotations

from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import Acceptance

from .plan import Prompt

HOLDS_BACK = 5
"""The text of a token that this divides comes with the next one, as half a character does."""

TOKENS = 997
STRIDE = 17

REASONING_TOKENS = 2
"""That many tokens at the beginning of an answer may be reasoning."""


def accept(prompt: Prompt, generation: int) -> Acceptance:
    """What a worker makes of a prompt; each life draws another seed."""
    return Acceptance(
        prompt_tokens=pack_tokens([prompt.number] + [7] * (prompt.number % 5 + prompt.tokens)),
        opening="<think>" if prompt.number % 4 == 0 else "",
        parameters={"temperature": prompt.number % 3 / 2, "max_tokens": prompt.length},
        seed=prompt.number * 1000 + generation,
        fingerprint="f",
    )


def number_of(acceptance: Acceptance) -> int:
    """The prompt's number, which its tokens tell."""
    return int.from_bytes(acceptance.prompt_tokens[:4], "little")


def token(acceptance: Acceptance, index: int) -> int:
    """The token at this place of the answer, whichever life computes it."""
    return (_base(acceptance) + index * STRIDE) % TOKENS + 1


def shown(acceptance: Acceptance, count: int, *, is_end: bool = False) -> str:
    """The text that is shown once this many tokens are known."""
    base = _base(acceptance)
    ends = range(base, base + count * STRIDE, STRIDE)
    if ends and not is_end and (ends[-1] % TOKENS + 1) % HOLDS_BACK == 0:
        ends = ends[:-1]
    return "".join([f"<{one % TOKENS + 1}>" for one in ends])


def _base(acceptance: Acceptance) -> int:
    warmth = int(acceptance.parameters["temperature"] * 2)
    return number_of(acceptance) * 7919 + acceptance.seed * 31 + warmth * 101


def logprobs(acceptance: Acceptance, tokens: list[int]) -> list[Logprobs] | None:
    """How likely these tokens were, if the prompt asked for that."""
    if number_of(acceptance) % 5:
        return None
    return [Logprobs(chosen=TokenLogprob(token=one, logprob=-one / TOKENS)) for one in tokens]


def channel(acceptance: Acceptance, index: int) -> Channel:
    """Which part of the answer a token belongs to."""
    is_reasoning = acceptance.opening and index < REASONING_TOKENS
    return Channel.REASONING if is_reasoning else Channel.CONTENT


def length(acceptance: Acceptance) -> int:
    """Tokens of the whole answer."""
    return int(acceptance.parameters["max_tokens"])


def finish(acceptance: Acceptance) -> FinishReason:
    """How the answer ends by itself."""
    return FinishReason.STOP if number_of(acceptance) % 3 == 0 else FinishReason.LENGTH


def warning(acceptance: Acceptance) -> str | None:
    """What the worker warns of with the first token."""
    number = number_of(acceptance)
    return f"warning of {number}" if number % 7 == 0 else None
