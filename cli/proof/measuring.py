"""Measures the figures of a proof, with a client of the daemon that the proof runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psutil

from ..background_answer import EXACT_BACKENDS, BackgroundAnswer
from ..terminal.output import Output
from ..terminal.waiting import progress_shown
from .figures import (
    KILLS,
    Answer,
    Figure,
    Kill,
    Reading,
    Unload,
    judge_kills,
    judge_reading,
    judge_seed,
    judge_unload,
    not_read,
)

if TYPE_CHECKING:
    from mlxsup.client import Client

STORY = "Tell me a short story about a lighthouse keeper and a storm."
SEED = 20
TEMPERATURE = 0.8

FIRST_TOKENS = 8
"""Show how fast the model is."""

ANSWER_S = 5.0
"""An answer takes about that long, within these limits in tokens."""
LEAST_TOKENS, MOST_TOKENS = 24, 192

PROMPT_S = 40.0
"""What a model would write in this time is its prompt: it reads many times faster."""
LEAST_PROMPT, MOST_PROMPT = 256, 2048

STARTED_TOKENS = 4
"""The other model writes by then."""

ALONE_TOKENS = 32
"""Show how evenly the other model writes while nothing else runs."""

GONE_S = 10.0
"""How long processes may take to be gone once an unload has returned."""


class Proof:
    """Measures one figure after the other.

    Args:
        client: of a daemon with two models, of which only the first need fit into memory.
        output: shows the progress of loads.
        is_exact: whether the model promises the same tokens after a resume on a CPU.
        on_figure: called with each figure as it comes.
    """

    def __init__(
        self,
        client: Client,
        output: Output,
        on_figure: Callable[[Figure], None],
        *,
        is_exact: bool,
    ) -> None:
        self._client = client
        self._output = output
        self._tell = on_figure
        self._is_exact = is_exact
        self._model, self._other = (str(row["name"]) for row in client.status()["models"])

    def run(self) -> dict[str, Any]:
        """Measures everything; returns what is known of the model.

        Raises:
            RequestError, ConnectionLost: the model could not be loaded, or gives no answer.
        """
        begin = time.monotonic()
        self._load(self._model)
        load_s = time.monotonic() - begin
        row = self._row(self._model)
        is_exact = self._is_exact and row["backend"] in EXACT_BACKENDS
        speed = self._speed()
        tokens = _within(int(speed * ANSWER_S), LEAST_TOKENS, MOST_TOKENS)
        alone = _answer(self._ask(self._model, tokens).finish())
        self._tell(judge_seed(alone, _answer(self._ask(self._model, tokens)), is_exact=is_exact))
        self._tell(self._kill(alone, tokens, is_exact=is_exact))
        self._tell(self._read(alone.token_ids, speed))
        self._tell(self._unload())
        return {
            "backend": row["backend"],
            "context_length": row["context_length"],
            "load_s": round(load_s, 3),
            "tokens_per_s": round(speed, 1),
        }

    def _load(self, model: str) -> None:
        with progress_shown(self._client, model, self._output):
            self._client.load(model)

    def _row(self, model: str) -> dict[str, Any]:
        rows = self._client.status()["models"]
        found: dict[str, Any] = next(row for row in rows if row["name"] == model)
        return found

    def _ask(self, model: str, tokens: int) -> BackgroundAnswer:
        """An answer of that many tokens, unless the context is shorter."""
        stream = self._client.generate(
            model,
            messages=[{"role": "user", "content": STORY}],
            messages_as_text=True,
            max_tokens=tokens,
            cap_max_tokens=True,
            ignore_eos=True,
            temperature=TEMPERATURE,
            seed=SEED,
        )
        return BackgroundAnswer(model, stream)

    def _speed(self) -> float:
        """Tokens per second, roughly."""
        first = self._ask(self._model, FIRST_TOKENS).finish()
        took_s = first.arrivals[-1] - first.arrivals[0] if len(first.arrivals) > 1 else 0.0
        return (first.tokens - 1) / took_s if took_s > 0 else float(MOST_TOKENS)

    def _kill(self, alone: Answer, tokens: int, *, is_exact: bool) -> Figure:
        """The same answer, with two kills."""
        answer = self._ask(self._model, tokens)
        killed: list[tuple[int, float]] = []
        for number in range(1, KILLS + 1):
            due = max(1, number * len(alone.token_ids) // (KILLS + 1))
            if not answer.wait_for(due):
                break
            pid = self._row(self._model)["pid"]
            if pid is None:
                break  # it is dead already: the answer says why
            killed.append((answer.tokens, time.monotonic()))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = _answer(answer)
        kills = [
            Kill(tokens=count, pause_s=_next(answer.arrivals, moment)) for count, moment in killed
        ]
        return judge_kills(alone, ended, kills, is_exact=is_exact)

    def _read(self, token_ids: Sequence[int], speed: float) -> Figure:
        """How the other model writes while the first reads a long prompt."""
        reason = self._lack()
        if reason:
            return not_read(f"two such models do not fit into memory: {reason}")
        self._load(self._other)
        quiet = self._ask(self._other, ALONE_TOKENS).finish()
        context = self._row(self._model)["context_length"]
        length = min(_within(int(speed * PROMPT_S), LEAST_PROMPT, MOST_PROMPT), context // 2)
        prompt = [*token_ids] * (length // len(token_ids) + 1)
        writing = self._ask(self._other, context // 2)
        try:
            writing.wait_for(STARTED_TOKENS)
            begin = time.monotonic()
            self._client.complete(self._model, prompt_tokens=prompt[:length], max_tokens=1)
            end = time.monotonic()
            is_writing = writing.is_alive()
        finally:
            writing.cancel()
        arrivals = writing.finish().arrivals
        if is_writing:  # a wait that lasts longer counts up to here
            arrivals = [*(moment for moment in arrivals if moment < end), end]
        return judge_reading(
            Reading(
                prompt_tokens=length,
                read_s=round(end - begin, 3),
                pieces=sum(begin <= moment < end for moment in arrivals),
                gap_s=round(longest_gap(arrivals, begin, end), 4),
                alone_gap_s=round(longest_gap(quiet.arrivals), 4),
            )
        )

    def _lack(self) -> str:
        """Why the other model does not fit next to the first; empty if it does."""
        from mlxsup.client import RequestError

        try:
            outlook = self._client.load(self._other, dry_run=True)
        except RequestError as error:
            if error.code != "insufficient_memory":
                raise
            return error.message
        return "" if outlook["outcome"] in ("fits", "loaded") else str(outlook["reason"])

    def _unload(self) -> Figure:
        """What is left of both models."""
        rows = self._client.status()["models"]
        pids = [row["pid"] for row in rows if row["pid"] is not None]
        watched = [psutil.Process(pid) for pid in pids]
        held = sum(_resident_bytes(pid) for pid in pids)
        before = psutil.virtual_memory().available
        for row in rows:
            self._client.unload(row["name"])
        alive = [process.pid for process in psutil.wait_procs(watched, GONE_S)[1]]
        return judge_unload(
            Unload(
                held_bytes=held,
                alive=alive,
                reserved_bytes=self._client.status()["memory"]["reserved_bytes"],
                gained_bytes=psutil.virtual_memory().available - before,
            )
        )


def longest_gap(arrivals: Sequence[float], begin: float = 0.0, end: float = float("inf")) -> float:
    """The longest wait for a piece that overlaps the time between begin and end, in seconds.

    A wait counts with its part within that time.
    """
    waits = [min(later, end) - max(earlier, begin) for earlier, later in pairwise(arrivals)]
    return max((wait for wait in waits if wait > 0), default=0.0)


def _answer(running: BackgroundAnswer) -> Answer:
    """What has come of an answer at its end, also if that is an error."""
    from mlxsup.client import RequestError

    resumed, failure = 0, ""
    try:
        resumed = running.finish().resumed
    except RequestError as error:
        if error.code == "shutting_down":
            raise  # the proof was interrupted
        failure = error.message
    return Answer(text=running.text, token_ids=running.token_ids, resumed=resumed, failure=failure)


def _next(arrivals: Sequence[float], moment: float) -> float | None:
    """How long after a moment the next piece came; None if none did."""
    later = next((arrival for arrival in arrivals if arrival > moment), None)
    return None if later is None else round(later - moment, 3)


def _within(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))


def _resident_bytes(pid: int) -> int:
    """What a process holds; 0 if it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
