"""Every kind of bad body with the error it gets, and what the Python client alone must refuse."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.codec import MAX_BODY_BYTES
from mlxsup.protocol.errors import ErrorCode

from support.bad.input import (
    CONFIGURATION_KEYS,
    HELLO_BODY,
    LONE_SURROGATE,
    SMALL,
    SMALL_CONTEXT,
    BadBody,
    pack,
)


def _parameter(
    name: str, *, below: object, above: object, wrong: object, words: str, nan: bool = False
) -> list[BadBody]:
    values = [("below its range", below), ("above its range", above), ("of another type", wrong)]
    if nan:
        values += [("not a number (NaN)", float("nan")), ("infinite", float("inf"))]
    return [
        BadBody(
            name=f"`{name}` {what}",
            body={"prompt": "hello", name: value},
            words=f"{name} takes {words}",
            is_known_to_client=True,
        )
        for what, value in values
    ]


def _input(name: str, body: dict[str, Any], words: str, **more: Any) -> BadBody:
    return BadBody(name=name, body=body, words=words, is_known_to_client=True, **more)


_ONE_INPUT = "exactly one of prompt, prompt_tokens and messages"
_OVER = ErrorCode.CONTEXT_LENGTH_EXCEEDED
_NOT_MSGPACK = "the body is not msgpack within the limits"

BODIES = (
    BadBody(name="an empty body", body=b"", words=_NOT_MSGPACK),
    BadBody(name="a body that is no msgpack", body=b"\xc1\xc1", words=_NOT_MSGPACK),
    BadBody(name="a body cut short", body=HELLO_BODY[:-1], words=_NOT_MSGPACK),
    BadBody(name="bytes after the body", body=HELLO_BODY + b"\x00", words=_NOT_MSGPACK),
    BadBody(name="a body of 2000 lists inside each other", body=b"\x91" * 2000 + b"\xc0",
            words=_NOT_MSGPACK),
    BadBody(name="a text that is not UTF-8", body=b"\x81\xa6prompt\xa2\xff\xfe",
            words=_NOT_MSGPACK),
    BadBody(name="a body that is a list", body=pack([1]), words="body takes a map"),
    BadBody(name="a body over 8 MiB", body=bytes(MAX_BODY_BYTES + 1),
            words=f"at most {MAX_BODY_BYTES} bytes"),
    BadBody(name="an unknown parameter", body={"prompt": "hello", "colour": "blue"},
            words="unknown parameter 'colour'; known are"),
    *(
        BadBody(name=f"the configuration's key `{key}` in a body",
                body={"prompt": "hello", key: "/models/other"},
                words=f"unknown parameter '{key}'")
        for key in ("model", *CONFIGURATION_KEYS)
    ),
    _input("no input", {"max_tokens": 1}, f"{_ONE_INPUT}, not none of them"),
    _input("two inputs", {"prompt": "hello", "prompt_tokens": [72]},
           f"{_ONE_INPUT}, not prompt and prompt_tokens"),
    _input("`prompt` empty", {"prompt": ""}, "prompt takes at least one character"),
    _input("`prompt` of another type", {"prompt": 5}, "prompt takes a string"),
    _input("`prompt` of bytes", {"prompt": b"hello"}, "prompt takes a string, not bytes"),
    _input("`prompt_tokens` empty", {"prompt_tokens": []}, "at least one token id"),
    _input("`prompt_tokens` of another type", {"prompt_tokens": "72"}, "a list of integers"),
    _input("`prompt_tokens` with a text", {"prompt_tokens": [72, "x"]}, "integers, not text"),
    _input("`prompt_tokens` with a truth value", {"prompt_tokens": [True]}, "integers, not True"),
    _input("`prompt_tokens` below 0", {"prompt_tokens": [-1]}, "ids from 0 to 4294967295"),
    _input("`prompt_tokens` over 32 bits", {"prompt_tokens": [2**32]}, "ids from 0 to 4294967295"),
    BadBody(name="`prompt_tokens` outside the model's vocabulary", body={"prompt_tokens": [10**6]},
            words="prompt_tokens takes ids below"),
    _input("`messages` empty", {"messages": []}, "at least one message"),
    _input("`messages` of another type", {"messages": "hello"}, "a list of messages"),
    _input("`messages` with a text", {"messages": ["hello"]}, "maps with a role"),
    _input("`messages` without a role", {"messages": [{"content": "hi"}]}, "maps with a role"),
    _input("`messages` with a role that is no text", {"messages": [{"role": 1, "content": "hi"}]},
           "maps with a role"),
    *_parameter("max_tokens", below=0, above=2**31, wrong="8",
                words="an integer from 1 to 2147483647"),
    _input("`max_tokens` with a fraction", {"prompt": "hello", "max_tokens": 1.5},
           "max_tokens takes an integer"),
    *_parameter("min_tokens", below=-1, above=2**31, wrong="8",
                words="an integer from 0 to 2147483647"),
    _input("`min_tokens` above `max_tokens`",
           {"prompt": "hello", "min_tokens": 9, "max_tokens": 8}, "min_tokens takes at most"),
    *_parameter("temperature", below=-0.1, above=10.1, wrong="hot", nan=True,
                words="a number from 0 to 10"),
    *_parameter("top_p", below=0.0, above=1.1, wrong=[1], nan=True,
                words="a number above 0 and up to 1"),
    *_parameter("seed", below=-1, above=2**63, wrong=1.5,
                words="an integer from 0 to 9223372036854775807"),
    *_parameter("top_k", below=-1, above=2**31, wrong=1.5, words="an integer from 0"),
    *_parameter("min_p", below=-0.1, above=1.1, wrong="x", nan=True, words="a number from 0 to 1"),
    *_parameter("xtc_probability", below=-0.1, above=1.1, wrong="x", nan=True,
                words="a number from 0 to 1"),
    *_parameter("xtc_threshold", below=-0.1, above=0.6, wrong="x", nan=True,
                words="a number from 0 to 0.5"),
    *_parameter("repetition_penalty", below=0.0, above=10.1, wrong="x", nan=True,
                words="a number from 0.01 to 10"),
    *_parameter("presence_penalty", below=-2.1, above=2.1, wrong="x", nan=True,
                words="a number from -2 to 2"),
    *_parameter("frequency_penalty", below=-2.1, above=2.1, wrong="x", nan=True,
                words="a number from -2 to 2"),
    *_parameter("penalty_window", below=-1, above=2**31, wrong=1.5,
                words="an integer from 0"),
    _input("`logit_bias` of another type", {"prompt": "hello", "logit_bias": [1]}, "a map of"),
    _input("`logit_bias` out of range", {"prompt": "hello", "logit_bias": {"1": 101}},
           "a number from -100 to 100"),
    _input("`logprobs` of another type", {"prompt": "hello", "logprobs": 1}, "true or false"),
    *_parameter("top_logprobs", below=-1, above=21, wrong="x",
                words="an integer from 0 to 20"),
    _input("`tools` of another type", {"prompt": "hello", "tools": ["x"]}, "for each tool"),
    _input("`tool_choice` that requires a call of no tool",
           {"prompt": "hello", "tool_choice": "required"},
           "tool_choice takes tools to choose from"),
    _input("`tool_choice` that names a function that is not offered",
           {"prompt": "hello", "tool_choice": {"type": "function", "function": {"name": "f"}}},
           "tool_choice takes the name of one of the tools (there are none)"),
    _input("`chat_template_kwargs` of another type",
           {"prompt": "hello", "chat_template_kwargs": ["x"]}, "a map with names as keys"),
    _input("`response_format` of another type",
           {"prompt": "hello", "response_format": {"type": "poem"}}, "response_format takes"),
    _input("`stop` of another type", {"prompt": "hello", "stop": "end"}, "a list of strings"),
    _input("`stop` with an empty text", {"prompt": "hello", "stop": [""]},
           "of at least one character"),
    _input("`stop` with 17 texts", {"prompt": "hello", "stop": ["a"] * 17}, "at most 16 strings"),
    _input("`stop` with a text over 256 characters", {"prompt": "hello", "stop": ["a" * 257]},
           "at most 256 characters"),
    _input("`stop_token_ids` of another type", {"prompt": "hello", "stop_token_ids": 5},
           "a list of at most 64 token ids"),
    _input("`stop_token_ids` with a text", {"prompt": "hello", "stop_token_ids": ["a"]},
           "integers, not text"),
    _input("`stop_token_ids` below 0", {"prompt": "hello", "stop_token_ids": [-1]},
           "ids from 0 to 4294967295"),
    _input("`stop_token_ids` with 65 ids", {"prompt": "hello", "stop_token_ids": [5] * 65},
           "at most 64 token ids"),
    BadBody(name="`stop_token_ids` outside the model's vocabulary",
            body={"prompt": "hello", "stop_token_ids": [10**6]},
            words="stop_token_ids takes ids below"),
    _input("`messages_as_text` of another type", {"prompt": "hello", "messages_as_text": 1},
           "true or false"),
    _input("`messages_as_text` without messages", {"prompt": "hello", "messages_as_text": True},
           "messages_as_text takes messages"),
    _input("`cap_max_tokens` of another type", {"prompt": "hello", "cap_max_tokens": 1},
           "true or false"),
    _input("`ignore_eos` of another type", {"prompt": "hello", "ignore_eos": "yes"},
           "true or false"),
    BadBody(name="`n`", body={"prompt": "hello", "n": 2},
            words="n is not supported: send the request n times"),
    BadBody(name="`skip_special_tokens`", body={"prompt": "hello", "skip_special_tokens": True},
            words="skip_special_tokens is not supported"),
    BadBody(name="`min_tokens` that do not fit into the context",
            body={"prompt": "hello", "min_tokens": SMALL_CONTEXT}, model=SMALL, code=_OVER,
            words=f"min_tokens {SMALL_CONTEXT} exceed the context of {SMALL_CONTEXT}"),
    BadBody(name="a prompt longer than the context", body={"prompt": "y" * SMALL_CONTEXT},
            model=SMALL, code=_OVER,
            words=f"the prompt has {SMALL_CONTEXT} tokens; the context of {SMALL_CONTEXT}"),
    BadBody(name="prompt and `max_tokens` longer than the context",
            body={"prompt": "hello", "max_tokens": SMALL_CONTEXT}, model=SMALL, code=_OVER,
            words=f"exceed the context of {SMALL_CONTEXT}; at most {SMALL_CONTEXT - 5} fit"),
    BadBody(name="a chat that the model's template cannot render",
            body={"messages": [{"role": "user", "content": "[[tokenize raise]]"}]},
            words="the prompt could not be prepared: KeyError"),
)  # fmt: skip

# ---------------------------------------------------------------- only the Python client meets it

CLIENT_ONLY = (
    _input("`prompt` with a lone surrogate", {"prompt": LONE_SURROGATE}, "encoded as UTF-8"),
    _input("`stop` with a lone surrogate", {"prompt": "hello", "stop": [LONE_SURROGATE]},
           "encoded as UTF-8"),
    _input("`messages` with a lone surrogate",
           {"messages": [{"role": "user", "content": LONE_SURROGATE}]}, "cannot be encoded"),
    _input("`messages` with what msgpack cannot carry",
           {"messages": [{"role": "user", "content": {1, 2}}]}, "cannot be encoded"),
    _input("a body over 8 MiB", {"prompt": "y" * MAX_BODY_BYTES}, f"at most {MAX_BODY_BYTES}"),
    *(
        _input(f"`{name}` {what}", {"prompt": "hello", name: value}, f"{name} takes seconds")
        for name in ("timeout_s", "queue_timeout_s", "first_token_timeout_s")
        for what, value in (("below 0", -1), ("not a number (NaN)", float("nan")),
                            ("infinite", float("inf")), ("of another type", "5"))
    ),
    _input("`client` empty", {"prompt": "hello", "client": ""}, "client takes text of 1 to"),
    _input("`client` of another type", {"prompt": "hello", "client": 5}, "client takes text"),
    _input("`priority` that is no class", {"prompt": "hello", "priority": "urgent"},
           "priority takes one of interactive, normal, batch"),
    _input("`priority` of another type", {"prompt": "hello", "priority": 5},
           "priority takes one of"),
)  # fmt: skip
