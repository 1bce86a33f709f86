"""Embeddings and rankings over HTTP: what the daemon is asked, and how the answer looks."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from mlxsup.client import Delta, FinishReason, RequestError, Result, Timings, Usage
from mlxsup.gateway.converter import Api, encode_ask, read_ask
from mlxsup.gateway.failure import Failure
from mlxsup.protocol.codec import decode_body
from mlxsup.protocol.errors import invalid
from mlxsup.protocol.pooling import PoolingBody, pack_vector

from support.gateway.played_gateway import PlayedDaemon, Site

VECTORS = [[0.1, -0.25], [1.0, 3e-9]]


def asked(api: Api, **fields: Any) -> PoolingBody:
    ask = read_ask(api, json.dumps({"model": "m", **fields}).encode())
    ((_, (_, body)),) = encode_ask(ask)
    found = decode_body(body)
    assert isinstance(found, PoolingBody)
    return found


@pytest.mark.parametrize(
    ("api", "fields", "body"),
    [
        (Api.EMBEDDINGS, {"input": "a"}, {"texts": ["a"]}),
        (Api.EMBEDDINGS, {"input": [1, 2]}, {"texts": [[1, 2]]}),
        (Api.EMBEDDINGS, {"input": [[1], "b"], "dimensions": 4}, {"texts": [[1], "b"],
                                                                 "dimensions": 4}),
        (Api.EMBEDDINGS, {"input": ["a"], "input_type": "query", "user": "u"},
         {"texts": ["a"], "input_type": "query"}),
        (Api.RERANK, {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
         {"texts": ["a", "b"], "query": "q", "truncate": True}),
        (Api.OLLAMA_EMBED, {"input": "a", "options": {"num_ctx": 1}},
         {"texts": ["a"], "truncate": True}),
        (Api.OLLAMA_EMBED, {"input": ["a"], "truncate": False},
         {"texts": ["a"], "truncate": False}),
        (Api.OLLAMA_EMBEDDING, {"prompt": "a"}, {"texts": ["a"], "truncate": True}),
    ],
)  # fmt: skip
def test_daemon_is_asked_for_the_texts(
    api: Api, fields: dict[str, Any], body: dict[str, Any]
) -> None:
    assert asked(api, **fields).to_wire() == body


@pytest.mark.parametrize(
    ("api", "fields", "param", "words"),
    [
        (Api.EMBEDDINGS, {}, "input", "is missing"),
        (Api.EMBEDDINGS, {"input": []}, "input", "not 0"),
        (Api.EMBEDDINGS, {"input": [1, "a"]}, "input", r"input\[0\] must be a text"),
        (Api.EMBEDDINGS, {"input": [1, -1]}, "input", "integers from 0"),
        (Api.EMBEDDINGS, {"input": ["a", [1.5]]}, "input", r"input\[1\] .* integers from 0"),
        (Api.EMBEDDINGS, {"input": {"a": 1}}, "input", "must be 1 to 2,048 texts"),
        (Api.EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        (Api.RERANK, {"documents": ["a"]}, "query", "is missing"),
        (Api.RERANK, {"query": "q", "documents": [[1]]}, "documents", r"documents\[0\]"),
        (Api.RERANK, {"query": "q", "documents": ["a"], "top_n": 0}, "top_n", "at least 1"),
        (Api.RERANK, {"query": "q", "documents": ["a"], "top_n": True}, "top_n", "an integer"),
        (Api.OLLAMA_EMBEDDING, {}, "prompt", "is missing"),
    ],
)
def test_wrong_field_is_named(api: Api, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(Failure, match=words) as caught:
        asked(api, **fields)
    assert caught.value.param == param


def answered(path: str, body: dict[str, Any], *vectors: list[float]) -> dict[str, Any]:
    """Return the answer of a gateway whose daemon gives the second text's vector first."""
    numbers = list(range(len(vectors)))[::-1]
    packed = [pack_vector(vectors[number]) for number in numbers]
    pieces = [
        Delta(text="", token_ids=[number], vector=vector)
        for number, vector in zip(numbers, packed, strict=True)
    ]
    end = Result(text="", finish_reason=FinishReason.STOP, token_ids=numbers, vectors=packed,
                 usage=Usage(prompt_tokens=7), timings=Timings(total_s=1.5))  # fmt: skip
    response = asyncio.run(Site(PlayedDaemon([*pieces, end])).ask("POST", path, body))
    assert response.status == 200, response
    found: dict[str, Any] = json.loads(response.body)
    return found


def test_openai_gets_vectors_in_the_order_of_the_texts() -> None:
    found = answered("/v1/embeddings", {"model": "m", "input": ["a", "b"]}, *VECTORS)
    assert [one["embedding"] for one in found["data"]] == [
        pytest.approx(vector, rel=1e-7) for vector in VECTORS
    ]
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    packed = {"model": "m", "input": "a", "encoding_format": "base64"}
    (one,) = answered("/v1/embeddings", packed, VECTORS[0])["data"]
    assert base64.b64decode(one["embedding"]) == pack_vector(VECTORS[0])


def test_ollama_gets_its_own_forms() -> None:
    found = answered("/api/embed", {"model": "m", "input": ["a", "b"]}, *VECTORS)
    assert found["embeddings"][1] == pytest.approx(VECTORS[1])
    assert (found["prompt_eval_count"], found["total_duration"]) == (7, 1_500_000_000)
    one = answered("/api/embeddings", {"model": "m", "prompt": "a"}, VECTORS[0])
    assert one == {"embedding": pytest.approx(VECTORS[0])}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranking_has_the_best_first(path: str) -> None:
    body = {"model": "m", "query": "q", "documents": ["a", "b", "c"], "top_n": 2}
    found = answered(path, body, [0.5], [0.25], [0.75])
    assert found["results"] == [
        {"index": 2, "relevance_score": 0.75}, {"index": 0, "relevance_score": 0.5},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "ours", "theirs"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}, "texts", "input"),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, "documents", "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, "texts", "documents"),
    ],
)
def test_refusal_of_the_daemon_names_the_field_that_was_sent(
    path: str, fields: dict[str, Any], ours: str, theirs: str
) -> None:
    error = RequestError.of(invalid("texts", "text", 3, subject=f"{ours}[1]"))
    response = asyncio.run(Site(PlayedDaemon([error])).ask("POST", path, {"model": "m", **fields}))
    said = response.json()["error"]
    assert (response.status, said["param"]) == (400, theirs)
    assert said["message"] == f"{theirs}[1] must be text, not 3"
