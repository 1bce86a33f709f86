"""The tokens that a model takes: what its config.json declares, and what is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CONTEXT_LENGTH_NAMES = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "n_positions",
    "seq_length",
    "sequence_len",
    "n_ctx",
    "max_context_length",
    "model_max_length",
    "block_size",
)
"""Its names in config.json, the usual one first. Architectures with a state instead of a cache
mostly declare none."""

NESTED_NAMES = ("text_config", "llm_config", "language_config")
"""Where the text model of a larger one is described."""

UNKNOWN_CONTEXT_LENGTH = 4096
"""The length of a model that does not declare one."""

MAX_CONTEXT_LENGTH = 2**31 - 1
"""A larger number means that the length was not known."""

MAX_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """The tokens that a model takes.

    Attributes:
        tokens: prompt and answer together, at most.
        warnings: what users should know about it, a sentence each.
    """

    tokens: int
    warnings: tuple[str, ...] = ()


def find_context_length(config: Mapping[str, Any], asked: int) -> ContextLength:
    """Apply the entry's limit: at most what is declared, or anything if nothing is.

    Args:
        config: what config.json holds.
        asked: tokens, from the model's entry; 0: the model's own length.
    """
    unusable = ""
    for name, value in _declarations(config):
        declared = _length(value)
        if declared is None:
            unusable = (
                unusable or f"{name} in config.json is not a context length ({_shown(value)})"
            )
        elif asked <= declared:
            return ContextLength(tokens=asked or declared)
        else:
            warning = (
                f"context_length = {asked} is more than the {declared} tokens of config.json "
                f"({name}): {declared} are used"
            )
            return ContextLength(tokens=declared, warnings=(warning,))
    if asked:
        return ContextLength(tokens=asked)
    why = unusable or "config.json declares no context length"
    warning = f"{why}: {UNKNOWN_CONTEXT_LENGTH} tokens are used; set context_length to allow more"
    return ContextLength(tokens=UNKNOWN_CONTEXT_LENGTH, warnings=(warning,))


def declared_context_length(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that a config.json declares; None if it declares none."""
    lengths = (_length(value) for _, value in _declarations(config))
    return next((length for length in lengths if length is not None), None)


def limited_context_length(declared: int | None, asked: int) -> int:
    """Return the tokens that a model takes if its config.json declares so many.

    Args:
        declared: see `declared_context_length`.
        asked: as of `find_context_length`, which also gives the warnings.
    """
    if declared is None:
        return asked or UNKNOWN_CONTEXT_LENGTH
    return min(asked, declared) if asked else declared


def _declarations(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for part in (config, *(config.get(name) for name in NESTED_NAMES)):
        if isinstance(part, Mapping):
            for name in CONTEXT_LENGTH_NAMES:
                if part.get(name) is not None:
                    yield name, part[name]


def _length(value: Any) -> int | None:
    """Return a number of tokens; None for anything else. Some write an integer with a point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_length = type(value) is int and 0 < value <= MAX_CONTEXT_LENGTH
    return value if is_length else None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
