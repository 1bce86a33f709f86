"""`mlxsup bench`: how fast a model answers, by the sizes of prompts and answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..connection import Target, connect, daemon_options
from ..exit_status import CliError, ExitStatus
from ..keys import read_key
from ..model_names import check_known, optional_model_argument
from ..model_rows import row_called
from ..new_file import NewFile
from ..only_model import only_model
from ..terminal.bench_progress import BenchProgress
from ..terminal.output import Output
from ..terminal.waiting import progress_shown

if TYPE_CHECKING:
    from ..benchmark.http_reading import Address
    from ..benchmark.run import Run
    from ..benchmark.saved import SavedRun
    from ..benchmark.sizes import Wishes

COMMAND = "mlxsup bench"
SOCKET, HTTP = "zmq", "http"


def sizes(text: str) -> tuple[int, ...]:
    """The type of an option that takes numbers with commas between them: `16,512`.

    Raises:
        click.BadParameter: the text is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 9]
    if len(numbers) < len(parts) or not all(numbers):
        raise click.BadParameter(f"{text!r} is not a list of numbers from 1 on, such as 16,512")
    return tuple(dict.fromkeys(numbers))


@click.command()
@optional_model_argument
@click.option("--prompt-tokens", metavar="N,…", type=sizes, help="Sizes of prompts: 16,512.")
@click.option("--output-tokens", metavar="N,…", type=sizes, help="Sizes of answers: 128.")
@click.option("--concurrency", metavar="N,…", type=sizes, help="Requests at once: 1,4,16.")
@click.option(
    "--repeats",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="How often each size is measured.",
)
@click.option(
    "--through",
    type=click.Choice([SOCKET, HTTP]),
    default=SOCKET,
    show_default=True,
    help="The daemon's socket, or its HTTP gateway.",
)
@click.option("--key", metavar="KEY", help="A key of the gateway; - reads it from stdin.")
@click.option("--output", "kept", metavar="FILE", type=NewFile(), help="Write the run here.")
@click.option(
    "--compare",
    "earlier",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Say what is slower than in this earlier run.",
)
@click.option(
    "--fail-if-slower",
    "percent",
    metavar="PERCENT",
    type=click.FloatRange(0),
    help="With --compare: exit with 1 if anything is slower by more than this.",
)
@daemon_options
def bench(
    model: str | None,
    repeats: int,
    through: str,
    key: str | None,
    kept: Path | None,
    earlier: Path | None,
    percent: float | None,
    target: Target,
    output: Output,
    **wanted: tuple[int, ...] | None,
) -> int:
    """Example: mlxsup bench smollm2 --output before.json

    Measures how fast MODEL answers: the time to the first token, the gaps between tokens, tokens
    per second and memory, for each size of prompts and answers and each number of requests at once.
    Repeats of all sizes take turns, after a warm-up. Ctrl-C shows what has been measured so far.
    MODEL may be left out if only one is configured.
    """
    from ..benchmark.comparison import passes
    from ..benchmark.saved import check_new, read_saved
    from ..benchmark.sizes import Wishes

    _check_options(repeats, through, key, earlier, percent)
    before = read_saved(earlier) if earlier else None
    if kept is not None:
        check_new(kept)
    given = read_key(key)
    wishes = Wishes(**wanted)
    run, facts, address, endpoint = _prepare(
        model, wishes if before is None else wishes.or_else(before.wishes), repeats, through,
        given, target, output,
    )  # fmt: skip
    failure: CliError | None = None
    is_interrupted = False
    try:
        _measure(endpoint, run, address, given or "", output)
    except KeyboardInterrupt:
        output.end_line()
        is_interrupted = True
    except CliError as error:
        failure = error
    value = _value(run, facts, before)
    if value["cells"]:
        _show(value, kept, output, has_failed=failure is not None)
    elif is_interrupted:
        output.note("nothing has been measured yet")
    if failure is not None:
        raise failure
    if is_interrupted:
        return ExitStatus.INTERRUPTED
    if percent is None or passes(value["comparison"], percent):
        return ExitStatus.OK
    if not value["comparison"]["compared"]:
        output.note(f"hint: measure {earlier} again with the same sizes and at least 3 repeats")
    return ExitStatus.FAILED


def _check_options(
    repeats: int, through: str, key: str | None, earlier: Path | None, percent: float | None
) -> None:
    """Refuses options that make no sense together.

    Raises:
        CliError: usage.
    """
    from ..benchmark.comparison import LEAST_REPEATS

    wrong = ""
    if key is not None and through != HTTP:
        wrong = "--key is for --through http"
    elif percent is not None and earlier is None:
        wrong = "--fail-if-slower needs --compare FILE"
    elif earlier is not None and repeats < LEAST_REPEATS:
        wrong = f"--compare needs at least {LEAST_REPEATS} repeats, to tell a change from chance"
    if wrong:
        hint = f"see `{COMMAND} -h`"
        raise CliError(wrong, code="usage", hint=hint, status=ExitStatus.USAGE)


def _prepare(
    model: str | None,
    wishes: Wishes,
    repeats: int,
    through: str,
    key: str | None,
    target: Target,
    output: Output,
) -> tuple[Run, dict[str, Any], Address | None, str]:
    """Loads the model, and finds the sizes that fit it.

    Returns:
        The run without any figures, what is known about it, the address of the gateway if that is
        to be asked, and the daemon's endpoint.

    Raises:
        CliError: there is no such model, or it cannot be loaded, or a size does not fit.
    """
    from ..benchmark.run import Run
    from ..benchmark.sizes import Limits, cells_of, left_out

    with connect(target) as client:
        status = client.status()
        model = only_model(status, COMMAND) if model is None else model
        check_known(status, model)
        address = _gateway(status, target, key) if through == HTTP else None
        with progress_shown(client, model, output):
            client.load(model)
        row = row_called(client.status(), model)
        assert row is not None, "it was there when it was loaded"
        endpoint = client.endpoint
    limits = Limits(model=row["name"], context_tokens=row["context_length"], rows=row["row_limit"])
    run = Run(model=row["name"], cells=cells_of(wishes, limits), repeats=repeats)
    facts = {
        "through": through,
        "backend": row["backend"],
        "daemon": status["version"],
        "left_out": left_out(wishes, limits),
    }
    return run, facts, address, endpoint


def _gateway(status: dict[str, Any], target: Target, key: str | None) -> Address:
    """Where the gateway listens.

    Raises:
        CliError: there is none, or it needs a key that was not given.
    """
    from urllib.parse import urlsplit

    from ..connecting import gateway_url, is_key_missing

    parts = urlsplit(gateway_url(status, ""))
    if is_key_missing(target, key):
        raise CliError(
            "the gateway needs a key",
            code="key_missing",
            hint="`mlxsup key new bench` makes one; with `--key -` it is read from stdin",
        )
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _measure(endpoint: str, run: Run, address: Address | None, key: str, output: Output) -> None:
    """Measures everything; what has been measured is in the run, however this ends.

    Raises:
        CliError: an answer has failed.
        KeyboardInterrupt: somebody has interrupted it.
    """
    import asyncio

    from mlxsup.client import ConnectionLost, RequestError

    from ..benchmark.burst import AnswerError
    from ..benchmark.measuring import measure
    from ..connection import explain_connection_lost, explain_request_error

    try:
        with BenchProgress(run, output) as progress:
            asyncio.run(measure(endpoint, run, progress.tell, address=address, key=key))
    except RequestError as error:
        raise explain_request_error(error) from None
    except ConnectionLost as error:
        raise explain_connection_lost(error) from None
    except AnswerError as error:
        hint = f"see `mlxsup logs {run.model}`"
        message = f"an answer of {run.model} cannot be measured: {error}"
        raise CliError(message, code="broken_answer", hint=hint) from None
    except OSError as error:
        message = f"the gateway cannot be asked: {error.strerror or error}"
        raise CliError(message, code="gateway", hint="`mlxsup status` shows its state") from None


def _value(run: Run, facts: dict[str, Any], before: SavedRun | None) -> dict[str, Any]:
    """The run as `--json` prints it."""
    import datetime

    from ..benchmark.comparison import compare
    from ..benchmark.machine import machine_facts
    from ..benchmark.remarks import remarks_of
    from ..benchmark.saved import KIND

    others = run.others
    value = {
        "kind": KIND,
        "model": run.model,
        "through": facts["through"],
        "backend": facts["backend"],
        "daemon": facts["daemon"],
        "machine": machine_facts(),
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "repeats": run.repeats,
        "is_complete": run.is_complete,
        "cells": run.cell_maps(),
        "interrupted_answers": run.interrupted,
        "answers_that_waited": run.waited,
        "cached_tokens": run.cached_tokens,
        "other_requests": None if others is None else others.requests,
        "other_models": [] if others is None else list(others.models),
        "remarks": [*facts["left_out"], *remarks_of(run)],
        "comparison": None,
    }
    if before is not None:
        value["comparison"] = compare(run, value, before)
    return value


def _show(value: dict[str, Any], kept: Path | None, output: Output, *, has_failed: bool) -> None:
    """Prints the run, and writes it to its file.

    With --json, a run that has failed is only written: what is printed is its error.
    """
    from ..benchmark.saved import write_new
    from ..terminal.bench_table import bench_lines

    if not output.is_json:
        output.data("\n".join(bench_lines(output, value)))
    elif not has_failed:
        output.object(value)
    if kept is not None:
        write_new(kept, output.object_line({**value, "comparison": None}))
        output.note(f"wrote {kept}")
