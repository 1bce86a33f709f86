"""What `why` says about the daemon: whether it lives, and what it did last if it was killed."""

from __future__ import annotations

from mlxsup.protocol.flight import (
    DaemonEnded,
    DaemonStarted,
    Entry,
    ModelChanged,
    Recorded,
    RequestContinued,
    RequestEnded,
    RequestPaused,
    RequestStarted,
    WorkerDied,
)
from mlxsup.protocol.text import timestamp

from .causes import WAS_IT_THE_SYSTEM, explain
from .recording import Recording, Run
from .story import Story, counted, moment

BUG_CODE = 70
LEFT_BEHIND_CODE = 71
LEFT_BEHIND_ADVICE = (
    "see which one it is: `worker left behind` in mlxsup.log has its pid",
    "`mlxsup start` tries to end it again; if it never goes, restart the machine",
)
LAST_SHOWN = 6
LATEST = "the daemon"
MOST_LOST = 20


def of_daemon(recording: Recording, now: float) -> Story:
    """The story of the latest daemon.

    Args:
        recording: of its place.
        now: seconds since the epoch.
    """
    story = Story(kind="daemon")
    runs = recording.runs
    if not runs:
        story.say("nothing is recorded yet")
        return story
    tell_end(story, runs[-1], now)
    if runs[-1].is_alive:
        before = runs[-2] if len(runs) > 1 else None
        story.say(f"the daemon{_with_pid(runs[-1])} is running{_since(runs[-1], now)}")
        if before is not None and before.has_died:
            tell_end(story, before, now, name="the daemon before it")
        story.entries = list(runs[-1].entries)
    if recording.damage:
        story.say(recording.damage)
    return story


def tell_end(story: Story, run: Run, now: float, name: str = LATEST) -> None:
    """How a daemon ended, and, if it was killed, what it did last; nothing of one that lives."""
    if run.is_alive:
        return
    who = f"{name}{_with_pid(run)}"
    if run.ended is not None:
        ended = run.ended.entry
        code = ended.code if isinstance(ended, DaemonEnded) else 0
        story.say(f"{who} ended at {moment(run.ended.at, now)}{_words_of(code)}")
        if code == BUG_CODE:
            story.advice.append("please report it, with what `mlxsup why --report FILE` writes")
        if code == LEFT_BEHIND_CODE:
            story.advice += LEFT_BEHIND_ADVICE
        return
    story.say(
        f"{who} died without a word: somebody or the system killed it, or the machine failed; its"
        f" last sign of life came at {moment(run.alive_at, now)}"
    )
    story.entries = list(run.entries)
    if run.entries:
        story.say("what it did last:")
        for one in run.entries[-LAST_SHOWN:]:
            story.say(f"{timestamp(one.at)} {line_of(one.entry)}", below=True)
    lost = lost_with(run)
    if lost:
        story.say(f"{counted(len(lost), 'request')} had been started and ended with it:")
        for entry in lost[:MOST_LOST]:
            story.say(f"{entry.id} (#{entry.number}) of {entry.model}", below=True)
        if len(lost) > MOST_LOST:
            story.say(f"and {len(lost) - MOST_LOST} more", below=True)
    if name == LATEST:
        story.advice.append("`mlxsup start`")
    story.advice.append(WAS_IT_THE_SYSTEM)


def lost_with(run: Run) -> list[RequestStarted]:
    """The requests that had begun and had not ended when a daemon died."""
    open_now: dict[int, RequestStarted] = {}
    for one in run.entries:
        if isinstance(one.entry, RequestStarted):
            open_now[one.entry.number] = one.entry
        elif isinstance(one.entry, RequestEnded):
            open_now.pop(one.entry.number, None)
    return list(open_now.values())


def line_of(entry: Entry) -> str:
    """An entry in a few words: `smollm2: READY → DRAINING (idle)`."""
    match entry:
        case ModelChanged(model=model, before=before, after=after, why=why, note=note):
            said = ", ".join(dict.fromkeys(part for part in (why, note) if part))
            return f"{model}: {before} → {after}" + (f" ({said})" if said else "")
        case WorkerDied(model=model, generation=generation):
            return f"{model}: generation {generation} died: {explain(entry).what}"
        case RequestStarted(id=id, number=number, model=model):
            return f"{model}: request {id} (#{number}) started"
        case RequestPaused(id=id, number=number, model=model, reason=reason):
            return f"{model}: request {id} (#{number}) was paused ({reason})"
        case RequestContinued(id=id, number=number, model=model, after=after):
            return f"{model}: request {id} (#{number}) continued after a {after}"
        case RequestEnded(id=id, number=number, model=model, outcome=outcome):
            return f"{model}: request {id} (#{number}) ended ({outcome})"
        case _:
            return entry.KIND


def lines_of(entries: list[Recorded]) -> list[str]:
    """Entries in a few words each, with their times."""
    return [f"{timestamp(one.at)} {line_of(one.entry)}" for one in entries]


def _with_pid(run: Run) -> str:
    return f" (pid {run.pid})" if run.pid is not None else ""


def _since(run: Run, now: float) -> str:
    if run.started is None or not isinstance(run.started.entry, DaemonStarted):
        return ""
    return f" since {moment(run.started.at, now)}"


def _words_of(code: int) -> str:
    if code == 0:
        return ", because it was asked to"
    if code == BUG_CODE:
        return ": it met a bug, which is in mlxsup.log (exit code 70)"
    if code == LEFT_BEHIND_CODE:
        return ", and a process could not be ended: SIGKILL has no effect on it (exit code 71)"
    return f" with exit code {code}"
