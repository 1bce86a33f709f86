"""The purposes of models: what they make, and how people and programs are told."""

from __future__ import annotations

from enum import StrEnum


class Task(StrEnum):
    """The purpose of a model."""

    GENERATE = "generate"
    EMBED = "embed"
    RERANK = "rerank"


NOUNS = {Task.GENERATE: "text", Task.EMBED: "embeddings", Task.RERANK: "rankings"}
"""The noun by which people are told of each purpose."""


def capabilities(task: Task, *, takes_pictures: bool) -> list[str]:
    """Return what a model can do: `text`, `images` if messages may have some, `embeddings`, or
    `rerank`."""
    match task:
        case Task.GENERATE:
            return ["text", "images"] if takes_pictures else ["text"]
        case Task.EMBED:
            return ["embeddings"]
        case Task.RERANK:
            return ["rerank"]
