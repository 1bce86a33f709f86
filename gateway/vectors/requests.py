"""Reads requests for embeddings and rankings. Pure: a map in, an `Ask` out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlxsup.protocol.pooling import MAX_TEXTS

from ..ask import Ask
from ..failure import bad_field, bad_value, check_choice
from ..fields import (
    OF_EVERY_REQUEST,
    check_fields,
    hints,
    ignored,
    read_keep_alive,
    read_model,
    used,
)

_CUT = used("truncate", "true: a text that is too long is cut; otherwise it is refused", bool)

EMBEDDING_FIELDS = (
    used("input", f"a text, a list of token ids, or a list of up to {MAX_TEXTS:,} of them"),
    used("encoding_format", "`float`, or `base64`: 32-bit floats, the lowest byte first"),
    used("dimensions", "only so many of the first numbers, normalised again; for models that allow "
         "it", int),
    used("input_type", "the kind of text, as the model's makers call it: `query`, `document`"),
    _CUT,
    used("ttl", "LM Studio's name of `keep_alive`"),
    *OF_EVERY_REQUEST,
    *hints((-1,), "truncate_prompt_tokens"),
    *hints((True,), "add_special_tokens"),
    *ignored("user"),
)  # fmt: skip

RERANK_FIELDS = (
    used("query", "what is asked", str),
    used("documents", f"up to {MAX_TEXTS:,} texts, or objects with a `text`", list),
    used("top_n", "only so many of the best; otherwise all", int),
    _CUT,
    *OF_EVERY_REQUEST,
    *hints((False,), "return_documents"),
    *hints((), "max_tokens_per_doc", "max_chunks_per_doc"),
    *ignored("user"),
)

OLLAMA_EMBED_FIELDS = (
    used("input", f"a text, or a list of up to {MAX_TEXTS:,} texts"),
    used("dimensions", "as of /v1/embeddings", int),
    used("truncate", "false: a text that is too long is refused; otherwise it is cut", bool),
    *OF_EVERY_REQUEST,
    *ignored("options"),
)

OLLAMA_EMBEDDING_FIELDS = (
    used("prompt", "a text", str),
    *OF_EVERY_REQUEST,
    *ignored("options"),
)


class Form(StrEnum):
    """What the answer looks like."""

    FLOAT = "float"
    BASE64 = "base64"
    RANKING = "ranking"
    OLLAMA = "ollama"
    OLLAMA_ONE = "ollama one"


TEXTS_OF: Mapping[str, str] = {Form.RANKING: "documents", Form.OLLAMA_ONE: "prompt"}
"""The field with the texts, where it is not `input`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorAsk(Ask):
    """A request for embeddings or a ranking.

    Attributes:
        form: of the answer.
        top_n: how many documents of a ranking to return; None: all.
    """

    form: str = Form.FLOAT
    top_n: int | None = None

    def choices(self) -> list[dict[str, Any]]:
        """Return the arguments of its one request: presets say how to sample, and mean nothing."""
        return [{**self.parameters, **given} for given in self.inputs]


def read_embeddings(body: dict[str, Any]) -> VectorAsk:
    """Read the body of `POST /v1/embeddings`.

    Raises:
        Failure: a field is missing, unknown or of another type; `param` names it.
    """
    unread: list[str] = []
    given = check_fields(body, EMBEDDING_FIELDS, unread)
    model = read_model(given)
    form = given.pop("encoding_format", Form.FLOAT.value)
    check_choice("encoding_format", (Form.FLOAT.value, Form.BASE64.value), form)
    return _ask(model, _texts(given.pop("input", None)), given, unread, form=form)


def read_rerank(body: dict[str, Any]) -> VectorAsk:
    """Read the body of `POST /v1/rerank`."""
    unread: list[str] = []
    given = check_fields(body, RERANK_FIELDS, unread)
    model = read_model(given)
    if "query" not in given:
        raise bad_value("query", "a text", None)
    if "documents" not in given:
        raise bad_value("documents", "a list of texts", None)
    documents = [
        one["text"] if isinstance(one, dict) and isinstance(one.get("text"), str) else one
        for one in given.pop("documents")
    ]
    top_n = given.pop("top_n", None)
    if top_n is not None and top_n < 1:
        raise bad_field("top_n", f"top_n must be at least 1, not {top_n}")
    input = {"texts": _checked(documents, "documents"), "query": given.pop("query")}
    given.setdefault("truncate", True)
    return _ask(model, input, given, unread, form=Form.RANKING, top_n=top_n)


def read_ollama_embed(body: dict[str, Any]) -> VectorAsk:
    """Read the body of `POST /api/embed`."""
    unread: list[str] = []
    given = check_fields(body, OLLAMA_EMBED_FIELDS, unread)
    model = read_model(given)
    given.setdefault("truncate", True)
    return _ask(model, _texts(given.pop("input", None)), given, unread, form=Form.OLLAMA)


def read_ollama_embedding(body: dict[str, Any]) -> VectorAsk:
    """Read the body of `POST /api/embeddings`."""
    unread: list[str] = []
    given = check_fields(body, OLLAMA_EMBEDDING_FIELDS, unread)
    model = read_model(given)
    if "prompt" not in given:
        raise bad_value("prompt", "a text", None)
    input = {"texts": [given.pop("prompt")]}
    given["truncate"] = True
    return _ask(model, input, given, unread, form=Form.OLLAMA_ONE)


def _texts(given: Any) -> dict[str, Any]:
    """Return the texts of an input: one, or a list of several of them."""
    if given is None:
        raise bad_value("input", "a text or a list of texts", None)
    is_one = isinstance(given, str) or (
        isinstance(given, list) and bool(given) and type(given[0]) is int
    )
    return {"texts": _checked([given] if is_one else given, "input")}


def _checked(texts: Any, name: str) -> list[Any]:
    """Return a list of texts or of lists of ids; the daemon's own check has other names."""
    takes_ids = name == "input"
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_TEXTS:
        ids = ", or lists of token ids" if takes_ids else ""
        count = f", not {len(texts)}" if isinstance(texts, list) else ""
        raise bad_field(name, f"{name} must be 1 to {MAX_TEXTS:,} texts{ids}{count}")
    for nth, text in enumerate(texts):
        is_ids = isinstance(text, list) and all(
            type(token) is int and 0 <= token < 2**32 for token in text
        )
        if not isinstance(text, str) and not (takes_ids and is_ids):
            ids = ", or a list of token ids, integers from 0 on" if takes_ids else ""
            raise bad_field(name, f"{name}[{nth}] must be a text{ids}")
    return texts


def _ask(
    model: str,
    input: dict[str, Any],
    given: dict[str, Any],
    unread: list[str],
    *,
    form: str,
    top_n: int | None = None,
) -> VectorAsk:
    read_keep_alive(given)
    return VectorAsk(
        model=model,
        inputs=(input,),
        parameters=given,
        names={"texts": TEXTS_OF.get(form, "input")},
        unread=unread,
        form=form,
        top_n=top_n,
    )
