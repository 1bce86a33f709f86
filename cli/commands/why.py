"""`mlxsup why`: what happened to a model, a request or the daemon."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.close_names import close_names

from ..connection import Target, connect, daemon_options
from ..exit_status import CliError, ExitStatus
from ..log_place import log_dir_left_by
from ..model_names import complete_model
from ..model_rows import row_called
from ..new_file import NewFile
from ..request_ids import complete_request
from ..terminal.output import Output, width_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ..flight.recording import Recording
    from ..flight.story import Story

MOST_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a daemon.

    Attributes:
        recording: by its flight recorder.
        folder: for its logs.
        config: its configuration file.
        status: its answer; None if none answers.
        requests: the open ones.
        silence: what is wrong with it if it does not answer.
        remedy: what helps then, if it lives.
    """

    recording: Recording
    folder: Path
    config: Path | None
    status: Mapping[str, Any] | None
    requests: Sequence[Mapping[str, Any]] = field(default_factory=list)
    silence: str = ""
    remedy: str = ""

    @property
    def models(self) -> list[str]:
        """The names of its models."""
        rows = self.status["models"] if self.status is not None else ()
        return list(dict.fromkeys([*(row["name"] for row in rows), *self.recording.models]))


def complete(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The names of models, and the ids of open requests."""
    return [
        *complete_model(context, parameter, incomplete),
        *complete_request(context, parameter, incomplete),
    ]


@click.command(short_help="Say what happened to a model or a request.")
@click.argument("name", required=False, metavar="[MODEL|REQUEST]", shell_complete=complete)
@click.option(
    "--report",
    metavar="FILE",
    type=NewFile(),
    help="Write an archive for a bug report (.tar.gz), without prompts, answers and keys.",
)
@daemon_options
def why(name: str | None, report: Path | None, target: Target, output: Output) -> None:
    """Example: mlxsup why smollm2

    Says what ended MODEL, what it was doing, which requests ran and what became of them, and what
    to do; or where the time of REQUEST went, an id such as the x-request-id of an HTTP answer, or a
    number such as #12. Without either: what happened to the daemon and each model. It needs no
    daemon: a daemon that was killed has left its flight recorder.
    """
    now = time.time()
    known = _look(target, now)
    stories = _stories(known, name, now)
    for story in stories:
        advice = map(target.repeat_in, dict.fromkeys(story.advice))
        story.advice = [one for one in advice if one]
    if report is not None:
        _report(report, known, output)
        return
    if output.is_json:
        output.object(_object(stories, known))
        return
    if known.silence:
        output.note(f"{known.silence}; this is what its flight recorder says")
    if known.remedy:
        output.note(f"hint: {target.repeat_in(known.remedy)}")
    blocks = ["\n".join(story.lines(width_of(sys.stdout))) for story in stories]
    output.data("\n\n".join(blocks))


# ---------------------------------------------------------------- what is known


def _look(target: Target, now: float) -> Known:
    """From the daemon and the files of its flight recorder; from these alone if none answers.

    Raises:
        CliError: there is neither.
    """
    from ..flight.recording import read_recording

    try:
        with connect(target) as client:
            status = client.status(debug=True)
            requests = client.requests()["requests"]
    except CliError as error:
        if error.status is not ExitStatus.NO_DAEMON:
            raise
        return _look_without_daemon(target, error, now)
    folder = Path(status["log_dir"])
    config = Path(status["config_path"]) if status.get("config_path") else None
    return Known(
        recording=read_recording(folder, status, now),
        folder=folder,
        config=config,
        status=status,
        requests=requests,
    )


def _look_without_daemon(target: Target, error: CliError, now: float) -> Known:
    from ..flight.recording import read_recording
    from ..lock_holder import lock_holder

    folder = log_dir_left_by(target)
    if folder is None:
        raise error
    recording = read_recording(folder, None, now)
    latest = recording.latest
    if latest is None and not recording.damage:
        raise error
    holder = lock_holder(target.find_endpoint())
    if latest is not None and holder is not None and holder.pid == latest.pid:
        latest.is_alive = True
    return Known(
        remedy=error.hint if holder is not None else "",
        recording=recording,
        folder=folder,
        config=target.find().config,
        status=None,
        silence=error.message,
    )


# ---------------------------------------------------------------- what is said


def _stories(known: Known, name: str | None, now: float) -> list[Story]:
    """The stories that answer a question.

    Raises:
        CliError: nothing is called so.
    """
    from ..flight.of_daemon import of_daemon
    from ..flight.of_model import of_model

    recording = known.recording
    if name is None:
        rows = known.status["models"] if known.status is not None else ()
        whole = replace(recording, damage="")  # the story of the daemon names it once
        models = [of_model(whole, row["name"], row, now) for row in rows]
        return [of_daemon(recording, now), *models]
    row = row_called(known.status, name) if known.status is not None else None
    if row is not None:
        return [of_model(recording, row["name"], row, now)]
    if name in recording.models:
        return [of_model(recording, name, None, now)]
    return [_story_of_request(known, name, now)]


def _story_of_request(known: Known, name: str, now: float) -> Story:
    from ..flight.of_request import of_request, of_waiting

    found = known.recording.runs_of_request(name)
    open_now = next((one for one in known.requests if name in (one["id"], one["number"])), None)
    if not found:
        if open_now is not None:
            return of_waiting(open_now)
        raise _unknown(known, name)
    run, number = found[-1]
    is_open = open_now is not None and run.is_alive and open_now["number"] == f"#{number}"
    story = of_request(known.recording, run, number, open_now if is_open else None, now)
    if len(found) > 1:
        others = ", ".join(f"#{other}" for _, other in found[:-1][-MOST_LISTED:])
        story.say(f"this is the latest of {len(found)} that were called {name}; others: {others}")
    return story


def _unknown(known: Known, name: str) -> CliError:
    close = close_names(name, known.models)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        models = ", ".join(known.models[:MOST_LISTED]) or "none"
        hint = (
            f"models: {models}; `mlxsup requests` lists the open requests, and of those that have"
            " ended about the latest 10,000 are kept. One that was refused when it came is not: its"
            " client has the reason, and after `mlxsup log-level debug` so does mlxsup.log"
        )
    return CliError(
        f"neither a model nor a request that is known is called {name!r}",
        code="unknown_name",
        hint=hint,
    )


# ---------------------------------------------------------------- how


def _report(path: Path, known: Known, output: Output) -> None:
    from ..flight.archive import write_report

    files = write_report(
        path, known.recording, folder=known.folder, config=known.config, status=known.status
    )
    if output.is_json:
        output.object({"report": str(path), "files": files})
        return
    output.data(
        f"wrote {path} with {len(files)} files; texts that could be a prompt, an answer or a key"
        " are left out, but look through it before you send it"
    )


def _object(stories: Sequence[Story], known: Known) -> dict[str, Any]:
    latest = known.recording.latest
    return {
        "daemon": {
            "is_alive": latest is not None and latest.is_alive,
            "has_died": latest is not None and latest.has_died,
            "pid": latest.pid if latest is not None else None,
            "alive_at": latest.alive_at if latest is not None else None,
        },
        "damage": known.recording.damage or None,
        "stories": [
            {
                "kind": story.kind,
                "name": story.name or None,
                "sentences": story.sentences,
                "advice": story.advice,
                "entries": [_entry(one) for one in story.entries],
            }
            for story in stories
        ],
    }


def _entry(recorded: Any) -> dict[str, Any]:
    """An entry; of a death also its kind in `death`."""
    from mlxsup.protocol.flight import WorkerDied

    from ..flight.causes import explain

    value: dict[str, Any] = recorded.to_map()
    if isinstance(recorded.entry, WorkerDied):
        value["death"] = explain(recorded.entry).name
    return value
