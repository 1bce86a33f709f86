"""`mlxsup logs`: show what the workers, the daemon and its gateway wrote."""

from __future__ import annotations

import calendar
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from mlxsup.protocol.folders import (
    DAEMON_LOG_NAME,
    GATEWAY_LOG_NAME,
    GENERATION_HEADER,
    log_path,
)
from mlxsup.protocol.log_files import FollowedFile, all_lines, tail, written_at

from ..arguments import complete_model, one_after_the_other
from ..connection import (
    Target,
    connect,
    daemon_options,
    log_dir_left_by,
    models_in,
    unknown_model,
)
from ..exit_status import CliError, ExitStatus, misuse
from ..options import duration
from ..terminal.output import Output
from ..terminal.reader_watch import check_reader

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

FOLLOW_INTERVAL_S = 0.15
"""Between two looks of a follower: no file event exists on every system."""

DEFAULT_LINES = 100

OWN_LOGS = {DAEMON_LOG_NAME: "the daemon's own", GATEWAY_LOG_NAME: "the HTTP gateway's"}
"""Logs that are no model's; no model has their names."""

OTHER_NAMES = {"daemon": DAEMON_LOG_NAME, "gateway": GATEWAY_LOG_NAME}
"""What people call them; a model of that name comes first."""

_STAMP = re.compile(r"(?:\{\"at\": \")?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z")


class LogFolder(NamedTuple):
    """The folder of the logs, the models that may have one, and their other names."""

    path: Path
    models: list[str]
    aliases: Mapping[str, str] = {}


def complete_own_log(_: object, __: object, incomplete: str) -> list[CompletionItem]:
    """Return the logs that are no model's."""
    from click.shell_completion import CompletionItem

    own = [CompletionItem(name, help=whose) for name, whose in OWN_LOGS.items()]
    return [item for item in own if item.value.startswith(incomplete)]


@click.command()
@click.argument(
    "model",
    required=False,
    shell_complete=one_after_the_other(complete_model, complete_own_log),
)
@click.option("-f", "--follow", "is_following", is_flag=True, help="Follow new lines.")
@click.option(
    "-n",
    "--lines",
    "count",
    metavar="N",
    type=click.IntRange(min=0),
    help=(
        f"Show the last N lines of each log; the default is {DEFAULT_LINES}, or all with --since "
        "or --previous."
    ),
)
@click.option(
    "--since",
    "since_s",
    metavar="AGO",
    type=duration,
    help="Only show lines of the last 90s, 10m or 2h.",
)
@click.option(
    "--previous", "is_previous", is_flag=True, help="Show the log of the previous process."
)
@daemon_options
def logs(
    model: str | None,
    is_following: bool,
    count: int | None,
    since_s: float | None,
    is_previous: bool,
    target: Target,
    output: Output,
) -> None:
    """Example: mlxsup logs smollm2-135m -f

    Shows the log of MODEL, or of all models with the name of the model before each line. `mlxsup
    logs daemon` shows the log of the daemon, and `mlxsup logs gateway` that of its HTTP gateway.
    """
    if is_following and is_previous:
        message = (
            "--follow cannot be combined with --previous, which shows a process that has ended"
        )
        raise misuse(message, "mlxsup logs")
    folder = _find_folder(target, output)
    if model is not None and model not in folder.models:
        model = folder.aliases.get(model) or OTHER_NAMES.get(model, model)
    if model is not None and model not in [*folder.models, *OWN_LOGS]:
        raise unknown_model(model, folder.models)
    names = folder.models if model is None else [model]
    width = max(map(len, names), default=0) if model is None else 0

    def show(name: str, lines: Iterable[str]) -> None:
        for line in lines:
            shown = f"{name.ljust(width)} | {line}" if width else line
            output.result({"model": name, "line": line}, shown)

    if is_following:
        files: dict[str, FollowedFile] = {}
        with ExitStack() as stack:
            for name in names:
                path = log_path(folder.path, name)
                files[name] = stack.enter_context(closing(FollowedFile(path)))
                show(name, selected(path, count, since_s, end=files[name].start))
            while True:
                for name, file in files.items():
                    show(name, file.read_lines())
                check_reader()
                time.sleep(FOLLOW_INTERVAL_S)
    for name in names:
        try:
            path = log_path(folder.path, name)
            show(name, selected(path, count, since_s, is_previous=is_previous))
        except LookupError:
            if model is not None:
                message = f"the log of {name} has no previous process"
                hint = f"see `mlxsup logs {name}`"
                raise CliError(message, code="no_previous_generation", hint=hint) from None


def selected(
    path: Path,
    count: int | None,
    since_s: float | None,
    *,
    is_previous: bool = False,
    end: int | None = None,
) -> list[str]:
    """Return the lines of a log to show of those already written.

    Args:
        path: of its newest file.
        count: only that many, the last ones; None for the default.
        since_s: only those of the last `since_s` seconds.
        is_previous: only those of the generation before the current one.
        end: how many bytes of its newest file to look at; None for all.

    Raises:
        LookupError: there is no earlier generation.
    """
    if since_s is None and not is_previous:
        return tail(path, DEFAULT_LINES if count is None else count, end)
    lines = all_lines(path) if end is None else tail(path, sys.maxsize, end)
    if is_previous:
        previous = previous_generation(lines)
        if previous is None:
            raise LookupError
        lines = previous
    if since_s is not None:
        lines = since(lines, time.time() - since_s, written_at(path))
    return lines if count is None else lines[max(len(lines) - count, 0) :]


def _find_folder(target: Target, output: Output) -> LogFolder:
    """Ask the daemon; if none answers, look at what is on disk."""
    try:
        with connect(target) as client:
            value = client.status()
        rows = value["models"]
        aliases = {alias: row["name"] for row in rows for alias in row.get("aliases", ())}
        return LogFolder(Path(value["log_dir"]), [row["name"] for row in rows], aliases)
    except CliError as error:
        if error.status is not ExitStatus.NO_DAEMON:
            raise
        folder = _folder_without_daemon(target)
        if folder is None:
            raise
        output.note(f"{error.message}; these are the logs in {folder.path}")
        return folder


def _folder_without_daemon(target: Target) -> LogFolder | None:
    """Return what the latest daemon left; None if nothing was ever logged there."""
    path, config = log_dir_left_by(target), target.find().config
    if path is None:
        return None
    names = models_in(config)
    found = [file.name.removesuffix(".log") for file in sorted(path.glob("*.log"))]
    known = dict.fromkeys([*names.values(), *found])
    for own in OWN_LOGS:
        known.pop(own, None)
    return LogFolder(path, list(known), names)


def since(lines: Sequence[str], cutoff: float, written_at: float) -> list[str]:
    """Return the lines from a time on.

    A line without a time was written between its neighbours; if in doubt it is shown, because what
    a process prints as it dies has no time.

    Args:
        lines: oldest first.
        cutoff: seconds since the epoch.
        written_at: when the last line was written, at the latest.
    """
    for place in range(len(lines) - 1, -1, -1):
        stamp = _stamp_of(lines[place])
        if stamp is not None and stamp < cutoff:
            rest = list(lines[place + 1 :])
            break
    else:
        rest = list(lines)
    is_any_young = written_at >= cutoff or any(_stamp_of(line) is not None for line in rest)
    return rest if is_any_young else []


def previous_generation(lines: Sequence[str]) -> list[str] | None:
    """Return the previous process's output, with its rule line; None if there was none."""
    rules = [place for place, line in enumerate(lines) if GENERATION_HEADER.match(line)]
    if not rules:
        return None
    if len(rules) == 1:
        # The previous one's rule line may have gone with the oldest file.
        return list(lines[: rules[0]]) or None
    return list(lines[rules[-2] : rules[-1]])


def _stamp_of(line: str) -> float | None:
    header = GENERATION_HEADER.match(line)
    match = _STAMP.match(line, header.end() if header else 0)
    if match is None:
        return None
    try:
        whole = calendar.timegm(time.strptime(match.group(1), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
    return whole + float(match.group(2) or 0)
