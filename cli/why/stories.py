"""The answers of `why` about a daemon, a model or a request: sentences, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxsup.protocol.death_causes import WAS_IT_THE_SYSTEM, explain
from mlxsup.protocol.flight import (
    CONTINUES,
    GIVEN_UP,
    OF_MODELS,
    OF_REQUESTS,
    PAUSED,
    PROMPT_ONLY,
    DaemonEnded,
    Entry,
    ModelChanged,
    Recorded,
    RequestContinued,
    RequestEnded,
    RequestPaused,
    RequestStarted,
    WorkerDied,
)
from mlxsup.protocol.states import ExitReason
from mlxsup.protocol.text import timestamp

from ..connection import REQUEST_HINTS
from ..terminal.requests import PAUSED_WORDS, doing
from ..terminal.status import progress_text
from ..terminal.text import counted, format_bytes, format_duration, wrapped
from .recording import Death, Recording, Run

ENDS: dict[int, tuple[str, tuple[str, ...]]] = {
    0: (", on request", ()),
    70: (
        " because of a bug, which mlxsup.log shows (exit code 70)",
        ("please report it with the file from `mlxsup why --report FILE`",),
    ),
    71: (
        ", but SIGKILL had no effect on one of its processes (exit code 71)",
        (
            "look for `worker left behind` in mlxsup.log, which shows its pid",
            "`mlxsup start` tries to end it again; otherwise reboot the machine",
        ),
    ),
}
"""How a daemon ended, and what to do, by its exit code."""

LAST_SHOWN = 6
MOST_LOST = 20
EARLIER_SHOWN = 3

RECENT_S = 24 * 3600.0
"""An older death of a model that is well again needs no advice."""

BRINGS_BACK = ("`mlxsup restart ", "`mlxsup reload`", "`mlxsup start`")
"""A cause whose advice has one of these says itself how its model comes back."""

WELL = ("READY", "STOPPED", "LOADING", "DRAINING")

WHY_WORDS = {
    "user": "by command",
    "request": "for a request",
    "evict": "for another model",
    "swap": "for another model",
    "memory": "memory is short",
    "shutdown": "the daemon stops",
}
"""The reasons of changes whose own word does not say it."""

OUTCOMES = {
    PROMPT_ONLY: "its prompt was read, and it asked for no answer",
    "stop": "its answer is complete (stop)",
    "length": "its answer reached the token limit (length)",
    "tool_calls": "its answer is a tool call (tool_calls)",
    "cancelled": "it was cancelled",
    "gone": "its client disconnected",
}


@dataclass(slots=True, kw_only=True)
class Story:
    """The answer about one subject.

    Attributes:
        kind: `daemon`, `model` or `request`.
        name: of the model, or the id of the request; empty for the daemon.
        sentences: the most important first; those that belong to the one above begin with two
            blanks.
        advice: what to do, the most useful first.
        entries: what it is based on, oldest first.
    """

    kind: str
    name: str = ""
    sentences: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    entries: list[Recorded] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        """Add a sentence."""
        self.sentences.append(sentence)

    def add(self, *sentences: str) -> None:
        """Add sentences that belong to the one above."""
        self.sentences += [f"  {sentence}" for sentence in sentences]

    def add_first(self, sentences: Sequence[str], most: int) -> None:
        """Add so many sentences at most, and how many are left out."""
        self.add(*sentences[:most])
        if len(sentences) > most:
            self.add(f"and {len(sentences) - most} more")

    def lines(self, width: int | None) -> list[str]:
        """Return it as people read it, on a terminal with `width` columns; None: in a pipe."""
        advice = [f"  {one}" for one in self.advice]
        texts = [*self.sentences, *(["what to do:", *advice] if advice else [])]
        indents = (len(text) - len(text.lstrip(" ")) for text in texts)
        pairs = zip(texts, indents, strict=True)
        return [line for text, n in pairs for line in wrapped(text.lstrip(" "), width, n)]


def moment(at: float, now: float) -> str:
    """Return `2026-11-23T03:12:05Z (2m 5s ago)`."""
    return f"{timestamp(at)} ({format_duration(now - at)} ago)"


def seconds(value: float) -> str:
    """Return `0.9 s`, or `2m 5s`."""
    return f"{value:.1f} s" if value < 60 else format_duration(value)


# ---------------------------------------------------------------- the daemon


def of_daemon(recording: Recording, now: float) -> Story:
    """Return the story of the latest daemon: whether it lives, and what it did if it was killed."""
    story, runs = Story(kind="daemon"), recording.runs
    if not runs:
        story.say("nothing is recorded yet")
        return story
    latest = runs[-1]
    _tell_end(story, latest, now)
    if latest.is_alive:
        since = f" since {moment(latest.started.at, now)}" if latest.started is not None else ""
        story.say(f"the daemon{_with_pid(latest)} is running{since}")
        if len(runs) > 1 and runs[-2].has_died:
            _tell_end(story, runs[-2], now, name="the daemon before it")
        story.entries = list(latest.entries)
    if recording.damage:
        story.say(recording.damage)
    return story


def _tell_end(story: Story, run: Run, now: float, name: str = "") -> None:
    """Say how a daemon ended, and, if it was killed, what it did last; nothing of one that lives.

    Args:
        story: takes it.
        run: of the daemon.
        now: seconds since the epoch.
        name: the daemon; empty for the latest.
    """
    if run.is_alive:
        return
    daemon = f"{name or 'the daemon'}{_with_pid(run)}"
    if run.ended is not None and isinstance(run.ended.entry, DaemonEnded):
        code = run.ended.entry.code
        words, advice = ENDS.get(code, (f" with exit code {code}", ()))
        story.say(f"{daemon} ended at {moment(run.ended.at, now)}{words}")
        story.advice += advice
        return
    story.say(
        f"{daemon} was killed (SIGKILL), or the machine failed; it was last alive at "
        f"{moment(run.alive_at, now)}"
    )
    story.entries = list(run.entries)
    if run.entries:
        story.say("its last events:")
        story.add(*lines_of(run.entries[-LAST_SHOWN:]))
    open_then: dict[int, RequestStarted] = {}
    for one in run.entries:
        if isinstance(one.entry, RequestStarted):
            open_then[one.entry.number] = one.entry
        elif isinstance(one.entry, RequestEnded):
            open_then.pop(one.entry.number, None)
    lost = [f"{entry.id} (#{entry.number}) of {entry.model}" for entry in open_then.values()]
    if lost:
        story.say(f"{counted(len(lost), 'request')} ended with it:")
        story.add_first(lost, MOST_LOST)
    story.advice += ["`mlxsup start`"] if not name else []
    story.advice.append(WAS_IT_THE_SYSTEM)


def lines_of(entries: Sequence[Recorded]) -> list[str]:
    """Return entries in a few words each: `TIME smollm2: READY → DRAINING (idle)`."""
    lines = []
    for one in entries:
        words = _words_of(one.entry)
        if isinstance(one.entry, OF_REQUESTS):
            words = f"{one.entry.model}: {one.entry.id} (#{one.entry.number}) {words}"
        lines.append(f"{timestamp(one.at)} {words}")
    return lines


def _words_of(entry: Entry) -> str:
    """Return what happened; of a request, without its name."""
    match entry:
        case ModelChanged(model=model, before=before, after=after, why=why, note=note):
            # Why a model is wanted is old news once its process has died, or another one begins.
            is_news = before in ("STOPPED", "FAILED") or after in ("DRAINING", "STOPPED")
            said = note or (WHY_WORDS.get(why, why) if is_news else "")
            return f"{model}: {before} → {after}" + (f" ({said})" if said else "")
        case WorkerDied(model=model, generation=generation):
            return f"{model}: generation {generation} died: {explain(entry).what}"
        case RequestStarted(generation=generation):
            return f"started, in generation {generation}"
        case RequestPaused(reason=reason, tokens=tokens):
            why = PAUSED_WORDS.get(reason, reason)
            return f"paused after {counted(tokens, 'token')}: {why}"
        case RequestContinued(after=after, tokens=tokens):
            return f"continued at token {tokens}, after a {after}"
        case RequestEnded(outcome=outcome):
            return f"ended ({outcome})"
        case _:
            return entry.KIND


def _with_pid(run: Run) -> str:
    return f" (pid {run.pid})" if run.pid is not None else ""


# ---------------------------------------------------------------- a model


def of_model(recording: Recording, name: str, row: Mapping[str, Any] | None, now: float) -> Story:
    """Return the story of a model: what ended it, what ran, what became of that, and what to do.

    Args:
        recording: of its daemon.
        name: the model's.
        row: of the model, in the status; None if no daemon answers, or it does not know it.
        now: seconds since the epoch.
    """
    story = Story(kind="model", name=name)
    entries = recording.of_model(name)
    if row is not None:
        _tell_state(story, row)
    else:
        if recording.latest is not None:
            _tell_end(story, recording.latest, now)
        changes = [one.entry for one in entries if isinstance(one.entry, ModelChanged)]
        if changes:
            story.say(f"{name} was {changes[-1].after} then")
    story.entries = entries
    deaths = [one for one in recording.deaths_of(name) if one.died.reason != ExitReason.ASKED]
    advice: tuple[str, ...] = ()
    if deaths:
        latest = deaths[-1]
        _tell_death(story, latest, now)
        if earlier := deaths[-2::-1]:
            story.say(f"before that: {counted(len(earlier), 'death')}, the latest first")
            said = [f"{timestamp(one.recorded.at)} {explain(one.died).what}" for one in earlier]
            story.add_first(said, EARLIER_SHOWN)
        # What its process wrote stands in the log above what later ones have.
        minutes = math.ceil(max(now - latest.recorded.at, 0.0) / 60.0) + 1
        advice = explain(latest.died, f"--since {minutes}m").advice
        is_well = row is not None and row["state"] in WELL
        if not is_well or now - latest.recorded.at < RECENT_S:
            story.advice += advice
    else:
        known = [f" since {moment(one.at, now)}, the start of the records" for one in entries]
        story.say(f"it has not died{known[0] if known else ''}")
    if row is not None and row["state"] == "FAILED":
        if not deaths:
            story.advice.append(f"`mlxsup logs {name}`")
        # A process that was given up is loaded again once it has ended.
        is_back = any(command in one for one in advice for command in BRINGS_BACK)
        if not is_back and not (deaths and deaths[-1].died.reason == GIVEN_UP):
            story.advice.append(f"fix the cause, then run `mlxsup restart {name}`")
    if recording.damage:
        story.say(recording.damage)
    return story


def _tell_state(story: Story, row: Mapping[str, Any]) -> None:
    name, state = row["name"], row["state"]
    words = {
        "READY": f"has been READY for {format_duration(row.get('loaded_for_s'))}",
        "BACKOFF": f"is in BACKOFF and restarts in {format_duration(row.get('retry_in_s'))}",
        "FAILED": "has FAILED and will not restart automatically: "
        f"{row.get('cause') or 'see below'}",
        "STOPPED": "is STOPPED; the next request loads it",
    }.get(state, f"is {state}")
    if state in ("PENDING", "LOADING"):
        words = f"is {state}: {progress_text(row.get('progress')) or 'starting'}"
    story.say(f"{name} {words}")
    if state in ("PENDING", "LOADING") and (wait := row.get("memory_wait")):
        story.add(f"it waits for memory, because it {wait['reason']}")
    if suspects := row.get("suspects"):
        alone = f"; {row['alone']} runs alone now" if row.get("alone") else ""
        story.add(f"{counted(suspects, 'request')} under suspicion{alone}")
    if quarantined := row.get("quarantined"):
        story.add(f"{counted(quarantined, 'request')} in quarantine")
        story.advice.append(f"`mlxsup restart {name}` lifts the quarantine early")


def _tell_death(story: Story, death: Death, now: float) -> None:
    died, number = death.died, death.recorded.number
    load = " while it was being loaded" if died.ready_s is None else ""
    story.say(f"it last died at {moment(death.recorded.at, now)}{load}: {explain(died).what}")
    story.add(_before(died))
    for row in died.rows:
        suspect = ", a suspect" if row.is_suspect else ""
        named = f"{row.id} (#{row.number}{suspect}), after {counted(row.tokens, 'token')}"
        fate = FATES.get(row.fate, f"failed with {row.fate}")
        story.add(f"{named}: {fate.replace('ID', row.id)}")
    if died.more_rows:
        story.add(f"and {counted(died.more_rows, 'more request')}")
    if not died.rows and died.ready_s is not None:
        story.add("no request ran")
    if died.verdict:
        story.add(f"judged: {died.verdict}")
    text = "restarted immediately" if died.after == "PENDING" else died.after
    if died.retry_in_s is not None:
        text = f"the next start after {seconds(died.retry_in_s)}"
    if died.failure:
        text = f"FAILED, {died.failure}"
    elif died.crashes and died.most_crashes:
        window = format_duration(died.window_s)
        text += f"; crash {died.crashes} of the {died.most_crashes} allowed within {window}"
    story.add(f"then: {text}")
    ran = {row.number for row in died.rows}
    after = [
        one
        for one in death.run.entries
        if one.number > number
        and (
            (isinstance(one.entry, OF_MODELS) and one.entry.model == died.model)
            or (isinstance(one.entry, OF_REQUESTS) and one.entry.number in ran)
        )
    ]
    story.add(*lines_of(after[:LAST_SHOWN]))


def _before(died: WorkerDied) -> str:
    """Return what a worker was doing, and what it held."""
    size, pid = format_bytes, f" (pid {died.pid})" if died.pid is not None else ""
    was_ready = died.ready_s is not None
    parts = {
        f"generation {died.generation}{pid}": True,
        f"READY for {seconds(died.ready_s or 0.0)}": was_ready,
        f"{counted(died.steps, 'step')} ended": was_ready,
        f"last activity: {died.doing}": died.doing,
        f"{size(died.footprint_bytes)} resident": died.footprint_bytes,
        f"{size(died.active_bytes)} in its engine and {size(died.cache_bytes)} cached": (
            died.active_bytes
        ),
        f"limit {size(died.limit_bytes)}": died.limit_bytes,
    }
    return "before: " + ", ".join(part for part, is_known in parts.items() if is_known)


FATES = {
    CONTINUES: "continues in the next process",
    PAUSED: "is paused, until `mlxsup resume ID`",
    "quarantined": "was quarantined, because it crashed the model each time it ran alone",
}
"""The outcomes of a death for a request that ran; any other is the code of its error."""


# ---------------------------------------------------------------- a request


def of_request(
    recording: Recording, run: Run, number: int, open_now: Mapping[str, Any] | None, now: float
) -> Story:
    """Return the story of a request: where its time went, what interrupted it, how it ended.

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
    if end is not None and isinstance(end.entry, RequestEnded):
        outcome = end.entry.outcome
        how = OUTCOMES.get(outcome, f"it failed with {outcome}")
        story.say(f"{_named(end.entry)}: ended at {moment(end.at, now)}, {how}")
        _tell_times(story, end.entry)
        for warning in end.entry.warnings:
            story.add(f"warning: {warning}")
        if outcome in REQUEST_HINTS:
            story.advice.append(REQUEST_HINTS[outcome].replace("MODEL", first.model))
    elif open_now is not None:
        tokens = counted(open_now["tokens_sent"], "token")
        story.say(f"{_named(first)} is open: {_stage(open_now)}, after {tokens}")
    elif run.is_alive:
        story.say(f"{_named(first)} is open")
    else:
        last = f"the daemon was last alive at {moment(run.alive_at, now)}"
        story.say(f"{_named(first)} was lost with the daemon: {last}")
        story.advice += ["`mlxsup why` explains how the daemon ended", "send it again"]
    _tell_events(story, number)
    if recording.damage:
        story.say(recording.damage)
    return story


def of_waiting(open_now: Mapping[str, Any]) -> Story:
    """Return the story of a request that has not begun: nothing is recorded of it yet."""
    story = Story(kind="request", name=str(open_now["id"]))
    story.say(
        f"{open_now['id']} ({open_now['number']}) of {open_now['model']} is open:"
        f" {_stage(open_now)}, for {seconds(open_now['age_s'])}"
    )
    story.advice.append(f"`mlxsup why {open_now['model']}` shows the state of its model")
    return story


def _stage(open_now: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, (str(open_now["state"]), doing(open_now))))


def _named(entry: RequestStarted | RequestPaused | RequestContinued | RequestEnded) -> str:
    client = getattr(entry, "client", "")
    return f"{entry.id} (#{entry.number}) of {entry.model}" + (f" for {client}" if client else "")


def _tell_times(story: Story, ended: RequestEnded) -> None:
    usage, timings = ended.usage, ended.timings
    if not usage.prompt_tokens:
        story.add(f"it waited {seconds(timings.queued_s)} and never started")
        return
    story.add(f"it waited {seconds(timings.queued_s)}")
    cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
    story.add(
        f"its prompt: {counted(usage.prompt_tokens, 'token')}{cached}, prepared in"
        f" {seconds(timings.tokenize_s)}, read in {seconds(timings.prefill_s)}"
    )
    if ended.outcome != PROMPT_ONLY:
        rate = f", {ended.tokens_per_s:.1f} tokens/s" if ended.tokens_per_s else ""
        first_s = timings.first_token_s
        first = f", the first after {seconds(first_s)}" if first_s else ""
        story.add(f"its answer: {counted(usage.completion_tokens, 'token')}{first}{rate}")
    paused = f", {seconds(timings.paused_s)} of it paused" if timings.paused_s else ""
    whole, engine = seconds(timings.total_s), seconds(usage.engine_s)
    story.add(f"total {whole}{paused}; {engine} of engine time")


def _tell_events(story: Story, number: int) -> None:
    """Say when a request started, paused, continued, and met a crash."""
    for one in story.entries:
        words = _words_of(one.entry)
        if isinstance(one.entry, WorkerDied):
            fate = next(row.fate for row in one.entry.rows if row.number == number)
            then = "" if fate in (CONTINUES, PAUSED) else f"; the request failed with {fate}"
            words = f"its worker died: {explain(one.entry).what}{then}"
        elif isinstance(one.entry, RequestEnded):
            continue  # said first
        story.add(f"{timestamp(one.at)} {words}")
