"""Hostile bytes at the decoder alone."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import msgpack

from mlxsup.protocol.client_messages import CLIENT_MESSAGES, ClientMessage
from mlxsup.protocol.codec import MAX_HEADER_BYTES, DecodeError, Decoder

from .frames import INVALID, changed_bytes, hostile

MAX_PEAK_BYTES = 4 * MAX_HEADER_BYTES
"""Of what one message makes the decoder allocate."""

MAX_MESSAGE_S = 0.1
"""CPU time of the longest message."""

TRACED = 5_000
"""That many messages are decoded with every allocation traced, which takes several times longer."""

ESCAPES = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
           ValueError, msgpack.UnpackException)  # fmt: skip
"""What a decoder may let escape by mistake; each is a finding."""

BY_THE_DECODER = (INVALID, "unsupported_version")


@dataclass(slots=True, kw_only=True)
class DecoderFigures:
    """What came of it.

    Attributes:
        refused: by code.
        kinds: messages of each kind.
        longest_s: CPU time of the longest message.
        peak_bytes: the most that one message made the decoder allocate.
        problems: what was wrong, one sentence each.
    """

    messages: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    peak_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For people."""
        refused = ", ".join(f"{n} {code}" for code, n in self.refused.most_common())
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kinds.items()))
        return (
            f"decoder: {self.messages} messages, {sum(self.refused.values())} refused ({refused}),"
            f" the longest {1000 * self.longest_s:.1f} ms of CPU"
            f" (target ≤{1000 * MAX_MESSAGE_S:.0f}), allocated at most"
            f" {self.peak_bytes / 1024:.0f} KiB (target ≤{MAX_PEAK_BYTES / 1024:.0f});"
            f" by kind: {kinds}"
        )


def fuzz_decoder(count: int, seed: int, *, max_message_s: float = MAX_MESSAGE_S) -> DecoderFigures:
    """Each message is decoded or refused with the right code; nothing else may come out.

    Args:
        max_message_s: CPU time that one message may take.
    """
    dice, figures = random.Random(seed), DecoderFigures()
    decoder, source = Decoder(CLIENT_MESSAGES, is_strict=True), hostile(dice)
    tracemalloc.start()
    try:
        while figures.messages < count:
            one = changed_bytes(dice) if dice.random() < 0.1 else next(source)
            for frames in one.messages:
                figures.kinds[one.kind] += 1
                figures.messages += 1
                # What these are refused for is found behind the decoder.
                is_loose = one.kind in ("odd", "duplicate id")
                _decode(decoder, frames, one.kind, () if is_loose else one.answers, figures)
            if figures.messages >= TRACED and tracemalloc.is_tracing():
                tracemalloc.stop()
    finally:
        tracemalloc.stop()
    _judge(figures, max_message_s)
    return figures


def _decode(
    decoder: Decoder[ClientMessage],
    frames: list[bytes],
    kind: str,
    expected: tuple[str, ...],
    figures: DecoderFigures,
) -> None:
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
    start_s = time.thread_time()
    try:
        decoder.decode(frames)
        outcome = ""
    except DecodeError as error:
        outcome = error.code.value
        figures.refused[outcome] += 1
    except ESCAPES as error:
        outcome = type(error).__name__
        figures.problems.append(f"{kind}: {error!r} came out of the decoder")
    figures.longest_s = max(figures.longest_s, time.thread_time() - start_s)
    if tracemalloc.is_tracing():
        figures.peak_bytes = max(figures.peak_bytes, tracemalloc.get_traced_memory()[1] - before)
    if expected and expected[0] in BY_THE_DECODER and outcome != expected[0]:
        figures.problems.append(f"{kind}: {outcome or 'decoded'} instead of {expected[0]}")


def _judge(figures: DecoderFigures, max_message_s: float) -> None:
    if figures.peak_bytes > MAX_PEAK_BYTES:
        figures.problems.append(f"{figures.peak_bytes} bytes were allocated for one message")
    if figures.longest_s > max_message_s:
        figures.problems.append(f"a message took {figures.longest_s:.3f} s")
    figures.problems = list(islice(dict.fromkeys(figures.problems), 20))
