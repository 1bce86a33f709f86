"""Reads requests in Ollama's form. Pure: a map in, an `Ask` out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mlxsup.protocol.pictures import MAX_IMAGES

from ..ask import Ask
from ..content import Part, join_parts
from ..failure import bad_field
from ..fields import (
    KEEP_ALIVE,
    Field,
    Use,
    add_to_template,
    add_unread,
    check_fields,
    check_list,
    hints,
    ignored,
    object_of,
    passed,
    read_keep_alive,
    read_model,
    schema_format,
    think_arguments,
    time_limits,
    used,
    whole_numbers,
)
from ..openai.messages import read_messages, read_tools
from ..openai.synonyms import translate
from ..pictures import read_base64, read_url

OPTION_FIELDS = (
    used("num_predict", "at most that many tokens; below 1: as many as fit"),
    used("repeat_penalty", "`repetition_penalty`"),
    used("repeat_last_n", "`penalty_window`; −1: all tokens; 0: no penalties"),
    used("stop", "a text, or a list of up to 16"),
    *passed("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
             "frequency_penalty"),
    *hints((1, 1.0), "typical_p", "tfs_z"),
    *hints((0,), "mirostat"),
    Field("num_ctx", Use.IGNORED, "every model takes its whole context"),
    *ignored("mirostat_tau", "mirostat_eta", "penalize_newline", "num_keep", "num_batch",
             "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "logits_all",
             "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
)  # fmt: skip

_BOTH = (
    used("model", "the name of a model of the configuration; `:latest` changes nothing"),
    used("stream", "false: one object; otherwise a line of JSON for each piece", bool),
    used("format", "`json`, or a JSON schema that the answer must match"),
    object_of("options", "how to sample", *OPTION_FIELDS),
    KEEP_ALIVE,
    used("think", "true, false or an effort: given to the chat template"),
    Field("truncate", Use.HINT, "a prompt that is too long is refused", (False,)),
    Field("shift", Use.HINT, "an answer ends where the context does", (False,)),
    *passed("logprobs", "top_logprobs", "chat_template_kwargs", "priority"),
    *time_limits(),
)  # fmt: skip

CHAT_FIELDS = (
    used("messages", "the chat; without any, the model is loaded, or unloaded with "
          "`keep_alive: 0`"),
    used("tools", "functions in OpenAI's form", list),
    *_BOTH,
)  # fmt: skip

GENERATE_FIELDS = (
    used("prompt", "what the user says; without it, the model is loaded, or unloaded "
          "with `keep_alive: 0`", str),
    used("system", "comes before it", str),
    used("images", "pictures in base64, shown before the prompt"),
    used("raw", "true: the prompt is continued as it is, without a chat template", bool),
    *_BOTH,
    Field("template", Use.NEUTRAL, "the model's own template is used; render yours, and send it "
          "with `raw: true`", ("",)),
    Field("suffix", Use.NEUTRAL, "text cannot be inserted", ("",)),
    Field("context", Use.NEUTRAL, "nothing is kept; send the conversation to /api/chat", ([],)),
)  # fmt: skip

NAMES = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "penalty_window": "repeat_last_n",
    "response_format": "format",
}
"""Parameters of ours that Ollama has under another name."""

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""The penalties that have no effect: they look at no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaAsk(Ask):
    """A request in Ollama's form.

    Attributes:
        is_chat: true if its answer is a message, and not a text.
        is_empty: true if it only loads or unloads its model. The daemon is asked for a token that
            is not shown: so the queue, the limits of its account and `keep_alive` are those of any
            other request.
    """

    is_chat: bool = False
    is_empty: bool = False


def read_ollama_chat(body: dict[str, Any]) -> OllamaAsk:
    """Read the body of `POST /api/chat`.

    Raises:
        Failure: a field is wrong; `param` names it.
    """
    unread: list[str] = []
    given = check_fields(body, CHAT_FIELDS, unread)
    messages = given.pop("messages", [])
    if "tools" in given:
        given["tools"], _ = read_tools(given["tools"], unread)
        if not given["tools"]:
            del given["tools"]
    if messages == []:
        return _ask(given, None, unread, is_chat=True)
    return _ask(given, {"messages": _read_messages(messages)}, unread, is_chat=True)


def read_generate(body: dict[str, Any]) -> OllamaAsk:
    """Read the body of `POST /api/generate`."""
    unread: list[str] = []
    given = check_fields(body, GENERATE_FIELDS, unread)
    prompt, system = given.pop("prompt", ""), given.pop("system", "")
    pictures = _read_images(given.pop("images", []), "images")
    is_raw = given.pop("raw", False)
    if is_raw and pictures:
        raise bad_field("images", "images have no effect with raw: leave out one of them")
    if is_raw and system:
        raise bad_field("system", "system has no effect with raw: put it into the prompt")
    if not prompt and not pictures:
        return _ask(given, None, unread, is_chat=False)
    if is_raw:
        if given.pop("think", None) is not None:  # there is no template that could heed it
            add_unread(unread, "think")
        return _ask(given, {"prompt": prompt}, unread, is_chat=False)
    said = [{"role": "system", "content": system}] if system else []
    messages = [*said, {"role": "user", "content": _shown(prompt, pictures)}]
    given["messages_as_text"] = True  # by a model without a chat template, as in Ollama
    return _ask(given, {"messages": messages}, unread, is_chat=False)


def _ask(
    given: dict[str, Any], input: dict[str, Any] | None, unread: list[str], *, is_chat: bool
) -> OllamaAsk:
    """Return a request with the fields that both paths have.

    Args:
        given: those fields, and parameters of `generate`.
        input: the argument of `generate` that is answered; None: the request is empty.
        unread: the fields that are not read.
        is_chat: see `OllamaAsk`.
    """
    model = read_model(given)
    is_streamed = given.pop("stream", True)
    _read_format(given)
    if "think" in given:
        add_to_template(given, think_arguments(given.pop("think"), "think"))
    _read_options(given, unread)
    read_keep_alive(given)
    if input is None:
        kept = {"keep_alive", "priority", *(field.name for field in time_limits())}
        given = {name: value for name, value in given.items() if name in kept} | {"max_tokens": 1}
    return OllamaAsk(
        model=model,
        inputs=({"prompt": " "} if input is None else input,),
        parameters=given,
        is_streamed=is_streamed and input is not None,
        names=NAMES,
        unread=unread,
        is_chat=is_chat,
        is_empty=input is None,
    )


def _read_format(given: dict[str, Any]) -> None:
    match given.pop("format", ""):
        case "":
            pass
        case "json":
            given["response_format"] = {"type": "json_object"}
        case dict(schema):
            given["response_format"] = schema_format(schema)
        case _:
            raise bad_field("format", 'format must be "json" or a JSON schema')


def _read_options(given: dict[str, Any], unread: list[str]) -> None:
    """Add the sampling parameters that `options` asks for."""
    read = translate(given.pop("options", {}), unread, is_chat=False)
    if type(limit := read.get("max_tokens")) is int and limit < 1:
        del read["max_tokens"]
    window = read.pop("repeat_last_n", None)
    if type(window) in (int, float) and window == 0:
        read |= PENALTIES
    elif window is not None:
        read["penalty_window"] = 0 if window == -1 else window
        whole_numbers(read)
    if isinstance(read.get("stop"), str):
        read["stop"] = [read["stop"]]
    given |= read


def _read_messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages for the chat template: in OpenAI's form they differ a little."""
    if not isinstance(given, list):
        return read_messages(given)
    messages = read_messages([_message(one) for one in given])
    for place, (message, one) in enumerate(zip(messages, given, strict=True)):
        pictures = _read_images(one.get("images") or [], f"messages[{place}].images")
        if pictures:
            message["content"] = _shown(message["content"] or "", pictures)
    return messages


def _read_images(given: Any, path: str) -> list[Part]:
    """Return pictures, each in base64, or as a `data:` URL."""
    return [
        (read_url if isinstance(image, str) and image[:5].lower() == "data:" else read_base64)(
            image, f"{path}[{nth}]", f"{path}[{nth}]"
        )
        for nth, image in enumerate(check_list(given, path, "pictures in base64", MAX_IMAGES))
    ]


def _shown(text: str | list[Part], pictures: list[Part]) -> str | list[dict[str, Any]]:
    """Return the content of a message with pictures before its text, as Ollama shows them."""
    texts = text if isinstance(text, list) else [text] if text else []
    return join_parts([*pictures, *texts])


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    read = {**message, "content": message.get("content") or ""}
    if message.get("role") == "tool" and isinstance(message.get("tool_name"), str):
        read.setdefault("name", message["tool_name"])
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def _call(call: Any) -> Any:
    """Return a call with arguments as text, which they are in OpenAI's form."""
    match call:
        case {"function": {"arguments": dict(arguments)} as function}:
            text = json.dumps(arguments, ensure_ascii=False)
            return {**call, "type": "function", "function": {**function, "arguments": text}}
    return call
