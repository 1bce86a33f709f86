"""`mlxsup embed`: the embeddings of texts, or a ranking of the texts for a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import click

from mlxsup.protocol.tasks import Task

from ..arguments import embedder_argument
from ..connection import Target, connect, daemon_options
from ..exit_status import CliError, ExitStatus, misuse
from ..options import duration, keep_alive_option, priority_options
from ..terminal.output import Output
from ..terminal.tables import listing
from ..terminal.text import counted
from .add import add_option, served_name
from .generate import read_stdin

if TYPE_CHECKING:
    from mlxsup.client.api import RequestOptions

COMMAND = "mlxsup embed"


@click.command()
@embedder_argument
@click.argument("texts", nargs=-1, metavar="TEXT...")
@click.option("--rank", "query", metavar="QUERY", help="Rank the texts for QUERY instead.")
@click.option("--dimensions", metavar="N", type=int, help="Keep only the first N numbers of each.")
@click.option("--input-type", metavar="KIND", help="The kind of text: query, document.")
@click.option("--truncate", is_flag=True, help="Cut a text that is too long.")
@click.option("--timeout", "timeout_s", metavar="S", type=duration, help="Time limit: 90s, 5m.")
@priority_options
@keep_alive_option
@add_option
@daemon_options
def embed(
    model: str,
    texts: tuple[str, ...],
    query: str | None,
    dimensions: int | None,
    input_type: str | None,
    truncate: bool,
    is_sure: bool,
    target: Target,
    output: Output,
    **options: Unpack[RequestOptions],
) -> None:
    """Example: mlxsup embed all-minilm "What is the tide?"

    Prints the embedding of each TEXT as a list of numbers, a line each; without TEXT, or with `-`,
    each line of stdin is a text. With --rank, a reranking model puts the texts in order instead.
    """
    if query is not None and (dimensions is not None or input_type is not None):
        raise misuse("--dimensions and --input-type have no effect with --rank", COMMAND)
    given = list(texts) if texts and texts != ("-",) else _lines()
    makes = Task.EMBED if query is None else Task.RERANK
    with connect(target) as client:
        model, _ = served_name(model, client, target, output, is_sure=is_sure, makes=makes)
        if query is not None:
            ranking = client.rerank(model, query, given, **options)
            results = [{"index": one.index, "score": one.score} for one in ranking.results]
            cells = [(f"{one.score:.4f}", given[one.index]) for one in ranking.results]
            table = listing(("SCORE", "TEXT"), cells, right=("SCORE",))
            output.result({"model": model, "results": results}, table)
            return
        found = client.embed(
            model, list(given), dimensions=dimensions, input_type=input_type, truncate=truncate,
            **options,
        )  # fmt: skip
    usage = {"prompt_tokens": found.usage.prompt_tokens, "engine_s": found.usage.engine_s}
    lines = (f"[{', '.join(f'{number:.9g}' for number in vector)}]" for vector in found.vectors)
    value = {"model": model, "embeddings": found.vectors, "usage": usage}
    output.result(value, "\n".join(lines))
    each = f"{counted(len(found.vectors[0]), 'number')} each"
    output.note(f"{counted(len(given), 'text')}, {each}, {found.usage.prompt_tokens} tokens")


def _lines() -> list[str]:
    lines = [line for line in read_stdin().splitlines() if line.strip()]
    if not lines:
        message = "there is no text on stdin"
        hint = f'give one: `{COMMAND} MODEL "a text"`'
        raise CliError(message, status=ExitStatus.USAGE, hint=hint)
    return lines
