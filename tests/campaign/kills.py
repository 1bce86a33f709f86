"""P1 over every API: answers under kill after kill are those of an undisturbed daemon."""

from __future__ import annotations

import os
import signal
from functools import partial

from mlxsup.client import Client

from .oracle import Answer, answer_of, wrongs
from .scenario import CPU, FAKE, Figure, Place, Scenario, Values, count, equals
from .watch import SOON, GatewayDaemon, ready
from support.client.streams import Reader
from support.daemon.daemon import fake, row
from support.eventually import eventually
from support.gateway.http_daemon import STREAMED, SseReader, asked_at

MODELS = ("m", "n")
OF_EACH_PATH = 5
OVER_SOCKET = 9
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)
"""In turns: deaths from outside, which accuse no request."""

STRIKES = 11
"""Of a wave."""

OVER = -1
STEPS = 40
"""Of a worker before it is struck: every row has gained tokens by then, and three deaths without a
token would end a request, as they must."""

LIMIT_S = 600.0

Readers = dict[str, list[SseReader | Reader]]


def ask(daemon: GatewayDaemon, client: Client, wave: int, tokens: int) -> Readers:
    """Ask everything of a wave at once, and return the answers by model."""
    answers: Readers = {name: [] for name in MODELS}
    for number in range(OF_EACH_PATH):
        model = MODELS[number % len(MODELS)]
        for path in STREAMED:
            body = asked_at(path, f"{wave} {path} {number}", tokens) | {"model": model}
            answers[model].append(SseReader(daemon, body, path))
    for number in range(OVER_SOCKET):
        model = MODELS[number % len(MODELS)]
        sampled = {"temperature": 0.8, "seed": number} if number % 4 else {}
        answers[model].append(
            Reader(client, model, f"{wave} {number}", max_tokens=tokens, **sampled)
        )
    return answers


def answers_of(asked: Readers) -> list[Answer]:
    """Return all answers of a wave, once they have ended."""
    return [answer_of(one, LIMIT_S) for readers in asked.values() for one in readers]


def due(client: Client, asked: Readers, model: str, struck: set[int]) -> int | None:
    """Return the pid of a worker that is due; OVER once its model has nothing left to answer."""
    if not any(one.is_alive() for one in asked[model]):
        return OVER
    state = row(client, model)
    is_due = state["state"] == "READY" and state["steps"] >= STEPS and state["pid"] not in struck
    return int(state["pid"]) if is_due else None


def strike(client: Client, asked: Readers, strikes: int) -> int:
    """Signal the worker of one model after the other; return how many were due before the end."""
    struck: set[int] = set()
    for number in range(strikes):
        ready_to_die = partial(due, client, asked, MODELS[number % len(MODELS)], struck)
        pid = eventually(ready_to_die, timeout_s=LIMIT_S, what="a worker at work")
        if pid == OVER:
            return number
        struck.add(pid)
        os.kill(pid, SIGNALS[number % len(SIGNALS)])
    return strikes


def kills(place: Place, *, is_real: bool) -> Values:
    """Ask in waves, undisturbed and then under signals, and compare the answers."""
    waves, per_wave = place.size(4, small=1), place.size(STRIKES, small=4)
    entry = {"path": str(place.tiny), "preload": True} if is_real else fake(fake={"step_s": 0.02})
    entry |= {"restart": SOON, "max_concurrency": 16}
    tokens = 800 if is_real else place.size(800, small=300)
    strikes = lost = unequal = total = 0
    with GatewayDaemon(dict.fromkeys(MODELS, entry)) as daemon, daemon.client() as client:
        for name in MODELS:
            ready(client, name)
        for wave in range(waves):
            undisturbed = answers_of(ask(daemon, client, wave, tokens))
            failed = [one.ends for one in undisturbed if wrongs(one)]
            assert not failed, f"undisturbed answers ended with {failed}"
            asked = ask(daemon, client, wave, tokens)
            strikes += strike(client, asked, per_wave)
            got = answers_of(asked)
            total += len(got)
            for one, right in zip(got, undisturbed, strict=True):
                found = wrongs(one, right.tokens, right.text)
                lost += any(what.startswith("ends") for what in found)
                unequal += any(not what.startswith("ends") for what in found)
    return {"answers": total, "signals": strikes, "lost": lost, "unequal": unequal,
            "missing": waves * per_wave - strikes}  # fmt: skip


FIGURES: tuple[Figure, ...] = (
    count("answers", "answers over the socket and all four HTTP APIs, 29 at once", None),
    count("signals", "signals that their workers get meanwhile", None),
    Figure("missing", "the same: strikes that came too late", "", equals(0, is_exact=False)),
    count("lost", "the same: answers that failed, were cut or ended twice"),
    count("unequal", "the same: answers with another token, text or number"),
)

SCENARIOS = (
    Scenario(name="kills", promises="P1", where=CPU, rounds=1, figures=FIGURES,
             run=partial(kills, is_real=True)),
    Scenario(name="kills-fake", promises="P1", where=FAKE, rounds=1, figures=FIGURES,
             run=partial(kills, is_real=False)),
)  # fmt: skip
