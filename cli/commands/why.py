"""`mlxsup why`: what happened to a model, a request or the daemon."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.suggestions import close_names, did_you_mean

from ..arguments import (
    complete_model,
    complete_request,
    one_after_the_other,
    request_called,
    row_called,
)
from ..connection import (
    Target,
    connect,
    daemon_options,
    log_dir_left_by,
    models_in,
)
from ..exit_status import CliError, ExitStatus
from ..options import new_file
from ..terminal.output import Output, width_of

if TYPE_CHECKING:
    from ..why.recording import Recording
    from ..why.stories import Story

MOST_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the daemon; without an answer, its record alone.

    Attributes:
        recording: by its flight recorder.
        folder: for its logs.
        config: its configuration file.
        status: its answer; None if none answers.
        requests: the open ones.
        silence: what is wrong with it if it does not answer, and what helps then if it lives.
    """

    recording: Recording
    folder: Path
    config: Path | None
    status: Mapping[str, Any] | None = None
    requests: Sequence[Mapping[str, Any]] = ()
    silence: Sequence[str] = ()

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """Return the models in its status."""
        return self.status["models"] if self.status is not None else []


@click.command()
@click.argument(
    "name",
    required=False,
    metavar="[MODEL|REQUEST]",
    shell_complete=one_after_the_other(complete_model, complete_request),
)
@click.option(
    "--report",
    metavar="FILE",
    type=new_file,
    help="Write an archive (.tar.gz) for a bug report, without prompts, answers or keys.",
)
@daemon_options
def why(name: str | None, report: Path | None, target: Target, output: Output) -> None:
    """Example: mlxsup why smollm2-135m

    Explains why MODEL last ended, what it was doing, what became of its requests, and what to do.
    For REQUEST, it shows where the time went; use its id, which HTTP answers carry as x-request-id,
    a number such as 12, or `last`. Without an argument, it shows what happened to the daemon and
    each model. It works without a running daemon.
    """
    now = time.time()
    known = _look(target, now)
    stories = stories_of(known, name, now)
    for story in stories:
        story.advice = list(filter(None, map(target.repeat_in, dict.fromkeys(story.advice))))
    if report is not None:
        from ..why.report import write_report

        files = write_report(
            report, known.recording, folder=known.folder, config=known.config, status=known.status
        )
        output.result(
            {"report": str(report), "files": files},
            f"wrote {report} with {len(files)} files. Prompts, answers and keys are removed; "
            "please check the files before you send them",
        )
        return
    for line in known.silence:
        output.note(target.repeat_in(line))
    blocks = ["\n".join(story.lines(width_of(sys.stdout))) for story in stories]
    output.result(_object(stories, known), "\n\n".join(blocks))


def _look(target: Target, now: float) -> Known:
    """Ask the daemon and read the files of its recorder; these alone if none answers."""
    from ..lock_holder import lock_holder
    from ..why.recording import read_recording

    try:
        with connect(target) as client:
            status = client.status(debug=True)
            requests = client.requests()["requests"]
    except CliError as error:
        folder = log_dir_left_by(target) if error.status is ExitStatus.NO_DAEMON else None
        if folder is None:
            raise
        recording = read_recording(folder, None, now)
        latest = recording.latest
        if latest is None and not recording.damage:
            raise
        holder = lock_holder(target.find_endpoint())
        if latest is not None and holder is not None and holder.pid == latest.pid:
            latest.is_alive = True
        said = [f"{error.message}; this is from its flight recorder"]
        said += [f"hint: {error.hint}"] if error.hint and holder is not None else []
        config = target.find().config
        return Known(recording=recording, folder=folder, config=config, silence=said)
    folder = Path(status["log_dir"])
    return Known(
        recording=read_recording(folder, status, now),
        folder=folder,
        config=Path(status["config_path"]) if status.get("config_path") else None,
        status=status,
        requests=requests,
    )


def stories_of(known: Known, name: str | None, now: float) -> list[Story]:
    """Return the stories that answer a question."""
    from ..why.stories import of_daemon, of_model, of_request, of_waiting

    recording = known.recording
    if name is None:
        whole = replace(recording, damage="")  # the story of the daemon names it once
        models = [of_model(whole, row["name"], row, now) for row in known.rows]
        return [of_daemon(recording, now), *models]
    row = row_called(known.status, name) if known.status is not None else None
    if row is not None or name in recording.models:
        return [of_model(recording, name if row is None else row["name"], row, now)]
    found = recording.runs_of_request(name)
    open_now = request_called(known.requests, name)
    if not found:
        if open_now is None:
            config = known.config if known.status is None else None
            if (model := models_in(config).get(name)) in recording.models:
                return [of_model(recording, model, None, now)]
            raise _unknown(known, name)
        return [of_waiting(open_now)]
    run, number = found[-1]
    is_open = open_now is not None and run.is_alive and open_now["number"] == f"#{number}"
    story = of_request(recording, run, number, open_now if is_open else None, now)
    if len(found) > 1:
        others = ", ".join(f"#{other}" for _, other in found[:-1][-MOST_LISTED:])
        story.say(
            f"this is the latest of {len(found)} requests with the id {name}; the others: {others}"
        )
    return [story]


def _unknown(known: Known, name: str) -> CliError:
    models = list(
        dict.fromkeys([*(str(row["name"]) for row in known.rows), *known.recording.models])
    )
    hint = did_you_mean(close_names(name, models)) or (
        "`mlxsup requests` lists open requests. The last 10,000 finished ones are kept; refused"
        " ones are not."
    )
    listed = ", ".join(models[:MOST_LISTED]) or "none"
    message = f"there is no model or request {name!r}; models: {listed}"
    return CliError(message, code="unknown_name", hint=hint)


def _object(stories: Sequence[Story], known: Known) -> dict[str, Any]:
    """Return what `--json` prints; of a death also its cause in `death`."""
    from mlxsup.protocol.death_causes import explain
    from mlxsup.protocol.flight import Recorded, WorkerDied

    def entry_map(one: Recorded) -> dict[str, Any]:
        died = one.entry if isinstance(one.entry, WorkerDied) else None
        return {**one.to_map(), **({"death": explain(died).name} if died is not None else {})}

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
                "entries": [entry_map(one) for one in story.entries],
            }
            for story in stories
        ],
    }
