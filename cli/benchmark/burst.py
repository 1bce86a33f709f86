"""Answers that were asked for at the same time, and what their times say. No clock, no sockets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


class AnswerError(Exception):
    """An answer is not whole, or not as long as it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What a burst of requests has shown.

    Attributes:
        sent_s: when each prompt was sent, in seconds after the first.
        times: when each token of each answer was there, by the same clock.
        prompt_tokens: of all prompts together.
        cached_tokens: of these, the ones that needed no prefill.
        interrupted: answers that were paused, or continued after a crash.
        waited: answers that waited in the queue; 0 if nobody tells.
    """

    sent_s: Sequence[float]
    times: Sequence[Sequence[float]]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    interrupted: int = 0
    waited: int = 0

    @property
    def whole_per_s(self) -> float:
        """Tokens per second, from the first prompt sent to the last token."""
        return sum(map(len, self.times)) / max(own[-1] for own in self.times)

    @property
    def steady_per_s(self) -> float:
        """Tokens per second while all streams run; 0 if they never do at the same time."""
        begin = max(own[0] for own in self.times)
        end = min(own[-1] for own in self.times)
        if end <= begin:
            return 0.0
        return sum(begin < at <= end for own in self.times for at in own) / (end - begin)

    @property
    def first_s(self) -> float:
        """Time to first token, the median of all."""
        pairs = zip(self.times, self.sent_s, strict=True)
        return statistics.median(own[0] - sent for own, sent in pairs)

    @property
    def gaps_s(self) -> list[float]:
        """From each token of each answer to its next."""
        return [later - earlier for own in self.times for earlier, later in pairwise(own)]

    @property
    def stream_per_s(self) -> float | None:
        """Tokens per second of one answer from its first token on, the median of all; None if
        their tokens came at one time."""
        speeds = [(len(own) - 1) / (own[-1] - own[0]) for own in self.times if own[-1] > own[0]]
        return statistics.median(speeds) if speeds else None

    @property
    def prefill_per_s(self) -> float:
        """Tokens of all prompts per second, from the first prompt sent until each answer has
        begun."""
        return (self.prompt_tokens - self.cached_tokens) / max(own[0] for own in self.times)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that this percentage of them does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
