"""What `why` says about a request: where its time went, what interrupted it, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxsup.protocol.flight import (
    CONTINUES,
    OF_REQUESTS,
    PAUSED,
    RequestContinued,
    RequestEnded,
    RequestPaused,
    RequestStarted,
    WorkerDied,
)
from mlxsup.protocol.text import timestamp

from ..terminal.notices import PAUSED_WORDS
from .causes import explain
from .of_model import what_followed_for
from .recording import Death, Recording, Run
from .story import Story, counted, moment, seconds

ADVICE = {
    "quarantined": "`mlxsup restart MODEL` lifts the quarantine; `mlxsup why MODEL` says what died",
    "worker_crashed": "`mlxsup why MODEL` says what its worker died of; sending it again may help",
    "insufficient_memory": "`mlxsup plan`, or a shorter prompt or answer",
    "queue_timeout": "`mlxsup status`; allow more with `queue_timeout_s`",
    "deadline_exceeded": "allow more with `timeout_s` or `first_token_timeout_s`",
    "load_failed": "`mlxsup why MODEL`",
    "model_failed": "`mlxsup why MODEL`",
    "slow_consumer": "read the stream as it comes",
    "unloaded": "`mlxsup load MODEL`, then send it again",
    "internal": "please report it, with the file that `mlxsup why MODEL --report FILE` writes",
}
"""What to do about errors, by their codes."""


def of_request(
    recording: Recording, run: Run, number: int, open_now: Mapping[str, Any] | None, now: float
) -> Story:
    """The story of a request.

    Args:
        recording: of its daemon.
        run: that had it.
        number: the supervisor's, in that run.
        open_now: its entry in `mlxsup requests`; None if it is not open.
        now: seconds since the epoch.
    """
    entries = [
        one
        for one in run.entries
        if (isinstance(one.entry, OF_REQUESTS) and one.entry.number == number)
        or (isinstance(one.entry, WorkerDied) and any(r.number == number for r in one.entry.rows))
    ]
    first = next(one.entry for one in entries if isinstance(one.entry, OF_REQUESTS))
    story = Story(kind="request", name=first.id, entries=entries)
    # Not always the last: the death of a worker is recorded after the ends that it has brought.
    end = next((one for one in entries if isinstance(one.entry, RequestEnded)), None)
    ended = end.entry if end is not None else None
    if end is not None and isinstance(ended, RequestEnded):
        story.say(f"{_named(ended)}: ended at {moment(end.at, now)}, {_outcome(ended)}")
        _tell_times(story, ended)
    elif open_now is not None:
        tokens = counted(open_now["tokens_sent"], "token")
        story.say(f"{_named(first)} is open: {open_now['state']}, after {tokens}")
    elif run.is_alive:
        story.say(f"{_named(first)} is open")
    else:
        last = f"the daemon's last sign of life came at {moment(run.alive_at, now)}"
        story.say(f"{_named(first)} was lost with the daemon: {last}")
        story.advice += ["`mlxsup why` says how the daemon ended", "send it again"]
    _tell_events(story, run)
    if isinstance(ended, RequestEnded) and ended.outcome in ADVICE:
        story.advice.append(ADVICE[ended.outcome].replace("MODEL", ended.model))
    if recording.damage:
        story.say(recording.damage)
    return story


def of_waiting(open_now: Mapping[str, Any]) -> Story:
    """The story of a request that has not begun: nothing is recorded of it yet."""
    story = Story(kind="request", name=str(open_now["id"]))
    place = f", place {open_now['place']}" if open_now.get("place") else ""
    story.say(
        f"{open_now['id']} ({open_now['number']}) of {open_now['model']} is open:"
        f" {open_now['state']}{place}, for {seconds(open_now['age_s'])}"
    )
    story.advice.append(f"`mlxsup why {open_now['model']}` says what its model does")
    return story


def _named(entry: RequestStarted | RequestPaused | RequestContinued | RequestEnded) -> str:
    client = getattr(entry, "client", "")
    return f"{entry.id} (#{entry.number}) of {entry.model}" + (f" for {client}" if client else "")


def _outcome(ended: RequestEnded) -> str:
    words = {
        "stop": "its answer is complete (stop)",
        "length": "its answer has reached its longest (length)",
        "tool_calls": "its answer is a call of tools (tool_calls)",
        "cancelled": "it was cancelled",
        "gone": "its client had gone",
    }
    return words.get(ended.outcome, f"it failed with {ended.outcome}")


def _tell_times(story: Story, ended: RequestEnded) -> None:
    usage, timings = ended.usage, ended.timings
    if not usage.prompt_tokens:
        story.say(f"it waited {seconds(timings.queued_s)}, and never began", below=True)
        return
    cached = f" ({usage.cached_tokens:,} known already)" if usage.cached_tokens else ""
    story.say(f"it waited {seconds(timings.queued_s)}", below=True)
    prompt = counted(usage.prompt_tokens, "token")
    read = seconds(timings.prefill_s)
    story.say(
        f"its prompt: {prompt}{cached}, prepared in {seconds(timings.tokenize_s)}, read in {read}",
        below=True,
    )
    rate = f", {ended.tokens_per_s:.1f} tokens/s" if ended.tokens_per_s else ""
    first = f", the first after {seconds(timings.first_token_s)}" if timings.first_token_s else ""
    story.say(f"its answer: {counted(usage.completion_tokens, 'token')}{first}{rate}", below=True)
    paused = f", {seconds(timings.paused_s)} of them paused" if timings.paused_s else ""
    whole, engine = seconds(timings.total_s), seconds(usage.engine_s)
    story.say(f"in all {whole}{paused}; {engine} of the engine's time", below=True)


def _tell_events(story: Story, run: Run) -> None:
    """Starts, pauses and crashes, in order."""
    number = next(e.entry.number for e in story.entries if isinstance(e.entry, OF_REQUESTS))
    paused_at: float | None = None
    for one in story.entries:
        at, entry = timestamp(one.at), one.entry
        match entry:
            case RequestStarted(generation=generation):
                story.say(f"{at} started, in generation {generation}", below=True)
            case RequestPaused(reason=reason, tokens=tokens):
                paused_at = one.at
                why = PAUSED_WORDS.get(reason, reason)
                story.say(f"{at} paused after {counted(tokens, 'token')}: {why}", below=True)
            case RequestContinued(after="pause") if paused_at is not None:
                took = seconds(one.at - paused_at)
                story.say(f"{at} continued, after {took}", below=True)
            case WorkerDied():
                death = Death(run=run, recorded=one, died=entry)
                fate = next(row.fate for row in entry.rows if row.number == number)
                then = what_followed_for(number, death)
                if fate != CONTINUES:
                    then = "was paused" if fate == PAUSED else f"failed with {fate}"
                story.say(
                    f"{at} its worker died: {explain(entry).what}; the request {then}", below=True
                )
