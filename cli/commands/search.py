"""`mlxsup search`: finds models on the hub."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import click

from ..connection import output_options
from ..exit_status import CliError, misuse
from ..terminal.output import LiveLine, Output
from ..terminal.tables import listing
from ..terminal.text import format_bytes

if TYPE_CHECKING:
    from mlxsup.protocol.download import FoundRepository

HEADINGS = ("MODEL", "SIZE", "FITS", "DOWNLOADS", "SHORT NAME")

BESIDE_WEIGHTS = 1.1
"""What a model needs at least, as a multiple of its weights."""


@click.command()
@click.argument("words", nargs=-1)
@output_options
def search(words: tuple[str, ...], output: Output) -> None:
    """Example: mlxsup search qwen3 4bit

    Finds models in MLX's format on the hub: how large they are, whether they fit into this
    machine's memory, and how often they were downloaded last month. Without WORDS, lists the short
    names that `add`, `run` and `pull` take.
    """
    from dataclasses import asdict

    from mlxsup.store.sources import SHORT_NAMES, short_repository

    if words and not any(word.strip() for word in words):
        raise misuse("WORDS must not be empty", "mlxsup search")
    names = {short_repository(name): name for name in SHORT_NAMES}
    if not words:
        rows = [{"name": name, "repo": short_repository(name)} for name in SHORT_NAMES]
        pairs = [(str(row["name"]), str(row["repo"])) for row in rows]
        output.result({"names": rows}, listing(("SHORT NAME", "MODEL"), pairs))
        return
    found = _find(" ".join(words), output)
    budget_bytes = _budget_bytes()
    models = [
        asdict(one) | {"fits": fits(one, budget_bytes), "name": names.get(one.repo)}
        for one in found
    ]
    cells = [
        (
            str(one["repo"]) + (" (gated)" if one["is_gated"] else ""),
            format_bytes(one["size_bytes"] or None),
            {True: "yes", False: "no", None: "-"}[one["fits"]],
            str(one["downloads"]),
            str(one["name"] or "-"),
        )
        for one in models
    ]
    if not models and not output.is_json:
        message = f"no model in MLX's format is called {' '.join(words)!r}"
        raise CliError(message, code="not_found", hint="try fewer words, such as a family's name")
    table = listing(HEADINGS, cells, right=("SIZE", "DOWNLOADS"))
    output.result({"models": models, "budget_bytes": budget_bytes}, table)
    fitting = next((one for one in models if one["fits"] and not one["is_gated"]), None)
    if fitting is not None:
        output.note(f"hint: `mlxsup run {shlex.quote(str(fitting['name'] or fitting['repo']))}`")


def _find(words: str, output: Output) -> list[FoundRepository]:
    """Return what the hub finds."""
    import asyncio  # the list of short names would wait for it

    from mlxsup.store.hub_search import SearchError, find_repositories

    with LiveLine(output) as line:
        if output.can_redraw(sys.stderr):
            line.tell("asking the hub", 0)
        try:
            return asyncio.run(find_repositories(words))
        except SearchError as error:
            raise CliError(error.message, code=error.code, hint=error.hint) from None


def _budget_bytes() -> int | None:
    """Return the memory budget; None if neither the configuration nor the system says it."""
    from mlxsup.supervisor.memory.machine import NoDeviceMemoryError, find_backend, find_budget

    from ..configuration import optional_configuration

    configuration = optional_configuration(None)
    given_bytes = configuration.memory_budget if configuration is not None else None
    try:
        return find_budget(given_bytes, find_backend()).size_bytes
    except NoDeviceMemoryError:
        return None


def fits(model: FoundRepository, budget_bytes: int | None) -> bool | None:
    """True if the weights and a little more fit; None if a size is not known."""
    if budget_bytes is None or not model.size_bytes:
        return None
    return model.size_bytes * BESIDE_WEIGHTS <= budget_bytes
