"""The numeric parameters of a request: what each takes, and its default.

`Sampling` is the only list of those that decide which token is picked: the client, the worker, the
configuration and its documents read names, ranges, defaults and descriptions from its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

MOST_TOKENS = 2**31 - 1
"""More than any context has."""

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberParameter:
    """The values that one numeric parameter takes.

    Attributes:
        low: the least value.
        high: the greatest value.
        default: its value if a request leaves it out; None: decided for each request.
        is_integer: whether fractions are refused.
        is_low_open: whether `low` itself is refused.
        says: what it does, in words.
    """

    low: float
    high: float
    default: float | None
    is_integer: bool = False
    is_low_open: bool = False
    says: str = ""

    @property
    def expected(self) -> str:
        """Return what it takes, as a noun phrase."""
        if self.is_integer:
            return f"an integer from {self.low:d} to {self.high:d}"
        border = f"above {self.low:g} and up" if self.is_low_open else f"from {self.low:g}"
        return f"a number {border} to {self.high:g}"

    def is_right(self, value: object) -> bool:
        """Return whether a request may hold this value."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.is_integer and not isinstance(value, int):
            return False
        if not self.low <= value <= self.high:  # nor is NaN between them
            return False
        return not (self.is_low_open and value == self.low)


def _number(default: float, low: float, high: float, says: str, **more: bool) -> Any:
    number = NumberParameter(low=low, high=high, default=default, says=says, **more)
    return field(default=default, metadata={"number": number})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The parameters by which a token is picked; a model's entry may set other defaults
    (docs/http-api.md).

    A parameter is added here, in `client.api.GenerateParameters` and in `worker/engines/mlx/`.
    """

    temperature: float = _number(
        0.0, 0.0, 10.0, "0 picks the likeliest token; higher values vary more"
    )
    top_p: float = _number(
        1.0, 0.0, 1.0, is_low_open=True,
        says="nucleus sampling: keep tokens up to this probability mass",
    )  # fmt: skip
    top_k: int = _number(
        0, 0, MOST_TOKENS, is_integer=True,
        says="sample from this many of the likeliest tokens; 0: from all",
    )  # fmt: skip
    min_p: float = _number(
        0.0, 0.0, 1.0, "drop tokens below this share of the likeliest token's probability"
    )
    xtc_probability: float = _number(
        0.0, 0.0, 1.0, "how often to leave out all likely tokens but the least likely"
    )
    xtc_threshold: float = _number(
        0.1, 0.0, 0.5, "the probability from which xtc counts a token as likely"
    )
    repetition_penalty: float = _number(
        1.0, 0.01, 10.0, "divides the logits of tokens that have already appeared"
    )
    presence_penalty: float = _number(
        0.0, -2.0, 2.0, "subtracted from the logits of tokens that have already appeared"
    )
    frequency_penalty: float = _number(
        0.0, -2.0, 2.0, "the same, once for each time they have appeared"
    )
    penalty_window: int = _number(
        20, 0, MOST_TOKENS, is_integer=True,
        says="how many of the latest tokens the penalties look at; 0: all",
    )  # fmt: skip

    def unusual(self) -> dict[str, float]:
        """Return the fields that differ from their defaults."""
        return {
            one.name: value
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        }


SAMPLING: Mapping[str, NumberParameter] = MappingProxyType(
    {f.name: f.metadata["number"] for f in fields(Sampling)}
)
"""What each of them takes."""

NUMBERS: Mapping[str, NumberParameter] = MappingProxyType(
    {
        "max_tokens": NumberParameter(low=0, high=MOST_TOKENS, default=None, is_integer=True),
        "min_tokens": NumberParameter(low=0, high=MOST_TOKENS, default=0, is_integer=True),
        **SAMPLING,
        "seed": NumberParameter(low=0, high=MAX_SEED, default=None, is_integer=True),
        "top_logprobs": NumberParameter(low=0, high=20, default=0, is_integer=True),
        "prompt_logprobs": NumberParameter(low=0, high=20, default=None, is_integer=True),
    }
)

LOGIT_BIAS = NumberParameter(low=-100.0, high=100.0, default=None)
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 64

NOT_SUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "n": "send the request n times with different seeds; one batch answers them",
        "skip_special_tokens": (
            "the text leaves out end-of-text tokens and the markers of an answer's parts, and shows"
            " every other token; to leave out more, use the ids in token_ids"
        ),
    }
)
"""Parameters that users of other servers may expect, each with what to do instead."""


MAKERS_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that are taken from a generation_config.json."""


def makers_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the makers of a model sample; empty if they do not, or do not say.

    Args:
        generation_config: the content of generation_config.json, as transformers writes it; values
            that no request may have are left out.
    """
    has_temperature = generation_config.get("temperature") is not None
    if not generation_config.get("do_sample", has_temperature):
        return {}
    given = {name: generation_config.get(name) for name in MAKERS_SAMPLING}
    right = {name: value for name, value in given.items() if SAMPLING[name].is_right(value)}
    return {"temperature": 1.0, **right}
