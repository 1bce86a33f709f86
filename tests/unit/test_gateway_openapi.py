"""The document of the HTTP API: valid, complete, and open."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlxsup.gateway.app import MISSING
from mlxsup.gateway.converter import Api, read_ask
from mlxsup.gateway.keys import Keys
from mlxsup.gateway.openapi import document

from support.gateway.key_place import place_in
from support.gateway.played_gateway import LEAST_OF, PlayedDaemon, Site

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


@pytest.mark.parametrize("api", Api)
def test_body_that_is_taken_fits_its_schema_and_every_field_says_what_it_is_for(api: Api) -> None:
    body = document()["paths"][PATHS[api]]["post"]["requestBody"]
    schema: dict[str, Any] = body["content"]["application/json"]["schema"]
    checks = jsonschema.Draft202012Validator(schema)
    read_ask(api, json.dumps(LEAST_OF[api]).encode())
    checks.validate(LEAST_OF[api])
    assert not checks.is_valid({})
    for name, field in schema["properties"].items():
        assert checks.is_valid({**LEAST_OF[api], name: None})
        assert field["description"], name


def test_schema_has_the_type_and_the_inner_fields_of_a_field() -> None:
    chat = document()["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    fields = chat["content"]["application/json"]["schema"]["properties"]
    assert fields["stream"]["type"] == ["boolean", "null"]
    assert fields["stream_options"]["properties"]["include_usage"]["type"] == ["boolean", "null"]
    assert fields["functions"]["enum"] == [[], None]
    assert "from 0 to 10" in fields["temperature"]["description"]


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


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_it_needs_no_key_but_the_right_host(tmp_path: Path, path: str) -> None:
    keys = Keys(place_in(tmp_path), are_required=True)
    site = Site(PlayedDaemon(), keys=keys)
    assert asyncio.run(site.ask("GET", path)).status == 200
    refused = asyncio.run(site.ask("GET", path, headers={"host": "evil.example"}))
    assert refused.status == 403


def test_the_page_has_every_path_and_field_of_the_document() -> None:
    page = asyncio.run(Site(PlayedDaemon()).ask("GET", "/docs"))
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    said = page.body.decode()
    for path, methods in document()["paths"].items():
        for method, one in methods.items():
            assert f"<h2>{method.upper()} {path}</h2>" in said
            body = one.get("requestBody", {}).get("content", {}).get("application/json", {})
            for name in body.get("schema", {}).get("properties", ()):
                assert f"<code>{name}</code>" in said
    assert "<script" not in said
