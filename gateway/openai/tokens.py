"""Requests for the tokens of a prompt, in the form of vLLM and of llama-server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..ask import Ask
from ..failure import bad_field
from ..fields import (
    OF_EVERY_REQUEST,
    Field,
    Use,
    check_fields,
    hints,
    passed,
    read_keep_alive,
    read_model,
    used,
)
from .messages import read_messages, read_tools

COUNTED = {"ids": False}
"""The `tokenize` of a request that only counts."""

_CHAT = (
    used("messages", "the chat; its template makes the prompt", list),
    used("tools", "functions in OpenAI's form", list),
    used("add_generation_prompt", "false: the prompt ends with the last message", bool),
    *passed("chat_template_kwargs", "continue_final_message"),
    Field("chat_template", Use.NEUTRAL, "the model's own template is used"),
)

TOKENIZE_FIELDS = (
    used("prompt", "a text", str),
    used("content", "llama-server's name of `prompt`; without begin-of-text token by default", str),
    *_CHAT,
    used("add_special_tokens", "false: no begin-of-text token before the prompt; a chat has those "
         "of its template", bool),
    used("add_special", "llama-server's name of `add_special_tokens`", bool),
    *OF_EVERY_REQUEST,
    *hints((False,), "return_token_strs", "with_pieces"),
    *hints((True,), "parse_special"),
)  # fmt: skip

TEMPLATE_FIELDS = (*_CHAT, *OF_EVERY_REQUEST)

DETOKENIZE_FIELDS = (used("tokens", "a list of token ids", list), *OF_EVERY_REQUEST)


def read_tokenize(body: dict[str, Any]) -> Ask:
    """Read the body of `POST /tokenize`.

    Raises:
        Failure: a field is wrong; `param` names it.
    """
    unread: list[str] = []
    given = check_fields(body, TOKENIZE_FIELDS, unread)
    is_special = "content" not in given
    for theirs, ours in (("content", "prompt"), ("add_special", "add_special_tokens")):
        if theirs in given and ours in given:
            raise bad_field(theirs, f"{theirs} and {ours} mean the same; send only one of them")
        if theirs in given:
            given[ours] = given.pop(theirs)
    if ("prompt" in given) is ("messages" in given):
        raise bad_field("prompt", "send either prompt or messages")
    is_special = given.pop("add_special_tokens", "prompt" in given and is_special)
    if "prompt" in given:
        return _ask(given, unread, {"prompt": given.pop("prompt")}, add_special_tokens=is_special)
    if is_special:
        message = "add_special_tokens must be false with messages: their template adds them"
        raise bad_field("add_special_tokens", message)
    return _ask(given, unread, _chat(given, unread))


def read_template(body: dict[str, Any]) -> Ask:
    """Read the body of `POST /apply-template`; errors as for `read_tokenize`."""
    unread: list[str] = []
    given = check_fields(body, TEMPLATE_FIELDS, unread)
    return _ask(given, unread, {**_chat(given, unread), "echo": True}, ids=False)


def read_detokenize(body: dict[str, Any]) -> Ask:
    """Read the body of `POST /detokenize`; errors as for `read_tokenize`."""
    unread: list[str] = []
    given = check_fields(body, DETOKENIZE_FIELDS, unread)
    tokens = given.pop("tokens", None)
    if tokens is None or not all(type(one) is int and 0 <= one < 2**32 for one in tokens):
        raise bad_field("tokens", "tokens must be a list of token ids")
    ask = _ask(given, unread, {"prompt_tokens": tokens, "echo": True}, ids=False)
    return replace(ask, names=dict.fromkeys(("prompt_tokens", "prompt", "echo"), "tokens"))


def _chat(given: dict[str, Any], unread: list[str]) -> dict[str, Any]:
    """Take the chat out of the fields."""
    if "tools" in given:
        given["tools"], _ = read_tools(given["tools"], unread)
        if not given["tools"]:
            del given["tools"]
    return {"messages": read_messages(given.pop("messages", []))}


def _ask(given: dict[str, Any], unread: list[str], asked: dict[str, Any], **tokenize: bool) -> Ask:
    opens, continues = given.pop("add_generation_prompt", None), given.get("continue_final_message")
    if opens and continues:
        raise bad_field(
            "add_generation_prompt",
            "add_generation_prompt and continue_final_message contradict each other; send only "
            "one of them",
        )
    if opens is False and not continues:
        tokenize["add_generation_prompt"] = False
    read_keep_alive(given)
    return Ask(
        model=read_model(given),
        inputs=({**asked, "tokenize": tokenize},),
        parameters=given,
        is_counted=False,
        unread=unread,
    )
