"""Fields that clients of other servers send, as the fields that mean the same here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlxsup.client.thinking import thinking_arguments

from ..failure import Failure, bad_field, bad_value
from ..fields import (
    Field,
    Use,
    add_to_template,
    check_fields,
    effort_arguments,
    hints,
    ignored,
    read_format,
    schema_format,
    think_arguments,
    used,
    whole_numbers,
)

RENAMED = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
}
"""The names of llama.cpp, Ollama, LM Studio and text-generation-inference."""

UNSET: Mapping[str, Any] = {
    "max_tokens": -1, "max_completion_tokens": -1, "n_predict": -1, "num_predict": -1,
    "top_k": -1, "seed": -1, "stop": "", "keep_alive": "",
}  # fmt: skip
"""Values that other servers take for none."""

NEUTRAL_ELSEWHERE = (
    *(
        Field(name, Use.NEUTRAL, "`response_format` takes a JSON schema or a regular expression")
        for name in ("grammar", "guided_grammar", "ebnf")
    ),
    *hints((True,), "skip_special_tokens", "spaces_between_special_tokens"),
    *hints((False,), "include_stop_str_in_output", "no_stop_trim", "return_token_ids",
           "return_tokens_as_token_ids", "use_beam_search"),
    *hints((1, 1.0), "length_penalty"),
    *hints((False,), "early_stopping"),
    *hints((1, 1.0), "typical_p"),
    *hints((0,), "mirostat"),
    *hints((0, 0.0), "dry_multiplier"),
    *ignored("cache_prompt", "id_slot", "request_id", "cache_salt", "trace", "session_id"),
)  # fmt: skip
"""Fields of other servers with the values that change nothing."""

NEUTRAL_IN_CHATS = (
    used("add_generation_prompt", "false is `continue_final_message: true`", bool),
    Field("echo", Use.NEUTRAL, "the answer does not repeat the prompt", (False,)),
    Field("best_of", Use.NEUTRAL, "use `n` and choose among the answers", (1,)),
    *hints((True,), "include_reasoning", "separate_reasoning", "stream_reasoning"),
)

REASONING_FIELDS = (
    used("effort"),
    used("enabled"),
    *hints((False,), "exclude"),
    *ignored("summary", "generate_summary"),
)
"""Fields of OpenRouter's `reasoning`."""

_META = re.compile(r"[\\.+*?()|\[\]{}^$]")


def translate(body: Mapping[str, Any], unread: list[str], *, is_chat: bool) -> dict[str, Any]:
    """Return the fields of a request that are set, under the names that they have here.

    Args:
        body: of the request.
        unread: gets the paths of fields of a format or of `reasoning` that are not known.
        is_chat: true if a chat template gets what the request says about reasoning.

    Raises:
        Failure: a field is wrong, or two of them contradict each other.
    """
    given = {
        name: value
        for name, value in body.items()
        if value is not None and not (name in UNSET and _is_same(value, UNSET[name]))
    }
    for theirs, ours in RENAMED.items():
        if theirs in given:
            value = given.pop(theirs)
            if given.setdefault(ours, value) != value:
                raise bad_field(theirs, f"{theirs} and {ours} differ; send only one of them")
    if _is_same(given.get("top_p"), 0):  # only the likeliest token, as other servers have it
        del given["top_p"]
        given["top_k"] = 1
    whole_numbers(given)
    _translate_formats(given, unread)
    if is_chat:
        _translate_reasoning(given, unread)
    return given


def _is_same(value: Any, other: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float | str) and value == other


# ---------------------------------------------------------------- reasoning


def _translate_reasoning(given: dict[str, Any], unread: list[str]) -> None:
    if isinstance(whole := given.get("reasoning"), dict):
        check_fields(whole, REASONING_FIELDS, unread, within="reasoning")
    extra: dict[str, Any] = {}
    switches: dict[str, bool] = {}
    for name in ("reasoning_effort", "enable_thinking", "think", "thinking", "reasoning"):
        if name in given:
            said = _reasoning_of(name, given.pop(name))
            if "enable_thinking" in said:
                switches[name] = said["enable_thinking"]
            extra = {**said, **extra}
    if len(set(switches.values())) > 1:
        *_, name = switches
        raise bad_field(name, f"{' and '.join(switches)} contradict each other: send one of them")
    if False in switches.values() and extra.get("reasoning_effort") != "none":
        extra.pop("reasoning_effort", None)  # there is nothing that it could be the effort of
    add_to_template(given, extra)


def _reasoning_of(name: str, value: Any) -> dict[str, Any]:
    if name == "think":
        return think_arguments(value, name)
    match value:
        case _ if name == "reasoning_effort":
            return effort_arguments(value, name)
        case bool():
            return thinking_arguments(thinks=value)
        case {"type": "enabled" | "adaptive" | "auto" | "disabled" as kind} if name == "thinking":
            return thinking_arguments(thinks=kind != "disabled")
        case {"enabled": bool(thinks), **rest} if name == "reasoning":
            effort = rest.get("effort")
            more = effort_arguments(effort, "reasoning.effort") if effort is not None else {}
            return {**thinking_arguments(thinks=thinks), **more}
        case {"effort": effort} if name == "reasoning" and effort is not None:
            return effort_arguments(effort, "reasoning.effort")
        case dict() if name == "reasoning" and value.get("enabled") is None:
            return {}
    raise bad_value(name, _EXPECTED[name], value)


_EXPECTED = {
    "enable_thinking": "true or false",
    "thinking": 'an object with a type: "enabled" or "disabled"',
    "reasoning": "an object with effort or enabled",
}


# ---------------------------------------------------------------- formats


def _translate_formats(given: dict[str, Any], unread: list[str]) -> None:
    """Replace every way to ask for a format by `response_format`."""
    forms: dict[str, dict[str, Any]] = {}
    for name, read in _FORMATS.items():
        if name in given:
            forms[name] = read(name, given.pop(name))
    several = given.pop("structured_outputs", {})
    if not isinstance(several, dict):
        raise bad_value("structured_outputs", "an object", several)
    for part, value in several.items():
        path = f"structured_outputs.{part[:64]}"
        if value is None or part in _HINTS:
            continue
        if part not in _STRUCTURED:
            raise bad_field(path, f"{path} has no effect here: ask for {', '.join(_STRUCTURED)}")
        forms[path] = _STRUCTURED[part](path, value)
    if "response_format" in given:
        form = given["response_format"]
        forms["response_format"] = read_format(form, "response_format", unread)
    if len(forms) > 1:
        *_, name = forms
        raise bad_field(name, f"{' and '.join(forms)} are both set; send only one format")
    if forms:
        (given["response_format"],) = forms.values()


def _schema(path: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _no_schema(path) from None
    match value:
        case {"schema": dict(schema)} if "name" in value:  # as OpenAI wraps it
            return schema_format(schema)
        case dict():
            return schema_format(value)
    raise _no_schema(path)


def _no_schema(path: str) -> Failure:
    return bad_field(path, f"{path} must be a JSON schema")


def _regex(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value:
        raise bad_field(path, f"{path} must be a regular expression")
    return {"type": "regex", "regex": value}


def _choice(path: str, value: Any) -> dict[str, Any]:
    is_list = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    if not is_list:
        raise bad_field(path, f"{path} must be a list of texts")
    if "" in value:
        raise bad_field(path, f"{path} must not have an empty text")
    return _regex(path, "|".join(_META.sub(r"\\\g<0>", one) for one in value))


def _any_json(path: str, value: Any) -> dict[str, Any]:
    if value is not True:
        raise bad_value(path, "true", value)
    return {"type": "json_object"}


Reader = Callable[[str, Any], dict[str, Any]]

_FORMATS: Mapping[str, Reader] = {
    "guided_json": _schema,
    "json_schema": _schema,
    "guided_regex": _regex,
    "regex": _regex,
    "guided_choice": _choice,
}
"""The names of vLLM, SGLang and llama.cpp."""

_STRUCTURED: Mapping[str, Reader] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "json_object": _any_json,
}
"""The parts of vLLM's `structured_outputs`."""

_HINTS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties",
          "whitespace_pattern", "_backend")  # fmt: skip
"""Parts of it that say how a format is kept to, and not which."""
