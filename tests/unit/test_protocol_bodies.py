"""A request's body: the last value that is taken, the first that is refused, and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.body import RESERVED_TEMPLATE_NAMES, RequestBody
from mlxsup.protocol.codec import (
    decode_body,
    encode_body,
)
from mlxsup.protocol.errors import ErrorCode, RemoteError, invalid
from mlxsup.protocol.parameters import LOGIT_BIAS, NUMBERS, SAMPLING, sampling_defaults


def body(**values: Any) -> RequestBody:
    return RequestBody.from_wire({"prompt": "p"} | values)


def refusal(**values: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        RequestBody.from_wire(values)
    error = caught.value
    assert error.code is ErrorCode.INVALID_REQUEST
    assert error.detail["parameter"] in {*values, "prompt"}
    assert error.message.startswith(f"{error.detail['parameter']} takes {error.detail['expected']}")
    return error.message


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize("name", NUMBERS)
def test_both_ends_of_a_range_are_taken_C7(name: str) -> None:
    number = NUMBERS[name]
    ends = [number.high] if number.is_low_open else [number.low, number.high]
    beside: dict[str, Any] = {"logprobs": True} if name == "top_logprobs" else {}
    for value in ends:
        if name == "min_tokens":
            beside = {"max_tokens": max(1, int(value))}
        exact = int(value) if number.is_integer else value
        assert body(**beside, **{name: exact}).to_wire()[name] == exact


@pytest.mark.parametrize(
    "values",
    [
        {"stop": ["x" * 256] * 16},
        {"stop": []},
        {"stop_token_ids": list(range(64))},
        {"stop_token_ids": [0, 2**32 - 1]},
        {"logit_bias": dict.fromkeys(range(1024), 1.0)},
        {"logit_bias": {0: -100.0, 2**32 - 1: 100, "4294967295": 1.0, "0000000001": 1.0}},
        {"min_tokens": 8, "max_tokens": 8},
        {"top_logprobs": 0},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "regex", "regex": "a+"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"ignore_eos": True, "logprobs": False, "cap_max_tokens": True},
        {"prompt": None, "prompt_tokens": [0, 2**32 - 1]},
        {
            "prompt": None,
            "messages": [{"role": "user", "content": None}],
            "messages_as_text": True,
            "chat_template_kwargs": {"thinking": False},
        },
    ],
)
def test_what_is_just_right_is_taken_and_travels_C7(values: dict[str, Any]) -> None:
    made = body(**values)
    again = decode_body(encode_body(made))
    as_sent = {
        name: {str(key): one for key, one in value.items()} if name == "logit_bias" else value
        for name, value in values.items()
    }
    for name, value in as_sent.items():
        assert again.to_wire().get(name) == value


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt": "a", "messages": [1]}, "prompt takes exactly one of prompt, prompt_tokens and"
         " messages, not prompt and messages"),
        ({}, "prompt takes exactly one of prompt, prompt_tokens and messages, not none of them"),
        ({"prompt": b"a"}, "prompt takes a string, not bytes"),
        ({"prompt": ""}, "prompt takes at least one character, not an empty string"),
        ({"prompt": "\ud83e"}, "prompt takes text that can be encoded as UTF-8, not lone surr"),
        ({"prompt_tokens": (1,)}, "prompt_tokens takes a list of integers, not a tuple"),
        ({"prompt_tokens": [1, True]}, "prompt_tokens takes integers, not True"),
        ({"prompt_tokens": []}, "prompt_tokens takes at least one token id, not an empty list"),
        ({"prompt_tokens": [5, 2**32]}, "prompt_tokens takes ids from 0 to"
         " 4294967295, not 4294967296"),
        ({"prompt_tokens": [5, -1]}, "prompt_tokens takes ids from 0 to 4294967295, not -1"),
        ({"messages": {}}, "messages takes a list of messages, not a map"),
        ({"messages": []}, "messages takes at least one message, not an empty list"),
        ({"messages": ["x"]}, "messages takes maps with a role (text) and its content, not text"),
        ({"messages": [{"role": 1}]}, "messages takes maps with a role (text) and its content"),
        ({"prompt": "p", "stop": "x"}, "stop takes a list of strings, not text"),
        ({"prompt": "p", "stop": ["x", ""]}, "stop takes strings of at least one character, not an"
         " empty string"),
        ({"prompt": "p", "stop": ["x", 1]}, "stop takes strings of at least one character, not 1"),
        ({"prompt": "p", "stop": ["ab"] * 17}, "stop takes at most 16 strings of at most 256"
         " characters, not 17 strings, the longest of 2"),
        ({"prompt": "p", "stop": ["x" * 257]}, "stop takes at most 16 strings of at most 256"
         " characters, not 1 strings, the longest of 257"),
        ({"prompt": "p", "stop": ["\ud83e"]}, "stop takes text that can be encoded as UTF-8"),
        ({"prompt": "p", "logit_bias": {2**32: 1.0}}, "logit_bias takes token ids as keys, not 42"),
        ({"prompt": "p", "logit_bias": {"00000000001": 1}}, "logit_bias takes token ids as"
         " keys, not '00000000001'"),
        ({"prompt": "p", "logit_bias": {"": 1}}, "logit_bias takes token ids as keys, not ''"),
        ({"prompt": "p", "logit_bias": {-1: 1}}, "logit_bias takes token ids as keys, not -1"),
        ({"prompt": "p", "logit_bias": {True: 1}}, "logit_bias takes token ids as keys, not True"),
        ({"prompt": "p", "logit_bias": {"٣": 1}}, "logit_bias takes token ids as keys, not '٣'"),
        ({"prompt": "p", "logit_bias": {1: "x"}}, "logit_bias takes a number from -100 to 100 for"
         " each token, not text"),
        ({"prompt": "p", "tools": {}}, "tools takes a list of tools, not a map"),
        ({"prompt": "p", "tools": [{"type": "function", "function": {"name": ""}}]},
         'tools takes {"type": "function", "function": {"name": …}} for each tool, not another m'),
        ({"prompt": "p", "tools": [{"type": "tool", "function": {"name": "f"}}]}, "tools takes {"),
        ({"prompt": "p", "tools": [1]}, 'tools takes {"type": "function", "function": {"name": …}}'
         " for each tool, not 1"),
        ({"prompt": "p", "chat_template_kwargs": []}, "chat_template_kwargs takes a map with names"
         " as keys, not a list"),
        ({"prompt": "p", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs takes messages"
         " for the template, not none of them"),
        ({"prompt": "p", "response_format": "json"}, 'response_format takes a map of type'
         ' "json_schema" (with json_schema, which has a schema), "json_object", "regex" (with'
         ' regex) or "text", not text'),
        ({"prompt": "p", "response_format": {"type": "text", "x": 1}}, "response_format takes"),
        ({"prompt": "p", "response_format": {"type": "regex", "regex": ""}}, "response_format"),
        ({"prompt": "p", "response_format": {"type": "regex", "regex": "a", "x": 1}}, "response_f"),
        ({"prompt": "p", "response_format": {"type": "json_schema", "json_schema": {}}}, "respons"),
        ({"prompt": "p", "response_format": {"type": "json_schema", "x": 1,
          "json_schema": {"schema": {}}}}, "response_format takes"),
        ({"prompt": "p", "min_tokens": 9, "max_tokens": 8}, "min_tokens takes at most max_tokens,"
         " not 9"),
        ({"prompt": "p", "top_logprobs": 2}, "top_logprobs takes 0 unless logprobs is true, not 2"),
        ({"prompt": "p", "ignore_eos": 1}, "ignore_eos takes true or false, not 1"),
        ({"prompt": "p", "stop_token_ids": ["x"]}, "stop_token_ids takes integers, not text"),
        ({"prompt": "p", "stop_token_ids": [1, True]}, "stop_token_ids takes integers, not True"),
        ({"prompt": "p", "stop_token_ids": [2**32]}, "stop_token_ids takes ids from 0 to"
         " 4294967295, not 4294967296"),
        ({"prompt": "p", "stop_token_ids": [-1]}, "stop_token_ids takes ids from 0 to"
         " 4294967295, not -1"),
        ({"prompt": "p", "stop_token_ids": [1] * 65}, "stop_token_ids takes a list of at most 64"
         " token ids, not a list of 65"),
        ({"prompt": "p", "logit_bias": []}, "logit_bias takes a map of at most 1024 token ids, not"
         " a list"),
        ({"prompt": "p", "stop_token_ids": {}}, "stop_token_ids takes a list of at most 64"
         " token ids, not a map"),
        ({"prompt": "p", "logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias takes a map of"
         " at most 1024 token ids, not a map of 1025"),
        ({"prompt": "p", "seed": 2**63}, f"seed takes an integer from 0 to {2**63 - 1}, not"),
        ({"prompt": "p", "top_p": 0}, "top_p takes a number above 0 and up to 1, not 0"),
        ({"prompt": "p", "xtc_threshold": 0.51}, "xtc_threshold takes a number from 0 to 0.5"),
    ],
)  # fmt: skip
def test_what_is_just_wrong_is_refused_by_name_C7(values: dict[str, Any], words: str) -> None:
    assert refusal(**values).startswith(words)


OURS = (
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
)


@pytest.mark.parametrize("name", OURS)
def test_what_mlxsup_says_to_templates_itself_is_not_taken_C7(name: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    said = refusal(messages=messages, chat_template_kwargs={name: 1, "other": 2})
    assert said == f"chat_template_kwargs takes names that are not mlxsup's own, not {name}"


def test_all_names_that_are_not_taken_are_said_C7() -> None:
    said = refusal(
        messages=[{"role": "user", "content": "x"}],
        chat_template_kwargs={"tools": 1, "other": 2, "messages": 3},
    )
    assert said.endswith(", not messages, tools")
    assert len(RESERVED_TEMPLATE_NAMES) == len(OURS)


def test_a_refusal_shows_numbers_and_kinds_and_no_text() -> None:
    shown = [1.5, None, True, "secret", ["secret"], {"secret": 1}, b"secret", ("secret",)]
    said = [invalid("x", "y", value).message.removeprefix("x takes y, not ") for value in shown]
    assert said == ["1.5", "None", "True", "text", "a list", "a map", "bytes", "a tuple"]
    assert invalid("x", "y", 10**60).message == "x takes y, not 1" + 39 * "0"
    assert invalid("x", "y").detail == {"parameter": "x", "expected": "y"}


def test_an_unknown_parameter_is_shown_shortened_with_all_that_are_known() -> None:
    with pytest.raises(RemoteError) as caught:
        RequestBody.from_wire({"prompt": "p", "c" * 100: 1})
    assert caught.value.detail == {"parameter": "c" * 64}
    assert caught.value.message == (
        f"unknown parameter {'c' * 64!r}; known are cap_max_tokens, chat_template_kwargs,"
        " frequency_penalty, ignore_eos, logit_bias, logprobs, max_tokens, messages,"
        " messages_as_text, min_p,"
        " min_tokens, penalty_window, presence_penalty, prompt, prompt_tokens, repetition_penalty,"
        " response_format, seed, stop, stop_token_ids, temperature, tool_choice, tools, top_k,"
        " top_logprobs, top_p, xtc_probability, xtc_threshold"
    )


def test_sampling_as_one_map_is_no_parameter() -> None:
    with pytest.raises(RemoteError, match=r"^unknown parameter 'sampling'; known are "):
        RequestBody.from_wire({"prompt": "p", "sampling": {"top_k": 1}})


def test_a_body_that_is_no_map_is_refused() -> None:
    with pytest.raises(RemoteError, match=r"^body takes a map, not a list$"):
        RequestBody.from_wire([])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("n", "send the request n times with different seeds; one batch answers them"),
        ("skip_special_tokens", "the text leaves out end-of-text tokens and the markers of an"
         " answer's parts, and shows every other token; to leave out more, use the ids in"
         " token_ids"),
    ],
)  # fmt: skip
def test_a_parameter_of_other_servers_is_refused_with_what_to_do_instead(
    name: str, words: str
) -> None:
    with pytest.raises(RemoteError) as caught:
        RequestBody.from_wire({"prompt": "p", name: 2})
    assert caught.value.message == f"{name} is not supported: {words}"
    assert caught.value.detail == {"parameter": name}


def test_long_words_are_shown_shortened_to_forty_characters() -> None:
    for name, value in (("tool_choice", "c" * 50), ("logit_bias", {"c" * 50: 1.0})):
        assert refusal(prompt="p", **{name: value}).endswith(", not '" + "c" * 39)


def test_a_tool_choice_says_which_there_are_and_what_to_ask_with_instead() -> None:
    expected = (
        'tool_choice takes "auto" or "none" (for an answer that must be a call, ask with'
        " response_format for its arguments), not "
    )
    assert refusal(prompt="p", tool_choice="required") == f"{expected}'required'"
    assert refusal(prompt="p", tool_choice={"type": "function"}) == f"{expected}a map"


def test_a_request_was_accepted_with_all_but_its_input_and_seed() -> None:
    asked = body(seed=5, max_tokens=3, logit_bias={7: 1.0}, stop=["x"])
    assert asked.parameters() == {"max_tokens": 3, "logit_bias": {"7": 1.0}, "stop": ["x"]}
    chat = [{"role": "user", "content": "x"}]
    told = body(prompt=None, messages=chat, chat_template_kwargs={"thinking": True}, top_k=2)
    assert told.parameters() == {"top_k": 2}
    again = RequestBody.accepted([1, 2], asked.parameters(), 9)
    assert (again.prompt_tokens, again.seed, again.max_tokens) == ([1, 2], 9, 3)
    assert again.bias_by_token() == {7: 1.0}
    assert body().bias_by_token() == {}


def test_only_what_a_models_entry_may_set_has_a_title_and_a_unit() -> None:
    others = [*(number for name, number in NUMBERS.items() if name not in SAMPLING), LOGIT_BIAS]
    assert {(number.says, number.unit) for number in others} == {("", "")}
    assert all(number.says and number.unit for number in SAMPLING.values())


def test_sampling_is_what_decides_which_token_is_taken() -> None:
    defaults = sampling_defaults()
    assert list(defaults) == list(SAMPLING)
    assert defaults == {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "xtc_probability": 0.0,
        "xtc_threshold": 0.1, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "penalty_window": 20,
    }  # fmt: skip


def test_how_the_prompt_was_made_does_not_matter_to_an_answer_that_continues() -> None:
    said = [{"role": "user", "content": "x"}]
    asked = body(
        prompt=None,
        messages=said,
        messages_as_text=True,
        chat_template_kwargs={"thinking": False},
        max_tokens=7,
    )
    assert RequestBody.accepted([1, 2], asked.parameters(), 3) == RequestBody(
        prompt_tokens=[1, 2], max_tokens=7, seed=3
    )
