"""The configuration file, the models that it names, and what they are downloaded with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from ..facts import Configuration, Hub, ModelFolder
from ..finding import Finding, note, ok, problem

FILE, MODELS, HUB = "configuration", "models", "downloads"

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_COMMAND = re.compile(r"`((?:mlxsup (?:pull|convert)|git) [^`]+)`")
"""What of a hint repairs a model folder; other commands only show something."""


def check_configuration(facts: Configuration) -> Iterator[Finding]:
    """Judges which file counts, and what is wrong with it."""
    counting = facts.counting
    if counting is None:
        yield note(
            FILE,
            f"there is none of {', '.join(str(one.path) for one in facts.looked_at)}",
            why="`mlxsup start` needs one, or --model",
            command="mlxsup init",
        )
    elif not counting.is_there:
        yield problem(
            FILE,
            f"{counting.path} does not exist; {counting.source} names it",
            why="`mlxsup start` exits with 78",
            fix=f"write it with `mlxsup init {shlex.quote(str(counting.path))}`, or name another",
        )
    for text in facts.problems:
        yield problem(
            FILE,
            text,
            why="`mlxsup start` exits with 78, and a reload is refused",
            fix="change that line as it says",
        )
    if counting is not None and counting.is_there and not facts.problems:
        models = f"{facts.models} model{'' if facts.models == 1 else 's'}"
        yield ok(FILE, f"{counting.path} is valid, with {models}")
    yield from _shadows(facts)


def _shadows(facts: Configuration) -> Iterator[Finding]:
    counting = facts.counting
    for one in facts.looked_at:
        is_other = counting is not None and one is not counting and one.path != counting.path
        if one.is_there and counting is not None and is_other:
            yield note(
                FILE,
                f"{one.path} is not read, because {counting.path} comes first ({counting.source})",
                why="what you change there has no effect",
                fix=f"name the one you mean with --config, or rename {counting.path}",
            )
    if facts.endpoint_variable:
        yield note(
            FILE,
            f"MLXSUP_ENDPOINT is set to {facts.endpoint_variable}",
            why="commands without --config look for the daemon there, whatever the file says;"
            " `mlxsup start` does not",
            command="unset MLXSUP_ENDPOINT",
        )


def check_models(facts: Sequence[ModelFolder], offline: str) -> Iterator[Finding]:
    """Judges the folders of the configured models.

    Args:
        facts: a folder each.
        offline: the variable that forbids downloads; empty if none does.
    """
    broken = [one for one in facts if one.problem]
    for one in broken:
        found = _COMMAND.search(one.hint)
        command = found.group(1) if found else ""
        if offline and command.startswith("mlxsup pull"):
            command = online(command)
        yield problem(
            MODELS,
            f"{one.name}: {one.problem}",
            why="its load fails, and requests for it end with `load_failed`",
            fix="" if command else one.hint or "copy or download the model again",
            command=command,
        )
    if facts and not broken:
        yield ok(MODELS, f"the files of {', '.join(one.name for one in facts)} are complete")


def check_hub(facts: Hub) -> Iterator[Finding]:
    """Judges whether what is missing can be downloaded."""
    for model, repository in facts.missing:
        revision = "" if repository.revision == "main" else f" --revision {repository.revision}"
        command = f"mlxsup pull {repository.repo}{revision}"
        if facts.offline:
            yield problem(
                HUB,
                f"{repository}, which {model} needs, is not on this disk, and {facts.offline}"
                " forbids to download it",
                why="its load fails",
                command=online(command),
            )
        else:
            yield note(
                HUB,
                f"{repository}, which {model} needs, is not on this disk yet",
                why="its first load waits for the download",
                command=command,
            )
    if facts.token_path is not None and facts.token_mode is not None and facts.token_mode & 0o077:
        yield note(
            HUB,
            f"others may read the token in {facts.token_path} (mode {facts.token_mode:04o})",
            why="whoever has it can use the hub in your name",
            command=f"chmod 600 {shlex.quote(str(facts.token_path))}",
        )
    elif facts.token:
        yield ok(HUB, f"there is a token for the hub ({facts.token})")


def online(command: str) -> str:
    """The same command, with downloads allowed."""
    return f"env {' '.join(f'-u {name}' for name in OFFLINE)} {command}"
