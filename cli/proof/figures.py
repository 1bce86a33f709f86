"""The figures of a proof, and what each must be: pure judgements of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from mlxsup.protocol.text import size_text

KILLS = 2

ROUNDING = "rounding may do that with this model on this back-end"

SHORT_GAP_S = 1.0
"""A gap that is no longer than this passes, however soon the long prompt was read."""


class Verdict(StrEnum):
    """What became of a figure."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "not shown"
    """This machine or this model does not allow it; the sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing that was to be shown.

    Attributes:
        name: for programs.
        title: for people.
        verdict: what became of it.
        text: what was measured, a sentence without a full stop.
        values: the same for programs; names end with the unit.
    """

    name: str
    title: str
    verdict: Verdict
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_map(self) -> dict[str, Any]:
        """As `--json` and the saved file have it."""
        return asdict(self) | {"verdict": self.verdict.value, "values": dict(self.values)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What has come of an answer.

    Attributes:
        text: all of it.
        token_ids: likewise.
        resumed: how many times it continued after a crash.
        failure: why it has no end; empty if it has one.
    """

    text: str
    token_ids: Sequence[int]
    resumed: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A worker that was killed in the middle of an answer.

    Attributes:
        tokens: how many had come.
        pause_s: until the next one came; None if none did.
    """

    tokens: int
    pause_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How another model fared while a long prompt was read.

    Attributes:
        prompt_tokens: of that prompt.
        read_s: how long it was read.
        pieces: of its answer that the other model sent meanwhile.
        gap_s: its longest wait for a token meanwhile.
        alone_gap_s: the same while nothing else ran.
    """

    prompt_tokens: int
    read_s: float
    pieces: int
    gap_s: float
    alone_gap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    """What an unload has left.

    Attributes:
        held_bytes: what the processes held before.
        alive: the pids of those that still live.
        reserved_bytes: what the daemon keeps for them.
        gained_bytes: how much more is available on the machine than before; other programs count.
    """

    held_bytes: int
    alive: Sequence[int]
    reserved_bytes: int
    gained_bytes: int


def judge_seed(first: Answer, second: Answer, *, is_exact: bool) -> Figure:
    """The same request with the same seed, twice."""
    values = {"tokens": len(first.token_ids), "is_same": first.text == second.text}
    problem = _difference(first, second)
    if not problem:
        verdict, text = Verdict.PASSED, f"{len(first.token_ids)} tokens, twice the same text"
    elif is_exact or first.failure or second.failure:
        verdict, text = Verdict.FAILED, problem
    else:
        verdict, text = Verdict.SKIPPED, f"{problem}; {ROUNDING}"
    return _figure("seeded_answer", "same seed", verdict, text, values)


def judge_kills(alone: Answer, killed: Answer, kills: Sequence[Kill], *, is_exact: bool) -> Figure:
    """An answer whose worker was killed twice, next to the undisturbed one.

    Args:
        alone: the undisturbed answer.
        killed: the other one.
        kills: in their order.
        is_exact: whether the same tokens are promised after a resume: see docs/engine.md.
    """
    pauses = [kill.pause_s for kill in kills]
    values = {
        "kills": [asdict(kill) for kill in kills],
        "resumed": killed.resumed,
        "tokens": len(killed.token_ids),
        "is_same": killed.text == alone.text,
    }
    before = kills[0].tokens if kills else 0
    has_kept = list(killed.token_ids[:before]) == list(alone.token_ids[:before])
    problem = _difference(alone, killed)
    title = "two kills"
    if killed.failure or not has_kept or (problem and is_exact):
        verdict, text = Verdict.FAILED, problem
    elif len(kills) < KILLS:
        verdict = Verdict.SKIPPED
        text = f"the answer was complete before kill number {len(kills) + 1}"
    elif killed.resumed != KILLS:
        verdict = Verdict.FAILED
        text = f"the answer was resumed {killed.resumed} times, not {KILLS}"
    elif len(killed.token_ids) != len(alone.token_ids):
        verdict = Verdict.FAILED
        text = f"{len(killed.token_ids)} tokens instead of {len(alone.token_ids)}"
    elif problem:
        verdict, text = Verdict.SKIPPED, f"{problem}; {ROUNDING}"
    else:
        verdict = Verdict.PASSED
        shown = " and ".join(f"{pause:.1f} s" for pause in pauses if pause is not None)
        text = f"the text is the same, every byte; pauses of {shown}"
    return _figure("two_kills", title, verdict, text, values)


def judge_reading(reading: Reading) -> Figure:
    """The other model must not wait until the prompt has been read."""
    limit_s = max(SHORT_GAP_S, reading.read_s / 2)
    has_passed = reading.gap_s <= limit_s
    text = (
        f"while {reading.prompt_tokens} tokens were read in {reading.read_s:.1f} s, the other model"
        f" sent {reading.pieces} pieces; its longest gap was {reading.gap_s * 1000:.0f} ms"
        f" ({reading.alone_gap_s * 1000:.0f} ms alone)"
    )
    if not has_passed:
        text += f", more than {limit_s * 1000:.0f} ms"
    values = asdict(reading) | {"limit_s": limit_s}
    verdict = Verdict.PASSED if has_passed else Verdict.FAILED
    return _figure("other_model", "other model", verdict, text, values)


def not_read(reason: str) -> Figure:
    """There is no other model on this machine to look at."""
    return _figure("other_model", "other model", Verdict.SKIPPED, reason, {})


def judge_unload(unload: Unload) -> Figure:
    """After an unload nothing may be left of a model."""
    if unload.alive:
        pids = ", ".join(map(str, unload.alive))
        verdict, text = Verdict.FAILED, f"processes are left: {pids}"
    elif unload.reserved_bytes:
        verdict = Verdict.FAILED
        text = f"{size_text(unload.reserved_bytes)} are still reserved"
    else:
        verdict = Verdict.PASSED
        text = f"{size_text(unload.held_bytes)} are back; every process is gone"
    return _figure("unload", "memory after unload", verdict, text, asdict(unload))


def _figure(
    name: str, title: str, verdict: Verdict, text: str, values: Mapping[str, Any]
) -> Figure:
    return Figure(name=name, title=title, verdict=verdict, text=text, values=values)


def _difference(one: Answer, other: Answer) -> str:
    """How two answers differ; empty if they do not."""
    failure = one.failure or other.failure
    if failure:
        return f"an answer ended with an error: {failure}"
    if one.text != other.text:
        shorter = min(len(one.text), len(other.text))
        place = next((i for i in range(shorter) if one.text[i] != other.text[i]), shorter)
        return f"the texts differ from character {place + 1} on"
    if list(one.token_ids) != list(other.token_ids):
        return "the texts are the same, and the tokens differ"
    return ""
