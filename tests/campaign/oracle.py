"""Judge one answer: the tokens of an undisturbed run, no number missing, exactly one end."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.client.streams import Reader
from support.gateway.http_daemon import COMPLETE, SseReader

WHOLE = ("length", "stop", "complete")
"""Ends of an answer of which nothing is missing."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What one client has received of one request.

    Attributes:
        tokens, text: what has come so far; no tokens over HTTP.
        numbers: of the pieces; empty where the client library has checked them.
        ends: the reason of each end: a finish reason or the code of an error.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    numbers: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


def wrongs(
    answer: Answer,
    tokens: Sequence[int] | None = None,
    text: str | None = None,
    *,
    may_be_cut: bool = False,
) -> list[str]:
    """Return what is wrong with an answer that has ended; nothing if it kept what was promised.

    Args:
        answer: what came.
        tokens: of the undisturbed answer; None where its tokens are not known.
        text: of the undisturbed answer; None where its text is not known.
        may_be_cut: a beginning is right, too, if the end says that it is one.
    """
    found = []
    if len(answer.ends) != 1:
        found.append(f"ends: {answer.ends} instead of one")
    is_cut = may_be_cut and not any(end in WHOLE for end in answer.ends)
    if not is_cut and any(end not in WHOLE for end in answer.ends):
        found.append(f"ends: failed with {answer.ends}")
    if answer.numbers != list(range(len(answer.numbers))):
        found.append(f"numbers: pieces are missing, doubled or in another order: {answer.numbers}")
    if tokens is not None:
        right = list(tokens[: len(answer.tokens)] if is_cut else tokens)
        if answer.tokens != right:
            at = next(
                (n for n, pair in enumerate(zip(answer.tokens, right, strict=False))
                 if pair[0] != pair[1]), min(len(answer.tokens), len(right)))  # fmt: skip
            found.append(f"tokens: {len(answer.tokens)} of {len(right)}, another from {at} on")
    if text is not None and not (text.startswith(answer.text) if is_cut else answer.text == text):
        found.append(f"text: {answer.text[-80:]!r} instead of {text[-80:]!r}")
    return found


def text_of_fake(tokens: Sequence[int], *, is_whole: bool) -> str:
    """Return the text of the fake engine's tokens, each of which is a byte, three higher."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(bytes(token - 3 for token in tokens), final=is_whole)


def answer_of(reader: Reader | SseReader, timeout_s: float = 300.0) -> Answer:
    """Return what a reader has received, once it has ended."""
    reader.join(timeout_s)
    assert not reader.is_alive(), "an answer did not end"
    if isinstance(reader, SseReader):
        kinds = [one if one == "[DONE]" else str(one.get("type")) for one in reader.events]
        failed = [one for one in reader.events if one != "[DONE]" and one.get("error")]
        ends = ["complete" for kind in kinds if kind in COMPLETE]
        return Answer(text=reader.text, ends=ends + ["error" for _ in failed])
    if reader.error is not None:
        end = str(getattr(reader.error, "code", type(reader.error).__name__))
    else:
        end = reader.stream.result.finish_reason.value
    return Answer(tokens=list(reader.tokens), text=reader.text, ends=[end])


def must_be_whole(
    reader: Reader, tokens: Sequence[int], timeout_s: float = 300.0, *, may_be_cut: bool = False
) -> None:
    """Raise AssertionError unless a reader has received exactly this answer."""
    problems = wrongs(answer_of(reader, timeout_s), tokens, may_be_cut=may_be_cut)
    assert not problems, problems
