"""Prompts of token ids, for models whose answers nobody reads."""

from __future__ import annotations


def prompt_tokens(length: int, seed: int) -> list[int]:
    """A prompt of that many ids, different for each seed."""
    return [300 + (seed * 7919 + n * 104729) % 1700 for n in range(length)]
