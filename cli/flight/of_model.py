"""What `why` says about a model: what ended it, what ran, what became of that, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlxsup.protocol.flight import (
    CONTINUES,
    GIVEN_UP,
    PAUSED,
    LostRow,
    ModelChanged,
    RequestContinued,
    RequestEnded,
    WorkerDied,
)
from mlxsup.protocol.states import ExitReason
from mlxsup.protocol.text import timestamp

from ..terminal.model_row import progress_text
from ..terminal.quantities import format_bytes, format_duration
from .causes import explain
from .of_daemon import tell_end
from .recording import Death, Recording, Run
from .story import Story, counted, moment, seconds

EARLIER_SHOWN = 3
RECENT_S = 24 * 3600.0
"""An older death of a model that is well again needs no advice."""

BRINGS_BACK = ("`mlxsup restart ", "`mlxsup reload`", "`mlxsup start`")
"""A cause whose advice has one of these says itself how its model comes back."""

WELL = ("READY", "STOPPED", "LOADING", "DRAINING")


def of_model(recording: Recording, name: str, row: Mapping[str, Any] | None, now: float) -> Story:
    """The story of a model.

    Args:
        recording: of its daemon.
        name: the model's.
        row: of the model, in the status; None if no daemon answers, or it does not know it.
        now: seconds since the epoch.
    """
    story = Story(kind="model", name=name, entries=list(recording.of_model(name)))
    if row is not None:
        _tell_state(story, row)
    else:
        latest = recording.latest
        if latest is not None:
            tell_end(story, latest, now)
        story.entries = list(recording.of_model(name))
        _tell_last_state(story)
    deaths = [one for one in recording.deaths_of(name) if one.died.reason != ExitReason.ASKED]
    if deaths:
        _tell_death(story, deaths[-1], now)
        _tell_earlier(story, deaths[:-1])
        log_options = _log_options(recording, deaths[-1], now)
        _advise(story, explain(deaths[-1].died, log_options).advice, deaths[-1], row, now)
    else:
        since = story.entries[0].at if story.entries else None
        known = f" since {moment(since, now)}, which is as far as is recorded" if since else ""
        story.say(f"it has not died{known}")
    if row is not None and row["state"] == "FAILED":
        _advise_failed(story, deaths[-1] if deaths else None)
    if recording.damage:
        story.say(recording.damage)
    return story


# ---------------------------------------------------------------- its state


def _tell_state(story: Story, row: Mapping[str, Any]) -> None:
    name, state = row["name"], row["state"]
    match state:
        case "READY":
            story.say(f"{name} is READY, for {format_duration(row.get('loaded_for_s'))}")
        case "BACKOFF":
            retry = format_duration(row.get("retry_in_s"))
            story.say(f"{name} is BACKOFF: it is started again in {retry}")
        case "FAILED":
            cause = row.get("cause") or "see below"
            story.say(f"{name} has FAILED and is not started again by itself: {cause}")
        case "PENDING" | "LOADING":
            story.say(f"{name} is {state}: {progress_text(row.get('progress')) or 'it begins'}")
            if wait := row.get("memory_wait"):
                story.say(f"it waits for memory: {wait['reason']}", below=True)
        case "STOPPED":
            story.say(f"{name} is STOPPED ({row.get('why')}): the next request or a load starts it")
        case _:
            story.say(f"{name} is {state} ({row.get('why')})")
    _tell_suspicion(story, row)


def _tell_suspicion(story: Story, row: Mapping[str, Any]) -> None:
    if suspects := row.get("suspects"):
        text = f"{counted(suspects, 'request')} under suspicion"
        if alone := row.get("alone"):
            text += f"; {alone} runs alone now"
        story.say(text, below=True)
    if quarantined := row.get("quarantined"):
        story.say(f"{counted(quarantined, 'request')} in quarantine", below=True)
        story.advice.append(f"`mlxsup restart {row['name']}` ends a quarantine before its hour")


def _tell_last_state(story: Story) -> None:
    changes = [one for one in story.entries if isinstance(one.entry, ModelChanged)]
    if changes:
        entry = changes[-1].entry
        assert isinstance(entry, ModelChanged)
        story.say(f"{story.name} was {entry.after} then")


# ---------------------------------------------------------------- its latest death


def _tell_death(story: Story, death: Death, now: float) -> None:
    died = death.died
    load = " while it was being loaded" if died.ready_s is None else ""
    story.say(
        f"it last died at {moment(death.recorded.at, now)}{load}: {explain(died).what}",
    )
    story.say(_before(died), below=True)
    for row in died.rows:
        story.say(f"{_named(row)}: {_what_became_of(row, death)}", below=True)
    if died.more_rows:
        story.say(f"and {counted(died.more_rows, 'more request')}", below=True)
    if not died.rows and died.ready_s is not None:
        story.say("no request ran", below=True)
    if died.verdict:
        story.say(f"judged: {died.verdict}", below=True)
    story.say(_what_followed(died, death, story), below=True)


def _before(died: WorkerDied) -> str:
    """What it was doing, and what it held."""
    parts = [f"generation {died.generation}"]
    if died.pid is not None:
        parts[0] += f" (pid {died.pid})"
    if died.ready_s is not None:
        parts.append(f"READY for {seconds(died.ready_s)}")
        parts.append(f"{counted(died.steps, 'step')} ended")
    if died.doing:
        parts.append(f"last seen doing: {died.doing}")
    if died.footprint_bytes:
        parts.append(f"{format_bytes(died.footprint_bytes)} resident")
    if died.active_bytes:
        held = f"{format_bytes(died.active_bytes)} in its engine"
        parts.append(f"{held} and {format_bytes(died.cache_bytes)} kept for reuse")
    if died.limit_bytes:
        parts.append(f"limit {format_bytes(died.limit_bytes)}")
    return "before: " + ", ".join(parts)


def _named(row: LostRow) -> str:
    suspect = ", a suspect" if row.is_suspect else ""
    return f"{row.id} (#{row.number}{suspect}), after {counted(row.tokens, 'token')}"


def _what_became_of(row: LostRow, death: Death) -> str:
    if row.fate == PAUSED:
        return f"is paused, until `mlxsup resume {row.id}`"
    if row.fate == "quarantined":
        return "was quarantined: it has killed its engine each time that it ran alone"
    if row.fate != CONTINUES:
        return f"failed with {row.fate}"
    return what_followed_for(row.number, death)


def what_followed_for(number: int, death: Death) -> str:
    """What became of a request that was to continue after a death."""
    for one in death.run.entries:
        entry = one.entry
        if one.number <= death.recorded.number:
            continue
        if isinstance(entry, RequestContinued) and entry.number == number:
            took = seconds(one.at - death.recorded.at)
            return f"resumed at token {entry.tokens} after {took}"
        if isinstance(entry, RequestEnded) and entry.number == number:
            return f"ended ({entry.outcome})"
        if isinstance(entry, WorkerDied) and any(row.number == number for row in entry.rows):
            return "was started again, and met the next death"
    return "was lost with the daemon" if death.run.has_died else "waits to be resumed"


def _what_followed(died: WorkerDied, death: Death, story: Story) -> str:
    if died.failure:
        text = f"then: FAILED, {died.failure}"
    elif died.retry_in_s is not None:
        text = f"then: the next start after {seconds(died.retry_in_s)}"
    elif died.after == "PENDING":
        text = f"then: started again at once{_ready_again(death, story.name)}"
    else:
        text = f"then: {died.after}"
    if died.crashes and died.most_crashes and not died.failure:
        window = format_duration(died.window_s)
        text += f"; crash {died.crashes} of the {died.most_crashes} allowed within {window}"
    return text


def _ready_again(death: Death, model: str) -> str:
    """`, READY after 2.1 s`; empty if that has not come yet."""
    ready_at = _first_ready(death.run, model, death.recorded.number)
    return "" if ready_at is None else f", READY after {seconds(ready_at - death.recorded.at)}"


def _first_ready(run: Run, model: str, number: int) -> float | None:
    for one in run.entries:
        match one.entry:
            case ModelChanged(model=name, after="READY") if name == model and one.number > number:
                return one.at
    return None


# ---------------------------------------------------------------- and before


def _tell_earlier(story: Story, deaths: list[Death]) -> None:
    if not deaths:
        return
    story.say(f"before that: {counted(len(deaths), 'death')}, the latest first")
    for death in deaths[::-1][:EARLIER_SHOWN]:
        story.say(f"{timestamp(death.recorded.at)} {explain(death.died).what}", below=True)
    if len(deaths) > EARLIER_SHOWN:
        story.say(f"and {len(deaths) - EARLIER_SHOWN} more", below=True)


def _log_options(recording: Recording, death: Death, now: float) -> str:
    """With which `mlxsup logs` shows what a process wrote before its death."""
    match recording.processes_since(death):
        case 0:
            return ""
        case 1:
            return "--previous"
    return f"--since {math.ceil(max(now - death.recorded.at, 0.0) / 60.0) + 1}m"


def _advise(
    story: Story,
    advice: Sequence[str],
    death: Death,
    row: Mapping[str, Any] | None,
    now: float,
) -> None:
    is_well = row is not None and row["state"] in WELL
    if not is_well or now - death.recorded.at < RECENT_S:
        story.advice += advice


def _advise_failed(story: Story, death: Death | None) -> None:
    """A model that has FAILED does not come back by itself."""
    if death is None:
        story.advice.append(f"`mlxsup logs {story.name}`")
    elif death.died.reason == GIVEN_UP:
        return  # it is loaded again once that process has ended
    known = explain(death.died).advice if death is not None else ()
    if not any(command in one for one in known for command in BRINGS_BACK):
        story.advice.append(f"once the cause is gone: `mlxsup restart {story.name}`")
