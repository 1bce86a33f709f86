"""P1, over every API: answers under kill after kill are those of an undisturbed daemon."""

from __future__ import annotations

import os
import signal
import time

from mlxsup.client import Client

from . import daemons
from .bounds import equals
from .daemons import ready
from .entries import real_entry
from .measure import CPU, Figure, Measure, Place, Values
from support.daemon import row
from support.eventually import eventually
from support.http_daemon import STREAMED, HttpDaemon, SseReader, asked_at
from support.streams import Reader

MODELS = ("m", "n")
WAVES = 4
OF_EACH_PATH = 5
OVER_SOCKET = 9
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)
"""In turns: deaths from outside, which accuse no request."""

STRIKES_PER_WAVE = 11
TOKENS = 500
"""Of each answer: it must last for all strikes of its wave."""

ANSWER_LIMIT_S = 600.0

Answer = SseReader | Reader


class Daemon(HttpDaemon, daemons.Daemon):
    """One with a gateway; if it does not start, nothing can be judged."""


def ask(daemon: Daemon, client: Client, wave: int) -> dict[str, list[Answer]]:
    """Ask everything of a wave at once, and return the answers by model."""
    answers: dict[str, list[Answer]] = {name: [] for name in MODELS}
    for number in range(OF_EACH_PATH):
        model = MODELS[number % len(MODELS)]
        for path in STREAMED:
            body = asked_at(path, f"{wave} {path} {number}", TOKENS) | {"model": model}
            answers[model].append(SseReader(daemon, body, path))
    for number in range(OVER_SOCKET):
        model = MODELS[number % len(MODELS)]
        sampled = {"temperature": 0.8, "seed": number} if number % 4 else {}
        reader = Reader(client, model, f"{wave} {number}", max_tokens=TOKENS, **sampled)
        answers[model].append(reader)
    return answers


def pieces(answer: Answer) -> int:
    """How much of it has come."""
    return len(answer.events if isinstance(answer, SseReader) else answer.tokens)


def flat(asked: dict[str, list[Answer]]) -> list[Answer]:
    """All answers of a wave."""
    return [one for answers in asked.values() for one in answers]


def texts(answers: list[Answer]) -> list[str]:
    """Each whole answer; an empty text for one that failed or was cut."""
    for one in answers:
        one.join(ANSWER_LIMIT_S)
        assert not one.is_alive(), "an answer did not end"
    return [
        one.text if (one.is_complete if isinstance(one, SseReader) else one.error is None) else ""
        for one in answers
    ]


def reason(answer: Answer) -> str:
    """Why an answer failed; empty if it did not."""
    if isinstance(answer, Reader):
        return repr(answer.error or "")
    return "" if answer.text and answer.is_complete else repr(answer.events[-1:])


def strike(client: Client, asked: dict[str, list[Answer]]) -> int:
    """Signal the worker of one model after the other, and return how many signals were sent before
    the wave was over.

    Each answer of the model has moved on since the last one: three deaths without a token would
    end a request, as they must.
    """
    before: dict[str, list[int]] = {name: [0] * len(answers) for name, answers in asked.items()}
    for number in range(STRIKES_PER_WAVE):
        model = MODELS[number % len(MODELS)]
        answers = asked[model]

        def is_due(model: str = model, answers: list[Answer] = answers) -> bool:
            moved = zip(answers, before[model], strict=True)
            have_moved = all(pieces(one) >= had + 5 or not one.is_alive() for one, had in moved)
            is_over = not any(one.is_alive() for one in answers)
            return is_over or (have_moved and row(client, model)["state"] == "READY")

        eventually(is_due, timeout_s=ANSWER_LIMIT_S, what="a worker at work")
        if not any(one.is_alive() for one in answers):
            return number
        before[model] = [pieces(one) for one in answers]
        os.kill(row(client, model)["pid"], SIGNALS[number % len(SIGNALS)])
    return STRIKES_PER_WAVE


def kills(place: Place) -> Values:
    """Ask in waves, undisturbed and then under signals, and compare the texts."""
    models = {name: real_entry(place) | {"max_concurrency": 16} for name in MODELS}
    with Daemon(models) as daemon, daemon.client() as client:
        for name in MODELS:
            ready(client, name)
        strikes = unequal = lost = count = 0
        began_s = time.monotonic()
        for wave in range(WAVES):
            undisturbed = flat(ask(daemon, client, wave))
            right = texts(undisturbed)
            assert all(right), [reason(one) for one in undisturbed]
            asked = ask(daemon, client, wave)
            strikes += strike(client, asked)
            got = texts(flat(asked))
            count += len(got)
            lost += got.count("")
            unequal += sum(a != b for a, b in zip(got, right, strict=True) if a)
        return {
            "lost": lost,
            "unequal": unequal,
            "strikes": strikes,
            "answers": count,
            "took": time.monotonic() - began_s,
        }


def _count(key: str, what: str, **bound: object) -> Figure:
    return Figure(key=key, what=what, unit="", digits=0, **bound)  # type: ignore[arg-type]


MEASURES = (
    Measure(
        promise="P1",
        name="kills",
        where=CPU,
        round=kills,
        most_repeats=1,
        figures=(
            _count("answers", "answers over the socket and all four HTTP APIs, 29 at once"),
            _count(
                "strikes",
                "signals that their workers get meanwhile",
                bound=equals(WAVES * STRIKES_PER_WAVE),
            ),
            _count("lost", "the same: answers that failed or were cut", bound=equals(0)),
            _count("unequal", "the same: answers with another text", bound=equals(0)),
        ),
    ),
)
