"""`mlxsup bench`: how fast models answer through the daemon, by the sizes of prompts and answers.

Each size is a burst of requests that are sent at once.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..arguments import check_known, complete_model, only_model
from ..changes import progress_shown
from ..connection import Target, connect, daemon_options, errors_explained
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Line, LiveLine, Output, width_of
from ..terminal.tables import listing, text_lines
from ..terminal.text import counted

if TYPE_CHECKING:
    from mlxsup.client import AsyncClient, Result

PROMPT_TOKENS = (16, 512)
OUTPUT_TOKENS = (128,)
CONCURRENCY = (1, 4, 16)

TITLES = {
    "first_token_s": "FIRST TOKEN",
    "gap_p50_s": "GAP P50",
    "gap_p99_s": "GAP P99",
    "stream_tokens_per_s": "TOK/S EACH",
    "tokens_per_s": "TOK/S ALL",
}
"""The figures by their keys, which end with the unit."""

STEADY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""Parameters with which an answer has as many tokens as it may have, and none is drawn."""

WARM_UP_TOKENS = 16
"""Of the answers before the first repeat: enough to prepare every shape that repeats need."""

PROMPT_IDS = range(100, 250)
"""The token ids of prompts. Every vocabulary has them, that of bytes alone too, and the ids below
are those that tokenizers like to use for their marks."""


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
@click.argument("models", nargs=-1, metavar="[MODEL]...", shell_complete=complete_model)
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
@daemon_options
def bench(
    models: tuple[str, ...],
    repeats: int,
    target: Target,
    output: Output,
    **wanted: tuple[int, ...] | None,
) -> int:
    """Example: mlxsup bench smollm2-135m

    Measures how fast each MODEL answers: the time to the first token, the gaps between tokens and
    tokens per second, for each prompt size, answer size and number of concurrent requests. After a
    warm-up, the repeats of all sizes take turns. Ctrl-C shows the results so far. MODEL may be left
    out if only one is configured.
    """
    import asyncio

    failure: CliError | None = None
    is_interrupted = False
    with connect(target) as client:
        status = client.status()
        names = models or (only_model(status, "mlxsup bench"),)
        names = tuple(dict.fromkeys(check_known(status, name)["name"] for name in names))
        cells: list[Cell] = []
        for name in names:
            with progress_shown(client, name, output):
                client.load(name)
            row = check_known(client.status(), name)
            cells += cells_of(wanted, name, row["context_length"], row["row_limit"])
        run = Run(cells=cells, repeats=repeats)
        try:
            with LiveLine(output) as line, errors_explained():
                asyncio.run(measure(client.endpoint, run, lambda text: line.tell(text, text)))
        except KeyboardInterrupt:
            output.end_line()
            is_interrupted = True
        except CliError as error:
            failure = error
    # With --json, a run that has failed prints its error alone.
    if run.found and not (failure and output.is_json):
        output.result(value_of(run, str(status["version"])), shown(run))
    elif is_interrupted:
        output.note("no results yet")
    if failure:
        raise failure
    return ExitStatus.INTERRUPTED if is_interrupted else ExitStatus.OK


# ---------------------------------------------------------------- sizes


class Cell(NamedTuple):
    """One size: tokens of each prompt and of each answer, and requests that are sent at once."""

    model: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int

    def __str__(self) -> str:
        """Return `qwen 512 + 128 tokens × 4`."""
        return f"{self.model} {self.prompt_tokens} + {self.output_tokens} tokens × {self[-1]}"


def cells_of(
    wanted: Mapping[str, tuple[int, ...] | None], model: str, context: int | None, rows: int
) -> list[Cell]:
    """Return the sizes to measure: what was asked for, and otherwise the usual ones that fit.

    Args:
        wanted: `prompt_tokens`, `output_tokens` and `concurrency`; None where there is a choice.
        model: its name.
        context: tokens of a prompt and its answer together; None if it is not known.
        rows: requests that run at once.

    Raises:
        CliError: a size that was asked for does not fit.
    """
    streams = wanted["concurrency"] or tuple(
        dict.fromkeys(min(number, rows) for number in CONCURRENCY)
    )
    outputs = wanted["output_tokens"] or OUTPUT_TOKENS
    answer = max(outputs)
    fitting = [one for one in PROMPT_TOKENS if context is None or one + answer <= context]
    prompts = wanted["prompt_tokens"] or tuple(fitting) or (1,)
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
    return [Cell(model, *sizes) for sizes in product(prompts, outputs, streams)]


# ---------------------------------------------------------------- measuring


def figures_of(sent_s: Sequence[float], times: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the figures that a burst shows, by their keys for programs.

    Args:
        sent_s: when each prompt was sent, in seconds after the first.
        times: when each token of each answer was there, by the same clock.
    """
    firsts = [own[0] - sent for own, sent in zip(times, sent_s, strict=True)]
    gaps = [later - earlier for own in times for earlier, later in pairwise(own)]
    # Tokens of one answer may have come at one time.
    speeds = [(len(own) - 1) / (own[-1] - own[0]) for own in times if own[-1] > own[0]]
    whole_s = max(own[-1] for own in times)
    found = {
        "first_token_s": statistics.median(firsts),
        "tokens_per_s": sum(map(len, times)) / whole_s,
    }
    for percent in (50, 99) if gaps else ():
        found[f"gap_p{percent}_s"] = percentile(gaps, percent)
    return found | ({"stream_tokens_per_s": statistics.median(speeds)} if speeds else {})


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that this percentage of them does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


@dataclass(slots=True, kw_only=True)
class Run:
    """Repeats of all sizes, in turn; an interrupted one is worth something.

    Attributes:
        cells: the sizes.
        repeats: how often each is measured.
        found: by size, the figures of each repeat so far.
        interrupted: answers that were paused, or continued after a crash.
        other_requests: the most requests of others that were open between two bursts.
    """

    cells: Sequence[Cell]
    repeats: int
    found: dict[Cell, list[dict[str, float]]] = field(default_factory=dict)
    interrupted: int = 0
    other_requests: int = 0

    @property
    def bursts(self) -> int:
        """Return how many are to be measured."""
        return len(self.cells) * self.repeats

    @property
    def done(self) -> int:
        """Return how many were measured so far."""
        return sum(map(len, self.found.values()))

    def look(self, status: Mapping[str, Any]) -> None:
        """Note how many requests of others are open."""
        still_open = (
            len(one["running"]) + len(one["paused"]) + one["queued"] for one in status["models"]
        )
        self.other_requests = max(self.other_requests, sum(still_open))

    def values(self, cell: Cell, figure: str) -> list[float]:
        """Return a figure of a size, by each repeat that showed it."""
        return [one[figure] for one in self.found.get(cell, ()) if figure in one]

    def remarks(self) -> list[str]:
        """Return a sentence for each thing that has touched the figures."""
        found = {
            f"incomplete: only {self.done} of {self.bursts} bursts were measured": (
                self.done < self.bursts
            ),
            f"up to {counted(self.other_requests, 'other request')} ran or waited during the run: "
            "measure again when the daemon is idle": self.other_requests,
            f"interrupted and resumed: {counted(self.interrupted, 'answer')}": self.interrupted,
        }
        return [sentence for sentence, is_so in found.items() if is_so]


async def measure(endpoint: str, run: Run, tell: Callable[[str], None]) -> None:
    """Warm up, then measure each repeat of each size.

    Args:
        endpoint: of the daemon, in which the models are READY.
        run: takes what is measured, at once, so that it is there if this is cancelled.
        tell: gets the progress.

    Raises:
        CliError: an answer has another length than was asked for.
        RequestError, ConnectionLost: an answer has failed, such as that of a model that is gone.
    """
    from mlxsup.client import AsyncClient

    async with AsyncClient(endpoint) as client:
        for number, cell in enumerate(run.cells, start=1):
            tell(f"warming up {number}/{len(run.cells)}: {cell}")
            await _ask(client, run, cell, min(cell.output_tokens, WARM_UP_TOKENS))
        for repeat in range(run.repeats):
            # Every other repeat runs backwards: what changes with time touches all sizes alike.
            for cell in run.cells if repeat % 2 == 0 else reversed(run.cells):
                tell(f"{run.done + 1}/{run.bursts}: {cell}")
                run.look(await client.status())
                figures = await _ask(client, run, cell, cell.output_tokens)
                run.found.setdefault(cell, []).append(figures)


async def _ask(client: AsyncClient, run: Run, cell: Cell, tokens: int) -> dict[str, float]:
    """Send all requests of a size at once, each with another prompt, because the daemon may
    remember earlier ones; return the figures."""
    import asyncio

    times: list[list[float]] = [[] for _ in range(cell.concurrency)]
    sent_s: list[float] = []
    begin = time.perf_counter()

    async def read(own: list[float]) -> Result:
        prompt = random.choices(PROMPT_IDS, k=cell.prompt_tokens)
        sent_s.append(time.perf_counter() - begin)
        stream = client.generate(cell.model, prompt_tokens=prompt, max_tokens=tokens, **STEADY)
        async for delta in stream:
            own += [time.perf_counter() - begin] * len(delta.token_ids)
        return stream.result

    results = await asyncio.gather(*map(read, times))
    for own in times:
        if len(own) != tokens:
            raise CliError(
                f"an answer of {cell.model} has {len(own)} tokens instead of {tokens}",
                code="broken_answer",
                hint=f"see `mlxsup logs {cell.model}`",
            )
    run.interrupted += sum(bool(result.resumed or result.paused) for result in results)
    return figures_of(sent_s, times)


# ---------------------------------------------------------------- results


def value_of(run: Run, daemon: str) -> dict[str, Any]:
    """Return the run as `--json` prints it; `daemon` is its version."""
    import datetime

    return {
        "kind": "bench",
        "daemon": daemon,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "repeats": run.repeats,
        "is_complete": run.done == run.bursts,
        "cells": [
            {
                **cell._asdict(),
                "figures": {name: _summary(run.values(cell, name)) for name in TITLES},
            }
            for cell in run.found
        ],
        "remarks": run.remarks(),
    }


def _summary(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    around = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {**around, "values": list(values)}


def shown(run: Run) -> list[Line]:
    """Return the table of the medians, and the remarks."""
    headings = ("MODEL", "PROMPT", "OUTPUT", "STREAMS", *TITLES.values())
    rows = [
        [*map(str, cell), *(figure_text(name, run.values(cell, name)) for name in TITLES)]
        for cell in run.found
    ]
    remarks = run.remarks()
    return [
        *listing(headings, rows, right=headings[1:]),
        *([[]] if remarks else []),
        *(line for one in remarks for line in text_lines(one, width_of(sys.stdout))),
    ]


def figure_text(name: str, values: Sequence[float]) -> str:
    """Return the median of a figure with its unit, and how far repeats are from each other."""
    if not values:
        return "-"
    median = statistics.median(values)
    if name.endswith("_per_s"):
        text = f"{median:,.0f}" if median >= 100 else f"{median:.1f}"
    elif median >= 1:
        text = f"{median:.2f} s"
    else:
        text = f"{median * 1000:.0f} ms" if median >= 0.1 else f"{median * 1000:.1f} ms"
    if len(values) < 2 or not median:
        return text
    return f"{text} ±{100 * (max(values) - min(values)) / 2 / median:.0f}%"
