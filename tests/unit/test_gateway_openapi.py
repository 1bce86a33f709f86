"""The document of the HTTP API: valid, complete, and true of every field."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import RequestError
from mlxsup.gateway.app import MISSING
from mlxsup.gateway.converter import Api, read_ask
from mlxsup.gateway.errors import failure_of
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.keys import Keys
from mlxsup.gateway.openapi import document, page

from support.client.sent_requests import sent
from support.gateway.key_place import place_in
from support.gateway.played_gateway import HI, LEAST_OF, PlayedDaemon, Site

jsonschema = pytest.importorskip("jsonschema")

PATHS = {
    Api.CHAT: "/v1/chat/completions", Api.COMPLETION: "/v1/completions",
    Api.RESPONSE: "/v1/responses", Api.RESPONSE_COUNT: "/v1/responses/input_tokens",
    Api.MESSAGE: "/v1/messages", Api.COUNT: "/v1/messages/count_tokens",
    Api.OLLAMA_CHAT: "/api/chat", Api.GENERATE: "/api/generate",
    Api.TOKENIZE: "/tokenize", Api.TEMPLATE: "/apply-template", Api.DETOKENIZE: "/detokenize",
    Api.EMBEDDINGS: "/v1/embeddings", Api.RERANK: "/v1/rerank",
    Api.OLLAMA_EMBED: "/api/embed", Api.OLLAMA_EMBEDDING: "/api/embeddings",
}  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, 1, -1, -7, 0.5, 10**12, "x", "5m", "", [], [1], [-1], ["x"], [{}], {},
    {"type": "x"},
]  # fmt: skip
"""A value of each type and more, of which no field takes all."""


def schema_of(api: Api) -> dict[str, Any]:
    body = document()["paths"][PATHS[api]]["post"]["requestBody"]
    schema: dict[str, Any] = body["content"]["application/json"]["schema"]
    return schema


def refused(api: Api, body: dict[str, Any]) -> str | None:
    """Return the field that the refusal of a body names; None if it is taken."""
    names: Mapping[str, str] = {}
    try:
        ask = read_ask(api, json.dumps(body).encode())
        names = ask.names
        sent(ask)
    except (Failure, RequestError) as error:
        failure = error if isinstance(error, Failure) else failure_of(error, names)
        return re.split(r"[.[]", failure.param)[0]
    return None


ENDS_SAID = [*HI, {"role": "assistant", "content": "a"}]
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "continue_final_message": {"messages": ENDS_SAID, "input": ENDS_SAID},
    "add_generation_prompt": {"messages": ENDS_SAID},
    "chat_template_kwargs": {"messages": HI},
}
"""What fields need beside them; no schema says so."""


def beside(api: Api, name: str) -> dict[str, Any]:
    more = BESIDE.get(name, {})
    is_tokenized = api is Api.TOKENIZE and ("messages" in more or name in ("content", "messages"))
    return {**LEAST_OF[api], **more, **({"prompt": None} if is_tokenized else {})}


@pytest.mark.parametrize("api", Api)
def test_value_is_refused_if_and_only_if_the_schema_says_so(api: Api) -> None:
    checks = jsonschema.Draft202012Validator(schema_of(api))
    wrong = []
    for name, field in schema_of(api)["properties"].items():
        least = beside(api, name)
        bodies = [({**least, name: value}, name) for value in VALUES]
        if api is Api.TOKENIZE and name in ("prompt", "content", "messages"):
            bodies.pop(0)  # null: then it needs another one
        if field.get("type") == ["object", "null"]:
            inside = [(inner, value) for inner in field.get("properties", ()) for value in VALUES]
            bodies += [({**least, name: {inner: value}}, "") for inner, value in inside]
        for body, named in bodies:
            param = refused(api, body)
            is_named = not (param and named) or named.startswith(
                param.partition("[")[0]
            )  # `stop_sequences`, too
            if (param is None) is not checks.is_valid(body) or not is_named:
                wrong.append((param, body))
    assert wrong == []


def test_every_route_is_in_the_document() -> None:
    known = {
        (method.upper(), re.sub("{[^}]*}", "m", path))
        for path, methods in document()["paths"].items()
        for method in methods
    }
    absent = {re.sub("{[^}]*}", "m", path) for path in MISSING}
    served = {
        (method, path)
        for method, path in Site(PlayedDaemon()).routes()
        if method != "HEAD" and path != "/" and not path.startswith("/page/") and path not in absent
    }
    # What is not there under one method may be there under another.
    assert served <= known
    assert {path for _, path in known} <= {path for _, path in Site(PlayedDaemon()).routes()}


def test_document_says_everything_and_the_page_shows_it() -> None:
    operations = [one for methods in document()["paths"].values() for one in methods.values()]
    ids = [one["operationId"] for one in operations]
    assert len(set(ids)) == len(ids)
    for path in PATHS.values():
        schema = schema_of(next(api for api, one in PATHS.items() if one == path))
        for name, field in schema["properties"].items():
            assert "](" not in field.get("description", ""), "a link to a file that is not there"
            assert f"<code>{name}</code>" in page()
    assert "http:" not in page()
    assert "<script" not in page()


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_it_needs_no_key_but_the_right_host(path: str, tmp_path: Path) -> None:
    keys = Keys(place_in(tmp_path), are_required=True)
    site = Site(PlayedDaemon(), keys=keys)
    assert asyncio.run(site.ask("GET", path)).status == 200
    assert asyncio.run(site.ask("GET", path, headers={"host": "evil.example"})).status == 403
