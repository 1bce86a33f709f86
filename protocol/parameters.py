"""The parameters of a request that are numbers: what each takes, and what it is where absent.

The client and the worker check against this table, and docs/parameters.md repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

LARGEST = 2**31 - 1
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberParameter:
    """What one numeric parameter takes.

    Attributes:
        low: the least value.
        high: the greatest value.
        default: what it is where a request leaves it out; None: decided for each request.
        is_integer: whether fractions are refused.
        is_low_open: whether `low` itself is refused.
    """

    low: float
    high: float
    default: float | None
    is_integer: bool = False
    is_low_open: bool = False

    @property
    def expected(self) -> str:
        """What it takes, as a noun phrase."""
        if self.is_integer:
            return f"an integer from {self.low:d} to {self.high:d}"
        border = f"above {self.low:g} up" if self.is_low_open else f"from {self.low:g}"
        return f"a number {border} to {self.high:g}"

    def is_right(self, value: object) -> bool:
        """Whether a request may hold this value."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.is_integer and not isinstance(value, int):
            return False
        if math.isnan(value) or not self.low <= value <= self.high:
            return False
        return not (self.is_low_open and value == self.low)


def _integer(low: int, high: int, default: int | None) -> NumberParameter:
    return NumberParameter(low=low, high=high, default=default, is_integer=True)


NUMBERS: Mapping[str, NumberParameter] = MappingProxyType(
    {
        "max_tokens": _integer(1, LARGEST, None),
        "min_tokens": _integer(0, LARGEST, 0),
        "temperature": NumberParameter(low=0.0, high=10.0, default=0.0),
        "top_p": NumberParameter(low=0.0, high=1.0, default=1.0, is_low_open=True),
        "top_k": _integer(0, LARGEST, 0),
        "min_p": NumberParameter(low=0.0, high=1.0, default=0.0),
        "xtc_probability": NumberParameter(low=0.0, high=1.0, default=0.0),
        "xtc_threshold": NumberParameter(low=0.0, high=0.5, default=0.1),
        "repetition_penalty": NumberParameter(low=0.01, high=10.0, default=1.0),
        "presence_penalty": NumberParameter(low=-2.0, high=2.0, default=0.0),
        "frequency_penalty": NumberParameter(low=-2.0, high=2.0, default=0.0),
        "penalty_window": _integer(0, LARGEST, 20),
        "seed": _integer(0, MAX_SEED, None),
        "top_logprobs": _integer(0, 20, 0),
    }
)

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_window",
)
"""Those that decide which token is taken: a model's entry may give them other defaults."""

LOGIT_BIAS = NumberParameter(low=-100.0, high=100.0, default=None)
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 64

TOOL_CHOICES = ("auto", "none")

NOT_SUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "n": "send the request n times, each time with another seed; one batch answers them",
        "skip_special_tokens": (
            "the text leaves out what ends an answer and the markers of its parts, and shows every"
            " other token; leave out more by the ids in token_ids"
        ),
    }
)
"""Parameters that users of other servers look for, each with what to do instead."""


def sampling_defaults() -> dict[str, Any]:
    """What a request's sampling is where neither it nor the model's entry says otherwise."""
    return {name: NUMBERS[name].default for name in SAMPLING}
