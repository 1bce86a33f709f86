"""What can be asked over HTTP, as a document of OpenAPI and as a page: made of the tables of fields
that requests are read by."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mlxsup.client.api import ClientBase
from mlxsup.client.parameters import MAX_LIMIT_S
from mlxsup.protocol.body import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from mlxsup.protocol.ids import MAX_ID_CHARACTERS
from mlxsup.protocol.parameters import (
    LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    MOST_TOKENS,
    NUMBERS,
)
from mlxsup.protocol.pictures import MAX_IMAGES
from mlxsup.protocol.pooling import MAX_DIMENSIONS, MAX_TEXTS
from mlxsup.protocol.states import Priority
from mlxsup.protocol.version import VERSION

from . import limits
from .anthropic.conversation import BLOCKS
from .anthropic.fields import COUNT_FIELDS, MESSAGES_FIELDS, OUTPUT_FIELDS
from .anthropic.requests import CHOICES, THINKS
from .errors import anthropic_body, ollama_body, openai_body
from .failure import Failure
from .fields import Field, Use, used
from .headers import is_anthropic, is_ollama
from .ollama.requests import CHAT_FIELDS as OLLAMA_CHAT_FIELDS
from .ollama.requests import GENERATE_FIELDS, OPTION_FIELDS
from .openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, MESSAGE_FIELDS, STREAM_FIELDS
from .openai.requests import MAX_TOP_LOGPROBS
from .openai.tokens import DETOKENIZE_FIELDS, TEMPLATE_FIELDS, TOKENIZE_FIELDS
from .responses.fields import REASONING_FIELDS, RESPONSE_FIELDS, TEXT_FIELDS
from .responses.kept import INPUT_ITEMS, MOST_INPUT_ITEMS
from .vectors.requests import (
    EMBEDDING_FIELDS,
    OLLAMA_EMBED_FIELDS,
    OLLAMA_EMBEDDING_FIELDS,
    RERANK_FIELDS,
)

Schema = dict[str, Any]

OPEN_PATHS = ("/docs", "/openapi.json")
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

# ---------------------------------------------------------------- fields

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
LIST: Schema = {"type": "array"}
JSON_TYPES: Mapping[type, Schema] = {bool: FLAG, int: {"type": "integer"}, str: TEXT, list: LIST,
                                     dict: OBJECT}  # fmt: skip

_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOPS: Schema = {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}
_LIMIT: Schema = {"type": "number", "minimum": 0, "maximum": MAX_LIMIT_S}
_TIME: Schema = {"type": "string", "pattern": "^(-.*|([0-9.]+[a-z]*)+)$"}
_KEEP: Schema = {"anyOf": [{"type": "number", "maximum": MAX_LIMIT_S}, _TIME]}
_MOST: Schema = {"type": "integer", "minimum": 1}


def _one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _typed(*words: str) -> Schema:
    return {"type": "object", "required": ["type"], "properties": {"type": _one_of(*words)}}


def _with_any(*names: str) -> Schema:
    return {"type": "object", "anyOf": [{"required": [name]} for name in names]}


def _items(schema: Schema, most: int = limits.MAX_ITEMS, least: int = 0) -> Schema:
    return {"type": "array", "items": schema, "minItems": least, "maxItems": most}


def _message(roles: Sequence[str]) -> Schema:
    return {"type": "object", "required": ["role"], "properties": {"role": _one_of(*roles)}}


def _number(name: str) -> Schema:
    number = NUMBERS[name]
    low = "exclusiveMinimum" if number.is_low_open else "minimum"
    kind = "integer" if number.is_integer else "number"
    schema: Schema = {"type": kind, low: number.low, "maximum": number.high}
    return schema if number.default is None else {**schema, "default": number.default}


_CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_FORMAT: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": _one_of("text", "json_object", "json_schema", "regex")},
}

SCHEMAS: Mapping[str, Schema] = {
    **{name: _number(name) for name in NUMBERS},
    "model": {"type": "string", "minLength": 1, "maxLength": MAX_ID_CHARACTERS},
    "messages": _items(_message(_CHAT_ROLES), least=1),
    "n": {"type": "integer", "minimum": 1, "maximum": limits.MAX_CHOICES},
    "stop": {"anyOf": [TEXT, _STOPS]},
    "stop_sequences": _STOPS,
    "stop_token_ids": {**_IDS, "maxItems": MAX_STOP_TOKEN_IDS},
    "logit_bias": {
        "type": "object", "maxProperties": MAX_LOGIT_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {
            "type": "number", "minimum": LOGIT_BIAS.low, "maximum": LOGIT_BIAS.high,
        },
    },
    "max_output_tokens": _MOST,
    "ignore_eos": FLAG, "logprobs": FLAG, "continue_final_message": FLAG,
    "priority": _one_of(*(one.value for one in Priority)),
    "response_format": _FORMAT,
    "keep_alive": _KEEP, "ttl": _KEEP,
    "timeout_s": _LIMIT, "queue_timeout_s": _LIMIT, "first_token_timeout_s": _LIMIT,
    "tools": _items(_with_any("type", "name"), limits.MAX_TOOLS),
    "tool_choice": {
        "anyOf": [
            _one_of("auto", "none", "required"), _typed("function", "custom", "allowed_tools"),
        ],
    },
    "chat_template_kwargs": OBJECT,
    "reasoning_effort": TEXT,
    "think": {"anyOf": [FLAG, TEXT]},
    "images": _items({"type": "string", "contentEncoding": "base64", "minLength": 16}, MAX_IMAGES),
    "format": _FORMAT,
    "num_predict": {"type": "integer"},
    "repeat_penalty": _number("repetition_penalty"),
    "repeat_last_n": {"type": "integer", "minimum": -1, "maximum": MOST_TOKENS},
    "system": {"anyOf": [TEXT, _items(_typed(*BLOCKS))]},
    "thinking": _typed(*THINKS),
    "input": {"anyOf": [TEXT, _items(_with_any("type", "role", "id"), least=1)]},
    "tokens": _IDS,
    "name": TEXT, "tool_call_id": TEXT, "reasoning_content": TEXT, "reasoning": TEXT,
    "refusal": TEXT, "tool_calls": LIST, "function_call": OBJECT,
    "content": {"anyOf": [TEXT, _items(OBJECT), {"type": "null"}]},
    "role": _one_of(*_CHAT_ROLES),
    "effort": TEXT,
}  # fmt: skip
"""What a field takes whose table does not say, by its name."""

_UNSET: Schema = {"minimum": -1}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_SIZE: Schema = {**_COUNT, "maximum": MAX_DIMENSIONS}
_RANKED: dict[str, Any] = {
    "query": TEXT,
    "documents": _items({"anyOf": [TEXT, _with_any("text")]}, MAX_TEXTS, least=1),
    "top_n": _COUNT,
}
_TEXTS_OR_IDS: Schema = {
    "anyOf": [
        TEXT, {**_IDS, "minItems": 1},
        _items({"anyOf": [TEXT, {**_IDS, "minItems": 1}]}, MAX_TEXTS, least=1),
    ],
}  # fmt: skip
_CHAT_TOKENS: Schema = {"type": "integer", **_UNSET, "not": {"const": 0}}
_PROMPTS: list[Schema] = [{"type": "string", "minLength": 1}, {**_IDS, "minItems": 1}]
_SAMPLED: dict[str, Any] = {
    "top_k": {**_number("top_k"), **_UNSET},
    "seed": {**_number("seed"), **_UNSET},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 1},
}
_LOOSE: dict[str, Any] = {
    **_SAMPLED,
    "max_tokens": {"type": "integer", **_UNSET},
    "keep_alive": {"anyOf": [*_KEEP["anyOf"], {"const": ""}]},
    "stream_options": (STREAM_FIELDS,),
}
"""OpenAI's older APIs take the values that other servers have for none."""

OF_API: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {
        **_LOOSE,
        "messages": (MESSAGE_FIELDS, ("role",)),
        "thinking": TEXT,
        "max_tokens": _CHAT_TOKENS,
        "max_completion_tokens": _CHAT_TOKENS,
    },
    "/v1/completions": {
        **_LOOSE,
        "prompt": {"anyOf": [*_PROMPTS, _items({"anyOf": _PROMPTS}, limits.MAX_CHOICES, least=1)]},
        "logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "echo": FLAG,
    },
    "/v1/responses": {"text": (TEXT_FIELDS,), "reasoning": (REASONING_FIELDS,)},
    "/v1/responses/input_tokens": {"stream": {}, "store": {}},
    "/v1/messages": {
        "messages": _items(_message(("user", "assistant", "system")), least=1),
        "max_tokens": _MOST,
        "tool_choice": _typed(*CHOICES, "tool"),
        "output_config": (OUTPUT_FIELDS,),
    },
    "/api/": {
        **_SAMPLED,
        "messages": _items(_message(_CHAT_ROLES)),
        "format": {"anyOf": [_one_of("json", ""), OBJECT]},
        "options": (OPTION_FIELDS,),
    },
    "/v1/embeddings": {
        "input": _TEXTS_OR_IDS, "dimensions": _SIZE, "encoding_format": _one_of("float", "base64"),
        "input_type": {"type": "string", "minLength": 1},
    },
    **dict.fromkeys(RANK_PATHS, _RANKED),
    "/api/embed": {"input": _TEXTS_OR_IDS, "dimensions": _SIZE},
    "/api/embeddings": {"prompt": TEXT},
    "/api/pull": {"model": TEXT, "stream": FLAG},
}  # fmt: skip
"""Where a path has another one: a schema, or the fields of an object within, and which it needs.
The longest beginning of a path counts first."""


@cache
def _arguments() -> dict[str, str]:
    """Return what `generate` says of its arguments."""
    found = re.findall(r"^ {12}(\w+): (.*(?:\n {16}.*)*)", ClientBase.generate.__doc__ or "", re.M)
    return {name: " ".join(text.split()).rstrip(".") for name, text in found}


def field_schema(field: Field, path: str, *, is_needed: bool) -> Schema:
    """Return what a field takes: null too, unless the body cannot be without it."""
    if field.use is Use.NEUTRAL:
        return {"enum": [*field.neutral, None]}
    if field.use in (Use.IGNORED, Use.HINT):
        return {}
    schema: Any = SCHEMAS.get(field.name, {})
    if field.takes and schema.get("type") != JSON_TYPES[field.takes]["type"]:
        schema = JSON_TYPES[field.takes]
    for begin in sorted(OF_API, key=len):
        if path.startswith(begin):
            schema = OF_API[begin].get(field.name, schema)
    if isinstance(schema, tuple):
        inner = object_schema(*schema[:1], path=path, needs=schema[1] if schema[1:] else ())
        schema = inner if field.name != "messages" else _items(inner, least=1)
    if is_needed:
        return dict(schema)
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]} | (
            {"enum": [*schema["enum"], None]} if "enum" in schema else {}
        )
    return {"anyOf": [*schema["anyOf"], {"type": "null"}]} if "anyOf" in schema else schema


def object_schema(fields: Sequence[Field], *, path: str, needs: Sequence[str] = ()) -> Schema:
    """Return the schema of a body, or of an object within one."""
    properties = {}
    for field in fields:
        says = field.says.removesuffix("; see below")
        if not says and field.use is Use.USED:
            number = NUMBERS.get(field.name)
            says = (number and number.says) or _arguments().get(field.name, "")
        if field.use in (Use.IGNORED, Use.HINT):
            says = f"{field.use}: {says}" if says else str(field.use)
        schema = field_schema(field, path, is_needed=field.name in needs)
        properties[field.name] = {**schema, "description": says} if says else schema
    schema = {"type": "object", "properties": properties}
    return {**schema, "required": list(needs)} if needs else schema


# ---------------------------------------------------------------- the document

_QUERY = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_INPUT_ITEMS, "default": INPUT_ITEMS},
    "order": {**_one_of("asc", "desc"), "default": "desc"},
    "after": TEXT,
}


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
                name: {**_shape_of(example), "examples": [example]}
                for name, example in errors.items()
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
    answers: dict[str, Any] = {one.streams: {}} if one.streams else {}
    if path in ("/metrics", "/docs"):
        answers = {"text/plain" if path == "/metrics" else "text/html": {}}
    elif path != "/models/sse":
        answers = {"application/json": {"schema": OBJECT}, **answers}
    said: dict[str, Any] = {
        "summary": one.says[0].upper() + one.says[1:],
        "operationId": f"{one.method.lower()}{re.sub('[^a-z0-9]+', '_', path)}".rstrip("_"),
        "responses": {
            "200": {"description": "the answer", "content": answers},
            "default": {
                "description": "an error",
                "content": {
                    "application/json": {
                        "schema": {"$ref": f"#/components/schemas/{error}Error"}
                    }
                },
            },
        },
    }  # fmt: skip
    named = [
        {"name": name, "in": "path", "required": True, "schema": TEXT}
        for name in re.findall("{(\\w+)}", path)
    ]
    if path.endswith("/input_items"):
        named += [{"name": name, "in": "query", "schema": one} for name, one in _QUERY.items()]
    if named:
        said["parameters"] = named
    if one.fields:
        schema = object_schema(one.fields, path=path, needs=one.needs)
        said["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return said


def _shape_of(value: Any) -> Schema:
    """Return the schema of values like this one."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {name: _shape_of(one) for name, one in value.items()},
        }
    return {"type": ["string", "null"]} if value is None else TEXT


# ---------------------------------------------------------------- the page

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
  color-scheme: light dark; }
h2 { margin-top: 2.5rem; font: 600 1.1rem ui-monospace, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8886; padding: .3rem .6rem .3rem 0; vertical-align: top;
  overflow-wrap: anywhere; }
td:first-child { min-width: 9rem; }
td.inner { border: 0; padding: 0 0 .6rem 1.5rem; }
@media (max-width: 40rem) {
  td { display: block; border: 0; padding: 0 0 0 1rem; }
  td:first-child { border-top: 1px solid #8886; padding: .4rem 0 0; }
}
summary { cursor: pointer; }
"""

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


@cache
def page() -> str:
    """Return the document as a page of HTML, which loads nothing."""
    return "".join(_page(document()))


def _page(said: dict[str, Any]) -> Iterator[str]:
    yield (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>mlxsup: HTTP API</title>'
        f"<style>{_STYLE}</style><h1>HTTP API</h1><p>{_html(said['info']['description'])} "
        'For programs: <a href="openapi.json">openapi.json</a>.</p>'
    )
    for path, methods in said["paths"].items():
        for method, one in methods.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{_html(one['summary'])}.</p>"
            body = one.get("requestBody", {}).get("content", {}).get("application/json", {})
            if schema := body.get("schema"):
                yield f"<details><summary>Fields</summary>{_table(schema)}</details>"


def _table(schema: Schema) -> str:
    rows = []
    for name, one in schema["properties"].items():
        needed = ", required" if name in schema.get("required", ()) else ""
        kind, says = _html(_kind(one)), _html(one.get("description", ""))
        inner = one.get("items", one)
        has_more = "properties" in inner and len(inner["properties"]) > 1
        more = f'<tr><td class="inner" colspan="3">{_table(inner)}</tr>' if has_more else ""
        rows.append(f"<tr><td><code>{escape(name)}</code><td>{kind}{needed}<td>{says}</tr>{more}")
    return f"<table>{''.join(rows)}</table>"


def _kind(schema: Schema) -> str:
    """Return what a schema takes, in words."""
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return (
            ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"] if one is not None) or "null"
        )
    kind = schema.get("type", "any")
    word = kind[0] if isinstance(kind, list) else kind
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", math.inf)
    if low is None:
        return str(word)
    return f"{word}, {low:g} to {high:g}" if high < MOST_TOKENS else f"{word}, from {low:g}"


def _html(text: str) -> str:
    """Return a sentence with `code` as HTML."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))


def routes() -> list[Route]:
    """Return the document and the page."""

    async def openapi(_: Request) -> Response:
        return Response(json.dumps(document()), media_type="application/json")

    async def docs(_: Request) -> Response:
        return HTMLResponse(page(), headers=HEADERS)

    return [
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/docs", docs, methods=["GET"]),
    ]
