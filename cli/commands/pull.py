"""`mlxsup pull`: downloads a model."""

from __future__ import annotations

from dataclasses import asdict

import click

from mlxsup.protocol.ids import DEFAULT_REVISION

from ..arguments import repository_argument
from ..connection import output_options
from ..terminal.output import Output
from ..terminal.text import format_bytes


@click.command()
@repository_argument
@click.option(
    "--revision",
    metavar="NAME",
    help=f"A branch, tag or commit; by default {DEFAULT_REVISION}.",
)
@output_options
def pull(repo: str, revision: str | None, output: Output) -> None:
    """Example: mlxsup pull mlx-community/SmolLM2-135M-Instruct

    Downloads REPO into the Hugging Face cache and prints its folder. It needs no daemon and
    configures nothing. REPO is OWNER/NAME, its address, or a short name such as qwen3:4b. Run it
    again after an interruption to continue. It uses HF_TOKEN, HF_ENDPOINT and HF_HOME.
    """
    from mlxsup.store.sources import repository_named, short_repository

    from ..configuration import refusals
    from ..downloading import checked_repository, download

    with refusals():
        named, its = repository_named(short_repository(repo) or repo)
    repo, revision = named or repo, revision or its or DEFAULT_REVISION
    repository = checked_repository(repo, revision)
    more = "" if revision == DEFAULT_REVISION else f" --revision {revision}"
    done = download(repository, output, again=f"mlxsup pull {repo}{more}")
    output.result({"repo": repo, "revision": revision, **asdict(done)}, done.folder)
    fetched = f"{format_bytes(done.fetched_bytes)} downloaded"
    what = fetched if done.fetched_bytes else "already downloaded"
    output.note(f"{repo} is complete ({format_bytes(done.total_bytes)}, {what})")
