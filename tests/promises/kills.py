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
OVER = -1
STEPS = 40
"""Of a worker before it is struck: every row has gained tokens by then."""

TOKENS = 800
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

    Each worker has made some steps before: three deaths without a token would end a request, as
    they must.
    """
    for number in range(STRIKES_PER_WAVE):
        model = MODELS[number % len(MODELS)]

        def target(model: str = model) -> int | None:
            """The pid of a worker that is due; OVER once its model has nothing left to answer."""
            if not any(one.is_alive() for one in asked[model]):
                return OVER
            state = row(client, model)
            is_due = state["state"] == "READY" and state["steps"] >= STEPS
            return int(state["pid"]) if is_due else None

        pid = eventually(target, timeout_s=ANSWER_LIMIT_S, what="a worker at work")
        if pid == OVER:
            return number
        os.kill(pid, SIGNALS[number % len(SIGNALS)])
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
