"""Which files of a model folder decide what a model answers, by their names."""

from __future__ import annotations


def is_tokenizer_file(name: str) -> bool:
    """Whether a file may decide how text becomes tokens, such as config.json and the tokenizer."""
    return name.endswith((".json", ".jinja", ".tiktoken", ".model", ".txt", ".jsonl")) and (
        not name.endswith(".index.json")
    )


def is_weight_file(name: str) -> bool:
    """Whether mlx-lm loads weights from a file."""
    return name.startswith("model") and name.endswith(".safetensors")
