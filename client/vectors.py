"""Embeddings and rankings, as both clients offer them: what is sent, and what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

from mlxsup.protocol.client_messages import Timings, Usage
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.message import Record, record
from mlxsup.protocol.states import FinishReason

from .errors import RequestError, internal
from .results import Result


@record
class Embeddings(Record):
    """The embeddings of some texts.

    Attributes:
        vectors: one for each text, in their order.
        usage: tokens counted, and engine seconds; `completion_tokens` is the number of texts.
        timings: seconds spent.
        resumed: how many times the request continued after a crash or a restart.
    """

    vectors: list[list[float]]
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    resumed: int = 0


@record
class Ranked(Record):
    """A document of a ranking.

    Attributes:
        index: its number among those that were sent, from 0.
        score: how well it answers the query, from 0 to 1.
    """

    index: int
    score: float


@record
class Ranking(Record):
    """Documents in the order in which they answer a query, the best first.

    Attributes:
        results: the documents.
        usage, timings, resumed: as of `Embeddings`.
    """

    results: list[Ranked]
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    resumed: int = 0


def embed_body(
    texts: Sequence[str | list[int]],
    dimensions: int | None,
    input_type: str | None,
    truncate: bool | None,
) -> dict[str, Any]:
    """Return the fields of a request for embeddings."""
    return {
        "texts": _listed(texts),
        "dimensions": dimensions,
        "input_type": input_type,
        "truncate": truncate,
    }


def rerank_body(query: str, documents: Sequence[str], truncate: bool | None) -> dict[str, Any]:
    """Return the fields of a request for a ranking."""
    return {"texts": _listed(documents), "query": query, "truncate": truncate}


def _listed(texts: object) -> object:
    """Return texts as a list; one text alone, or what is none, is left for the body to refuse."""
    return list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else texts


def packed_vectors(result: Result) -> list[bytes]:
    """Return the vectors of an answer in the order of their texts.

    Raises:
        RequestError: it was cancelled, or a vector is missing or came twice.
    """
    if result.finish_reason is FinishReason.CANCELLED:
        message = "the request was cancelled before all of its texts were answered"
        raise RequestError.of(RemoteError(ErrorCode.INTERNAL, message, retryable=True))
    if sorted(result.token_ids) != list(range(len(result.vectors))):
        raise internal("a vector is missing, or came twice")
    by_number = dict(zip(result.token_ids, result.vectors, strict=True))
    return [by_number[number] for number in range(len(by_number))]


def _unpacked(result: Result) -> list[list[float]]:
    from mlxsup.protocol.pooling import unpack_vector  # every command would wait for it

    return [unpack_vector(packed) for packed in packed_vectors(result)]


def embeddings_of(result: Result) -> Embeddings:
    """Return the embeddings that an answer holds; raises as `packed_vectors`."""
    return Embeddings(
        vectors=_unpacked(result),
        usage=result.usage,
        timings=result.timings,
        resumed=result.resumed,
    )


def ranked(result: Result, top_n: int | None = None) -> list[Ranked]:
    """Return the best documents of an answer, the best first; equal ones in their order.

    Raises:
        RequestError: as `packed_vectors`.
    """
    found = [Ranked(index=number, score=one[0]) for number, one in enumerate(_unpacked(result))]
    return sorted(found, key=lambda one: -one.score)[:top_n]


def ranking_of(result: Result, top_n: int | None) -> Ranking:
    """Return the ranking that an answer holds; raises as `packed_vectors`."""
    return Ranking(
        results=ranked(result, top_n),
        usage=result.usage,
        timings=result.timings,
        resumed=result.resumed,
    )
