"""Runs a proof: prints each figure as it comes, and saves all of them."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.text import timestamp
from mlxsup.protocol.version import VERSION

from ..connection import Target
from ..detach import make_private_folder
from ..exit_status import CliError, ExitStatus
from ..own_daemon import visit_own_daemon
from ..terminal.columns import wrapped
from ..terminal.output import SCHEMA_VERSION, Output, width_of
from .figures import Figure, Verdict
from .measuring import Proof
from .subject import Subject, find_subject

if TYPE_CHECKING:
    from mlxsup.client import Client

COLOURS = {Verdict.PASSED: "green", Verdict.FAILED: "red", Verdict.SKIPPED: "yellow"}
WORD_WIDTH = max(map(len, Verdict))


def prove(named: str | None, saved: Path | None, target: Target, output: Output) -> int:
    """Proves on a model what mlxsup promises, in its own daemon.

    Args:
        named: the model; None: the only one, or that of the demonstration.
        saved: where to save the figures; None: in the log folder.
        target: the options.
        output: how to write output.

    Returns:
        1 if a figure is not what it must be.

    Raises:
        CliError: there is no such model, it cannot be loaded, or the figures cannot be saved.
    """
    _check_new(saved)
    subject = find_subject(named, target.config, output)
    figures: list[Figure] = []

    def tell(figure: Figure) -> None:
        figures.append(figure)
        if not output.is_json:
            output.data("\n".join(_lines(figure, output)))

    if not output.is_json:
        output.data(f"{subject.name} ({subject.source or 'fake engine'}), in its own daemon")
    moment = time.time()
    measured = _run(subject, output, tell)
    value = _value(subject, measured, figures, moment)
    path = _save(value, saved or _new_file(subject.log_dir, moment))
    failed = [figure.title for figure in figures if figure.verdict is Verdict.FAILED]
    if output.is_json:
        output.object({"proof": {**value, "path": str(path)}})
    else:
        output.note(f"the figures are saved in {path}")
        output.data("\n".join(wrapped(_summary(figures, failed), width_of(sys.stdout))))
    return ExitStatus.FAILED if failed else ExitStatus.OK


def _check_new(path: Path | None) -> None:
    """Refuses a file that cannot be made, before a minute is spent.

    Raises:
        CliError: it exists, or has no folder.
    """
    if path is not None and (os.path.lexists(path) or not path.absolute().parent.is_dir()):
        raise CliError(
            f"{path} exists already, or its folder does not exist",
            code="file",
            hint="name a new file in a folder that exists",
            status=ExitStatus.USAGE,
        )


def _run(subject: Subject, output: Output, tell: Callable[[Figure], None]) -> dict[str, Any]:
    """Measures the figures; returns what is known of the model.

    Raises:
        CliError: the model cannot be loaded, or gives no answer.
    """

    def visit(client: Client) -> dict[str, Any]:
        return Proof(client, output, tell, is_exact=subject.is_exact).run()

    # Not the user's own temporary folder: on some systems its path is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="mlxsup-proof-", dir="/tmp") as place:
        try:
            return visit_own_daemon(subject.server(Path(place)), visit)
        except CliError as error:
            if error.code == "insufficient_memory":
                error.hint = "free memory first: a daemon that runs keeps its models"
            elif error.code in ("load_failed", "model_failed"):
                error.hint = "`mlxsup doctor` may say why; so does the log of `mlxsup start`"
            raise


def _lines(figure: Figure, output: Output) -> list[str]:
    word = figure.verdict.value.ljust(WORD_WIDTH)
    width = width_of(sys.stdout)
    first, *more = wrapped(f"{word}  {figure.title}: {figure.text}", width)
    styled = output.style(word, sys.stdout, fg=COLOURS[figure.verdict])
    indent = WORD_WIDTH + 2
    rest = wrapped(" ".join(more), width, indent) if more else []
    return [styled + first[len(word) :], *rest]


def _summary(figures: list[Figure], failed: list[str]) -> str:
    if failed:
        return f"FAILED: {', '.join(failed)}; please report it with the file"
    skipped = sum(figure.verdict is Verdict.SKIPPED for figure in figures)
    passed = f"passed: {len(figures) - skipped} of {len(figures)}"
    return f"{passed}; {skipped} could not be shown here" if skipped else passed


def _value(
    subject: Subject, measured: dict[str, Any], figures: list[Figure], moment: float
) -> dict[str, Any]:
    """What is saved."""
    return {
        "schema_version": SCHEMA_VERSION,
        "at": timestamp(moment),
        "version": VERSION,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "model": subject.name,
        "source": subject.source,
        **measured,
        "took_s": round(time.time() - moment, 1),
        "has_passed": all(figure.verdict is not Verdict.FAILED for figure in figures),
        "figures": [figure.as_map() for figure in figures],
    }


def _new_file(log_dir: Path, moment: float) -> Path:
    with suppress(OSError):  # saving says why
        make_private_folder(log_dir)
    stamp = timestamp(moment).replace("-", "").replace(":", "")
    return log_dir / f"proof-{stamp}.json"


def _save(value: dict[str, Any], path: Path) -> Path:
    """Writes a new file that only its owner can read.

    Raises:
        CliError: it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise CliError(
            f"cannot write {path}: {error.strerror}",
            code="file",
            hint="name another file with --output",
        ) from None
    return path.absolute()
