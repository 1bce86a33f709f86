"""The oracle's own account of what is logged of requests: a line for each that ends, and for each
that is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxsup.protocol.client_messages import Done

from .asks import Ask
from .violation import check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6


class LogLines:
    """What was said in the event at hand, and which requests have ended in it."""

    def __init__(self) -> None:
        self._closed: list[Ask] = []
        self._refused: list[tuple[str, str]] = []
        self._lines: list[dict[str, Any]] = []
        self._refusals: list[dict[str, Any]] = []

    def closes(self, ask: Ask) -> None:
        """A request is over; one that was never let in has no number."""
        if ask.number:
            self._closed.append(ask)

    def refused(self, id: str, code: str) -> None:
        """Nobody was let in under this id."""
        self._refused.append((id, code))

    def said(self, facts: dict[str, Any], *, is_refused: bool) -> None:
        """A line is logged."""
        (self._refusals if is_refused else self._lines).append(facts)

    def look(self, record: Record) -> None:
        """After an event: each has its line, and each line is about one."""
        said = [(facts["id"], facts["outcome"]) for facts in self._refusals]
        check("log: refusals", sorted(said) == sorted(self._refused), f"{said} {self._refused}")
        lines = list(self._lines)
        for ask in self._closed:
            found = [line for line in lines if _is_of(ask, line)]
            check("log: no line", found, f"{ask}: {self._lines}")
            _compare(record, ask, found[0])
            lines.remove(found[0])
        check("log: about nobody", not lines, lines)
        self._closed, self._refused, self._lines, self._refusals = [], [], [], []


def _is_of(ask: Ask, line: dict[str, Any]) -> bool:
    known = line["id"], line["model"], line["client"]
    is_same = known == (ask.id, ask.model, ask.account)
    return is_same and (ask.key is None or line["number"] == ask.key)


def _compare(record: Record, ask: Ask, line: dict[str, Any]) -> None:
    outcome = "gone"
    if ask.end is not None:
        outcome = str(ask.end.finish_reason) if isinstance(ask.end, Done) else ask.code
    prompt = len(ask.acceptance.prompt_tokens) // 4 if ask.acceptance else 0
    known = {
        "outcome": outcome,
        "prompt_tokens": prompt,
        "cached_tokens": ask.cached,
        "completion_tokens": ask.tokens,
    }
    said = {name: line[name] for name in known}
    check("log: facts", said == known, f"{ask}: {said}, {known}")
    counts = line.get("resumed", 0), line.get("paused", 0)
    check("log: resumes and pauses", counts == (ask.resumed, ask.paused), f"{ask}: {counts}")
    first_s = 0.0 if ask.first_token_at is None else ask.first_token_at - ask.arrived_at
    times = {"total_s": record.now - ask.arrived_at, "first_token_s": first_s}
    times["engine_s"] = ask.engine_s
    for name, seconds in times.items():
        is_right = abs(line[name] - seconds) < EPSILON_S
        check("log: seconds", is_right, f"{ask}: {name} {line[name]}, not {seconds}")
