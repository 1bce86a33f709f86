"""`mlxsup bench`: how fast a model answers, by the sizes of prompts and answers."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..arguments import check_known, only_model, optional_model_argument, row_called
from ..changes import progress_shown
from ..connection import Target, connect, daemon_options
from ..exit_status import CliError, ExitStatus, misuse
from ..keys import read_key
from ..new_file import new_file
from ..options import NewFile
from ..terminal.output import Line, LiveLine, Output, width_of
from ..terminal.tables import listing, text_lines
from ..terminal.text import counted, format_bytes

if TYPE_CHECKING:
    from ..benchmark import Address, Cell, Run

COMMAND = "mlxsup bench"
SOCKET, HTTP = "zmq", "http"
THROUGH = {SOCKET: "the daemon's socket", HTTP: "HTTP"}

SIZES = ("prompt_tokens", "output_tokens", "concurrency")
PROMPT_TOKENS = (16, 512)
OUTPUT_TOKENS = (128,)
CONCURRENCY = (1, 4, 16)

LEAST_REPEATS = 3
"""Of both runs that are compared. If nothing has changed, all of 3 values are above all of 3 others
once in 20 times, and all of 5 above 5 others once in 252 times."""

TITLES = {
    "first_token_s": "FIRST TOKEN",
    "gap_p50_s": "GAP P50",
    "gap_p99_s": "GAP P99",
    "gap_max_s": "LONGEST",
    "stream_tokens_per_s": "TOK/S EACH",
    "tokens_per_s": "TOK/S ALL",
    "steady_tokens_per_s": "TOK/S STEADY",
    "prefill_tokens_per_s": "PREFILL TOK/S",
    "memory_bytes": "MEMORY",
}
"""Figures by their keys, which end with the unit: seconds should be few, tokens per second many."""

TABLES = (
    ("first_token_s", "gap_p50_s", "gap_p99_s", "gap_max_s"),
    ("stream_tokens_per_s", "tokens_per_s", "prefill_tokens_per_s", "memory_bytes"),
)
COMPARED = ("first_token_s", "gap_p50_s", "gap_p99_s", "tokens_per_s")

SAVED_HINT = "`mlxsup bench MODEL --output FILE` writes one"


def sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of a text with commas between them: `16,512`.

    Raises:
        click.BadParameter: the text is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 9]
    if len(numbers) < len(parts) or not all(numbers):
        raise click.BadParameter(f"{text!r} is not a list of positive numbers such as 16,512")
    return tuple(dict.fromkeys(numbers))


@click.command()
@optional_model_argument
@click.option("--prompt-tokens", metavar="N,…", type=sizes, help="Prompt sizes; by default 16,512.")
@click.option("--output-tokens", metavar="N,…", type=sizes, help="Answer sizes; by default 128.")
@click.option(
    "--concurrency", metavar="N,…", type=sizes, help="Concurrent requests; by default 1,4,16."
)
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
@click.option(
    "--output", "kept", metavar="FILE", type=NewFile(), help="Save the results to this file."
)
@click.option(
    "--compare",
    "earlier",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Compare with the results in this file.",
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
    """Example: mlxsup bench smollm2-135m --output before.json

    Measures how fast MODEL answers: the time to the first token, the gaps between tokens, tokens
    per second and memory, for each prompt size, answer size and number of concurrent requests.
    After a warm-up, the repeats of all sizes take turns. Ctrl-C shows the results so far. MODEL may
    be left out if only one is configured.
    """
    wrong = {
        "--key only works with --through http": key is not None and through != HTTP,
        "--fail-if-slower needs --compare FILE": percent is not None and earlier is None,
        f"--compare needs at least {LEAST_REPEATS} repeats to tell a change from noise": (
            earlier is not None and repeats < LEAST_REPEATS
        ),
    }
    for message in (message for message, is_so in wrong.items() if is_so):
        raise misuse(message, COMMAND)
    before = read_saved(earlier) if earlier else None
    if kept is not None:
        check_new(kept)
    given = read_key(key)
    if before is not None:
        # Without sizes they are those of the file.
        for name, found in zip(SIZES, zip(*cells_in(before), strict=True), strict=True):
            wanted[name] = wanted[name] or tuple(dict.fromkeys(found))
    run, facts, address, endpoint = _prepare(model, wanted, repeats, through, given, target, output)
    failure: CliError | None = None
    is_interrupted = False
    try:
        _measure(endpoint, run, address, given or "", output)
    except KeyboardInterrupt:
        output.end_line()
        is_interrupted = True
    except CliError as error:
        failure = error
    value = value_of(run, facts)
    if before is not None and earlier is not None:
        value["comparison"] = compare(value, before, earlier)
    if value["cells"]:
        _show(value, kept, output, has_failed=failure is not None)
    elif is_interrupted:
        output.note("no results yet")
    if failure is not None:
        raise failure
    if is_interrupted:
        return ExitStatus.INTERRUPTED
    if percent is None or passes(value["comparison"], percent):
        return ExitStatus.OK
    if not value["comparison"]["compared"]:
        output.note(f"hint: record {earlier} again with the same sizes and at least 3 repeats")
    return ExitStatus.FAILED


# ---------------------------------------------------------------- measuring


def _prepare(
    model: str | None,
    wanted: Mapping[str, tuple[int, ...] | None],
    repeats: int,
    through: str,
    key: str | None,
    target: Target,
    output: Output,
) -> tuple[Run, dict[str, Any], Address | None, str]:
    """Load the model, and find the sizes that fit it.

    Returns:
        The run without any figures, what is known about it, the address of the gateway if that is
        to be asked, and the daemon's endpoint.
    """
    from urllib.parse import urlsplit

    from ..benchmark import Run
    from ..connecting import gateway_url, is_key_missing

    with connect(target) as client:
        status = client.status()
        model = only_model(status, COMMAND) if model is None else model
        check_known(status, model)
        address = None
        if through == HTTP:
            parts = urlsplit(gateway_url(status, ""))
            address = parts.hostname or "", parts.port or 0
            if is_key_missing(target, key):
                hint = "`mlxsup key new bench` creates one; `--key -` reads it from stdin"
                raise CliError("the gateway needs a key", code="key_missing", hint=hint)
        with progress_shown(client, model, output):
            client.load(model)
        row = row_called(client.status(), model)
        assert row is not None, "it was there when it was loaded"
        endpoint = client.endpoint
    cells, left_out = cells_of(wanted, row["name"], row["context_length"], row["row_limit"])
    about = {"through": through, "backend": row["backend"], "daemon": status["version"]}
    facts = {**about, "left_out": left_out}
    return Run(model=row["name"], cells=cells, repeats=repeats), facts, address, endpoint


def cells_of(
    wanted: Mapping[str, tuple[int, ...] | None], model: str, context: int | None, rows: int
) -> tuple[list[Cell], list[str]]:
    """Return the sizes to measure: what was asked for, and otherwise the usual ones that fit.

    Args:
        wanted: `prompt_tokens`, `output_tokens` and `concurrency`; None where there is a choice.
        model: its name.
        context: tokens of a prompt and its answer together; None if it is not known.
        rows: requests that run at once.

    Returns:
        The sizes, and a sentence for each usual one that does not fit.
    """
    from ..benchmark import Cell

    left_out = []
    streams = wanted["concurrency"]
    if streams is None:
        streams = tuple(dict.fromkeys(min(number, rows) for number in CONCURRENCY))
        if max(CONCURRENCY) > rows:
            left_out.append(
                f"{model} runs at most {rows} requests at once (max_concurrency), so "
                f"{max(CONCURRENCY)} concurrent requests were not measured"
            )
    outputs = wanted["output_tokens"] or OUTPUT_TOKENS
    answer = max(outputs)
    prompts = wanted["prompt_tokens"]
    if prompts is None:
        fitting = [one for one in PROMPT_TOKENS if context is None or one + answer <= context]
        prompts = tuple(fitting) or (1,)
        if prompts != PROMPT_TOKENS:
            left_out.append(
                f"prompts of {max(PROMPT_TOKENS)} tokens do not fit into the {context} tokens "
                f"of context of {model}"
            )
    if context is not None and max(prompts) + answer > context:
        hint = f"--prompt-tokens can be at most {context - answer} with answers of {answer} tokens"
        raise CliError(
            f"a prompt of {max(prompts)} tokens and an answer of {answer} do not fit into the "
            f"{context} tokens of context of {model}",
            code="context_length_exceeded",
            hint=hint if answer < context else f"--output-tokens can be at most {context - 1}",
        )
    if max(streams) > rows:
        raise CliError(
            f"{model} runs at most {rows} requests at once, but you asked for {max(streams)}",
            code="too_many_requests",
            hint=f"use --concurrency {rows} or less, or run `mlxsup config set "
            f"models.{model}.max_concurrency {max(streams)}`",
        )
    cells = [Cell(prompt, size, number) for prompt in prompts for size in outputs
             for number in streams]  # fmt: skip
    return cells, left_out


def _measure(endpoint: str, run: Run, address: Address | None, key: str, output: Output) -> None:
    """Measure everything; what has been measured is in the run, however this ends.

    Raises:
        CliError: an answer has failed.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    import asyncio

    from mlxsup.client import ConnectionLost, RequestError

    from ..benchmark import AnswerError, measure
    from ..connection import explain_connection_lost, explain_request_error

    try:
        with LiveLine(output) as line:

            def tell(text: str) -> None:
                line.tell(text, text)

            asyncio.run(measure(endpoint, run, tell, address=address, key=key))
    except RequestError as error:
        raise explain_request_error(error) from None
    except ConnectionLost as error:
        raise explain_connection_lost(error) from None
    except AnswerError as error:
        hint = f"see `mlxsup logs {run.model}`"
        message = f"the answer of {run.model} could not be measured: {error}"
        raise CliError(message, code="broken_answer", hint=hint) from None
    except OSError as error:
        message = f"cannot connect to the HTTP gateway: {error.strerror or error}"
        raise CliError(message, code="gateway", hint="`mlxsup status` shows its state") from None


# ---------------------------------------------------------------- as JSON, and in files


def value_of(run: Run, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run as `--json` prints it."""
    import datetime

    return {
        "kind": "bench",
        "model": run.model,
        "through": facts["through"],
        "backend": facts["backend"],
        "daemon": facts["daemon"],
        "machine": machine_facts(),
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "repeats": run.repeats,
        "is_complete": run.done == run.bursts,
        "cells": [
            {
                **cell._asdict(),
                "repeats": max(map(len, values.values())),
                "figures": {name: _summary(values.get(name)) for name in TITLES},
            }
            for cell in run.cells
            if (values := run.values.get(cell))
        ],
        "interrupted_answers": run.interrupted,
        "answers_that_waited": run.waited,
        "cached_tokens": run.cached_tokens,
        "other_requests": run.other_requests,
        "other_models": sorted(run.other_models),
        "remarks": [*facts["left_out"], *run.remarks()],
        "comparison": None,
    }


def machine_facts() -> dict[str, Any]:
    """Return the machine, and the versions that decide about figures; None for a package that is
    not there."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import psutil

    from mlxsup.protocol.version import VERSION

    versions: dict[str, str | None] = {"mlxsup": VERSION}
    for package in ("mlx", "mlx-lm", "pyzmq"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": versions,
    }


def _summary(values: Sequence[float] | None) -> dict[str, Any] | None:
    if not values:
        return None
    around = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {**around, "values": list(values)}


def cells_in(value: Mapping[str, Any]) -> dict[Cell, dict[str, list[float]]]:
    """Return the values of each figure by size, of a run as `--json` prints it."""
    from ..benchmark import Cell

    return {
        Cell(*(int(one[name]) for name in SIZES)): {
            name: [float(number) for number in about["values"]]
            for name in TITLES
            if (about := one["figures"].get(name))
        }
        for one in value["cells"]
    }


def conditions_of(value: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run, as `--json` prints it, was measured with, by what people call it."""
    machine = value["machine"]
    return {
        **{name: str(value[name]) for name in ("model", "through", "backend")},
        "machine": f"{machine['system']} {machine['architecture']}, {machine['cores']} cores",
        **{name: str(version) for name, version in machine["versions"].items()},
    }


def read_saved(path: Path) -> dict[str, Any]:
    """Return the run in a file that `write_new` has written, or `--json` printed."""
    try:
        value: dict[str, Any] = json.loads(path.read_text())
        is_run = value["kind"] == "bench" and conditions_of(value) and cells_in(value)
        if is_run and isinstance(value["measured_at"], str):
            return value
    except OSError as error:
        raise _unusable(f"{path}: {error.strerror}", SAVED_HINT) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise _unusable(f"{path} was not written by `mlxsup bench`", SAVED_HINT)


def check_new(path: Path) -> None:
    """Refuse a file that cannot be written, before anything has been measured for it."""
    if os.path.lexists(path):
        raise _unusable(f"{path} exists", "choose another file; `bench` never overwrites results")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "is not writable" if folder.is_dir() else "does not exist"
        raise _unusable(f"{path}: the folder {folder} {what}", "choose another file")


def _unusable(message: str, hint: str) -> CliError:
    return CliError(message, code="file", hint=hint, status=ExitStatus.USAGE)


def write_new(path: Path, text: str) -> None:
    """Write a run."""
    try:
        with new_file(path, 0o666) as file:
            file.write(f"{text}\n".encode())
    except OSError as error:
        hint = "the figures are above"
        raise CliError(f"{path}: {error.strerror}", code="file", hint=hint) from None


# ---------------------------------------------------------------- next to an earlier run


def compare(now: Mapping[str, Any], before: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return what has changed, as `--json` prints it.

    A figure has changed if its values do not overlap: the best of one run is worse than the worst
    of the other.
    """
    changes: list[dict[str, Any]] = []
    compared = too_few = 0
    cells, old_cells = cells_in(now), cells_in(before)
    for cell, name in product(cells, COMPARED):
        values, earlier = cells[cell].get(name), old_cells.get(cell, {}).get(name)
        if not values or not earlier or min(*values, *earlier) <= 0:
            continue
        if min(len(values), len(earlier)) < LEAST_REPEATS:
            too_few += 1
            continue
        compared += 1
        if min(values) > max(earlier) or max(values) < min(earlier):
            after, then = statistics.median(values), statistics.median(earlier)
            longer = then / after if name.endswith("_per_s") else after / then
            about = {"figure": name, "before": then, "now": after}
            changes.append({**cell._asdict(), **about, "slower_percent": 100 * (longer - 1)})
    changes.sort(key=lambda one: one["slower_percent"])
    old_conditions, conditions = conditions_of(before), conditions_of(now)
    return {
        "file": str(file),
        "measured_at": before["measured_at"],
        "compared": compared,
        "too_few": too_few,
        "not_there": len(cells.keys() - old_cells.keys()),
        "slower": [one for one in reversed(changes) if one["slower_percent"] > 0],
        "faster": [one for one in changes if one["slower_percent"] <= 0],
        "conditions": [
            {"what": what, "before": earlier, "now": conditions.get(what, "")}
            for what, earlier in old_conditions.items()
            if conditions.get(what, "") != earlier
        ],
    }


def passes(comparison: Mapping[str, Any], percent: float) -> bool:
    """True if figures were compared, and none is slower beyond the spread and by more than this."""
    too_slow = any(one["slower_percent"] > percent for one in comparison["slower"])
    return comparison["compared"] > 0 and not too_slow


# ---------------------------------------------------------------- for people


def _show(value: dict[str, Any], kept: Path | None, output: Output, *, has_failed: bool) -> None:
    """Print the run, and write it to its file.

    With --json, a run that has failed is only written: what is printed is its error.
    """
    if output.is_json:
        if not has_failed:
            output.object(value)
    else:
        repeats, width = value["repeats"], width_of(sys.stdout)
        head = f"{value['model']} through {THROUGH[value['through']]}, {counted(repeats, 'repeat')}"
        head += ": medians, and how much repeats differ (±)" if repeats > 1 else ""
        output.show(text_lines(head, width))
        for names in TABLES:
            output.data("")
            output.show(_table(value["cells"], names))
        remarks = [*value["remarks"], *_comparison(value["comparison"])]
        output.show(*([[]] for _ in remarks[:1]), *(text_lines(one, width) for one in remarks))
    if kept is not None:
        write_new(kept, output.object_line({**value, "comparison": None}))
        output.note(f"wrote {kept}")


def _table(cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Line]:
    headings = ("PROMPT", "OUTPUT", "STREAMS", *(TITLES[name] for name in names))
    rows = [
        [
            *(str(cell[size]) for size in SIZES),
            *(summary_text(name, cell["figures"][name]) for name in names),
        ]
        for cell in cells
    ]
    return listing(headings, rows, right=headings)


def summary_text(name: str, summary: Mapping[str, Any] | None) -> str:
    """Return the median of a figure with its unit, and how far repeats are from each other."""
    if summary is None:
        return "-"
    text = figure_text(name, summary["median"])
    if name.endswith("_bytes") or len(summary["values"]) < 2 or not summary["median"]:
        return text
    percent = 100 * (summary["high"] - summary["low"]) / 2 / summary["median"]
    return f"{text} ±{percent:.0f}%"


def figure_text(name: str, value: float) -> str:
    """Return a value with its unit."""
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_per_s"):
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.1 else f"{value * 1000:.1f} ms"


def _comparison(comparison: Mapping[str, Any] | None) -> list[str]:
    if comparison is None:
        return []
    lines = [
        f"{word}: {_change_text(change)}"
        for word in ("slower", "faster")
        for change in comparison[word]
    ]
    then = f"{comparison['file']} ({comparison['measured_at']})"
    compared, rest = comparison["compared"], comparison["compared"] - len(lines)
    if not compared:
        lines.append(f"nothing could be compared with {then}")
    elif not lines:
        lines.append(f"as fast as {then}: every difference is within the noise")
    else:
        lines.append(f"compared with {then}: the other {rest} differences are within the noise")
    if count := comparison["not_there"]:
        lines.append(f"{comparison['file']} does not have {count} of these sizes")
    if count := comparison["too_few"]:
        few = f"fewer than {LEAST_REPEATS} repeats, which is too few to compare"
        lines.append(f"{count} figures have {few}")
    return lines + [
        f"the conditions differ: {one['what']} was {one['before']} and is "
        f"{one['now'] or 'missing'} now"
        for one in comparison["conditions"]
    ]


def _change_text(change: Mapping[str, Any]) -> str:
    name, percent = change["figure"], change["slower_percent"]
    before, now = (figure_text(name, change[key]) for key in ("before", "now"))
    size = f"{change['prompt_tokens']} + {change['output_tokens']} × {change['concurrency']}"
    more = "longer" if percent > 0 else "less time"
    return f"{size}: {TITLES[name].lower()} {now}, was {before}: takes {abs(percent):.0f}% {more}"
