"""The argument REPO, whose names a shell can complete from the Hugging Face cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlxsup.store.hub_cache import find_cache, repositories

from .model_names import complete_model, completions

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_repository(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the repositories in the cache that begin so."""
    try:
        found = list(repositories(find_cache()))
    except OSError:
        return []  # a shell has no place for errors
    return completions(((repo, "") for repo in found), incomplete)


def complete_model_or_repository(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the configured models, then the repositories in the cache."""
    return [
        *complete_model(context, parameter, incomplete),
        *complete_repository(context, parameter, incomplete),
    ]


repository_argument = click.argument("repo", shell_complete=complete_repository)
