"""Pictures that go with a message: the files that people name, as a request takes them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from .arguments import row_called
from .exit_status import CliError

Picture = dict[str, Any]
"""A part of a message; `at` is what the daemon's errors call it."""

MAX_NAME = 64


def read_picture(text: str) -> Picture:
    """Return the picture in the file that a person has named."""
    from mlxsup.client.pictures import picture_problem
    from mlxsup.protocol.pictures import MAX_IMAGE_BYTES
    from mlxsup.protocol.regular_file import read_regular

    path = _path_of(text)
    try:
        data = read_regular(path, MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:  # a zero byte in its name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CliError(f"cannot read the picture {path}: {why}") from None
    if problem := picture_problem(data):
        raise CliError(f"{path} {problem}")
    return {"type": "image", "data": data, "at": path.name[-MAX_NAME:]}


def check_taker(status: Mapping[str, Any], model: str) -> None:
    """Raise if a model is known to take text only; of one whose files are not here yet, its worker
    says it.
    """
    row = row_called(status, model)
    known = row.get("capabilities") if row is not None else None
    if not known or "images" in known:
        return
    others = [one["name"] for one in status["models"] if "images" in one["capabilities"]]
    raise CliError(
        f"{model} takes text only, no pictures",
        code="invalid_request",
        hint=f"show it to {' or '.join(others)}" if others else "",
    )


def with_pictures(text: str, pictures: list[Picture]) -> str | list[dict[str, Any]]:
    """Return the content of a message: pictures before its text."""
    return [*pictures, {"type": "text", "text": text}] if pictures else text


def _path_of(text: str) -> Path:
    """Return a path; a terminal quotes the name of a file that is dropped onto it."""
    path = Path(os.path.expanduser(text))
    if not path.exists() and ("\\" in text or text[:1] in "'\""):
        try:
            words = shlex.split(text)
        except ValueError:
            return path
        if len(words) == 1:
            return Path(os.path.expanduser(words[0]))
    return path


def _picture(text: str) -> Picture:
    try:
        return read_picture(text)
    except CliError as error:
        raise click.BadParameter(error.message) from None


image_option = click.option(
    "--image", "images", metavar="FILE", type=_picture, multiple=True,
    help="Show the picture in FILE to the model; may be repeated.",
)  # fmt: skip
