"""What can be asked over HTTP, as a document of OpenAPI and as a page: made of the tables of fields
that requests are read by, and of the ranges of numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mlxsup.client.api import ClientBase
from mlxsup.protocol.parameters import NUMBERS
from mlxsup.protocol.version import VERSION

from .anthropic.fields import COUNT_FIELDS, MESSAGES_FIELDS
from .errors import anthropic_body, ollama_body, openai_body
from .failure import Failure
from .fields import Field, Use, used
from .headers import is_anthropic, is_ollama
from .ollama.requests import CHAT_FIELDS as OLLAMA_CHAT_FIELDS
from .ollama.requests import GENERATE_FIELDS
from .openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from .openai.tokens import DETOKENIZE_FIELDS, TEMPLATE_FIELDS, TOKENIZE_FIELDS
from .responses.fields import RESPONSE_FIELDS
from .vectors.requests import (
    EMBEDDING_FIELDS,
    OLLAMA_EMBED_FIELDS,
    OLLAMA_EMBEDDING_FIELDS,
    RERANK_FIELDS,
)

Schema = dict[str, Any]

PATHS = ("/openapi.json", "/docs")
"""They say nothing of the models or requests of this daemon, and a browser sends no key."""

SSE, LINES = "text/event-stream", "application/x-ndjson"


class Operation(NamedTuple):
    """A method of a path.

    Attributes:
        method: in capitals.
        path: as Starlette has it.
        says: what it does.
        fields: of its body; empty: it has none.
        needs: those that it cannot be without.
        streams: the type of its answer if that comes in pieces.
    """

    method: str
    path: str
    says: str
    fields: Sequence[Field] = ()
    needs: Sequence[str] = ()
    streams: str = ""


_MODEL = (used("model", "the name of a model of the configuration"),)

RANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "answer a chat (OpenAI)", CHAT_FIELDS,
              ("model", "messages"), SSE),
    Operation("POST", "/v1/completions", "continue one text or several (OpenAI)",
              COMPLETION_FIELDS, ("model", "prompt"), SSE),
    Operation("POST", "/v1/responses", "answer an input (OpenAI)", RESPONSE_FIELDS,
              ("model", "input"), SSE),
    Operation("POST", "/v1/responses/input_tokens", "count the tokens of such an input",
              RESPONSE_FIELDS, ("model", "input")),
    Operation("GET", "/v1/responses/{id}", "a kept response"),
    Operation("DELETE", "/v1/responses/{id}", "forget a kept response"),
    Operation("GET", "/v1/responses/{id}/input_items", "the items of its own input"),
    Operation("POST", "/v1/messages", "answer a chat (Anthropic)", MESSAGES_FIELDS,
              ("model", "messages", "max_tokens"), SSE),
    Operation("POST", "/v1/messages/count_tokens", "count the tokens of such a chat",
              COUNT_FIELDS, ("model", "messages")),
    Operation("POST", "/v1/embeddings", "the vectors of texts (OpenAI)", EMBEDDING_FIELDS,
              ("model", "input")),
    *(Operation("POST", path, "documents ranked for a query (Jina, Cohere)", RERANK_FIELDS,
                ("model", "query", "documents")) for path in RANK_PATHS),
    Operation("POST", "/api/embed", "the vectors of texts (Ollama)", OLLAMA_EMBED_FIELDS,
              ("model", "input")),
    Operation("POST", "/api/embeddings", "the vector of a text (Ollama)", OLLAMA_EMBEDDING_FIELDS,
              ("model", "prompt")),
    Operation("GET", "/v1/models", "the models; in Anthropic's form with `anthropic-version`"),
    Operation("GET", "/v1/models/{name:path}", "one model"),
    Operation("POST", "/tokenize", "the tokens of a text or chat (vLLM, llama-server)",
              TOKENIZE_FIELDS, ("model",)),
    Operation("POST", "/detokenize", "the text of tokens", DETOKENIZE_FIELDS, ("model", "tokens")),
    Operation("POST", "/apply-template", "a chat as the model's template renders it",
              TEMPLATE_FIELDS, ("model", "messages")),
    Operation("POST", "/api/chat", "answer a chat (Ollama)", OLLAMA_CHAT_FIELDS, ("model",), LINES),
    Operation("POST", "/api/generate", "answer or continue a text (Ollama)", GENERATE_FIELDS,
              ("model",), LINES),
    Operation("GET", "/api/tags", "the models (Ollama)"),
    Operation("GET", "/api/ps", "the models that are loaded (Ollama)"),
    Operation("POST", "/api/show", "one model's details (Ollama)", _MODEL, ("model",)),
    Operation("POST", "/api/pull", "download a model and serve it (Ollama); operators only",
              (used("model", "OWNER/NAME"), used("stream", "false: one object")), ("model",),
              LINES),
    Operation("DELETE", "/api/delete", "no longer serve a model (Ollama); operators only", _MODEL,
              ("model",)),
    Operation("GET", "/api/version", "the version of Ollama's API"),
    Operation("GET", "/api/v0/models", "the models (LM Studio)"),
    Operation("GET", "/api/v0/models/{name:path}", "one model (LM Studio)"),
    Operation("GET", "/api/v1/models", "the models (LM Studio)"),
    Operation("GET", "/models", "the same as `/v1/models`"),
    Operation("GET", "/models/sse", "an event for each change of a model", streams=SSE),
    Operation("POST", "/models/load", "load a model; operators only", _MODEL, ("model",)),
    Operation("POST", "/models/unload", "unload a model; operators only", _MODEL, ("model",)),
    Operation("POST", "/models/restart", "restart a model; operators only", _MODEL, ("model",)),
    Operation("GET", "/version", "the version of mlxsup"),
    Operation("GET", "/health", "200 while the gateway runs; needs no key"),
    Operation("GET", "/ready", "200 if a model could answer, or `?model=` is READY; else 503"),
    Operation("GET", "/metrics", "for Prometheus"),
    Operation("GET", "/openapi.json", "this document; needs no key"),
    Operation("GET", "/docs", "the same to read; needs no key"),
)  # fmt: skip
"""All but the page's own routes, and those that say what is not there."""

# ---------------------------------------------------------------- the document


TEXT: Schema = {"type": "string"}
TYPES: Mapping[type, str] = {
    bool: "boolean", int: "integer", str: "string", list: "array", dict: "object",
}  # fmt: skip


@cache
def document() -> dict[str, Any]:
    """Return the document, of OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        path = one.path.replace(":path", "")
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, path)
    wrong = Failure(400, "temperature must be a number from 0 to 10, not text",
                    code="invalid_request", param="temperature")  # fmt: skip
    errors = {
        "OpenAIError": openai_body(wrong), "OllamaError": ollama_body(wrong),
        "AnthropicError": anthropic_body(wrong, "5f0a6c1d-1"),
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlxsup",
            "version": VERSION,
            "description": "Models of this machine over OpenAI's, Anthropic's and Ollama's APIs. "
            "Every field may be null, which is the same as leaving it out.",
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {
            "schemas": {
                name: {"type": "object", "examples": [example]} for name, example in errors.items()
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(one: Operation, path: str) -> dict[str, Any]:
    scope = {"path": path, "headers": ()}
    error = "Anthropic" if is_anthropic(scope) else "Ollama" if is_ollama(scope) else "OpenAI"
    first = {"/metrics": "text/plain", "/docs": "text/html"}.get(path, "application/json")
    kinds = [first, one.streams]
    said: dict[str, Any] = {
        "summary": one.says[0].upper() + one.says[1:],
        "operationId": f"{one.method.lower()}{re.sub('[^a-z0-9]+', '_', path)}".rstrip("_"),
        "responses": {
            "200": {"description": "the answer", "content": {kind: {} for kind in kinds if kind}},
            "default": {
                "description": "an error",
                "content": {
                    "application/json": {"schema": {"$ref": f"#/components/schemas/{error}Error"}}
                },
            },
        },
    }
    if names := re.findall(r"{(\w+)}", path):
        said["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": TEXT} for name in names
        ]
    if one.fields:
        schema = _object(one.fields) | {"required": list(one.needs)}
        said["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return said


def _object(fields: Sequence[Field]) -> Schema:
    """Return the schema of a body, or of an object within one."""
    return {"type": "object", "properties": {field.name: _schema(field) for field in fields}}


def _schema(field: Field) -> Schema:
    """Return the schema of a field, with its description, as far as the tables have them."""
    if field.use is Use.NEUTRAL:
        return {"enum": [*field.neutral, None], "description": field.says}
    if field.use is not Use.USED:
        return {"description": f"{field.use}: {field.says}" if field.says else str(field.use)}
    number = NUMBERS.get(field.name)
    known = f"{number.says}; {number.expected}" if number else _arguments().get(field.name, "")
    schema: Schema = {"description": field.says or known}
    if field.takes is not None:
        schema["type"] = [TYPES[field.takes], "null"]
    if field.fields:
        schema["properties"] = _object(field.fields)["properties"]
    return schema


@cache
def _arguments() -> dict[str, str]:
    """Return what `generate` says of its arguments."""
    found = re.findall(r"^ {12}(\w+): (.*(?:\n {16}.*)*)", ClientBase.generate.__doc__ or "", re.M)
    return {name: " ".join(text.split()).rstrip(".") for name, text in found}


# ---------------------------------------------------------------- the page

HEADERS = {
    "content-security-policy": "default-src 'none'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def _page(said: Mapping[str, Any]) -> Iterator[str]:
    yield (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>mlxsup: HTTP API</title>'
        f"<h1>HTTP API</h1><p>{_html(said['info']['description'])} "
        'For programs: <a href="openapi.json">openapi.json</a>.</p>'
    )
    for path, methods in said["paths"].items():
        for method, one in methods.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{_html(one['summary'])}.</p>"
            if "requestBody" in one:
                schema = one["requestBody"]["content"]["application/json"]["schema"]
                yield f"<details><summary>Fields</summary>{_list(schema)}</details>"


def _list(schema: Schema) -> str:
    """Return the fields of an object as a list of HTML."""
    items = []
    for name, one in schema["properties"].items():
        kind = one.get("type", ())
        words = [
            kind if isinstance(kind, str) else " or ".join(kind),
            "required" if name in schema.get("required", ()) else "",
            one.get("description", ""),
        ]
        inner = _list(one) if "properties" in one else ""
        about = "; ".join(filter(None, words))
        items.append(f"<li><code>{escape(name)}</code>: {_html(about)}{inner}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _html(text: str) -> str:
    """Return a sentence with `code` as HTML."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))


def routes() -> list[Route]:
    """Return the document and the page, which loads nothing."""

    async def openapi(_: Request) -> Response:
        return Response(json.dumps(document()), media_type="application/json")

    async def docs(_: Request) -> Response:
        return HTMLResponse("".join(_page(document())), headers=HEADERS)

    return [
        Route(path, one, methods=["GET"]) for path, one in zip(PATHS, (openapi, docs), strict=True)
    ]
