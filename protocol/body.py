"""A request's body: the prompt and how to answer it. Only the worker reads it.

The client checks a body before it sends it and the worker checks it again before it acts on it,
with the same code, so both name the same parameter and the same range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import check_encodable, invalid, unfit, unknown
from .parameters import (
    LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    MOST_TOKENS,
    NOT_SUPPORTED,
    NUMBERS,
    SAMPLING,
)
from .pictures import check_pictures, pictures_of
from .states import AnswerForm
from .tool_choice import ToolChoice, read_tool_choice

INPUTS = ("prompt", "prompt_tokens", "messages")

RESERVED_TEMPLATE_NAMES = frozenset(
    {
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
    }
)
"""Names that the worker or the template library itself gives to a template."""

FORMAT_EXPECTED = (
    'a map of type "json_schema" (with json_schema, which has a schema), "json_object", "regex"'
    ' (with regex) or "text"'
)

TEXT_FORMAT = {"type": "text"}
_FORMS = {
    "text": AnswerForm.TEXT,
    "regex": AnswerForm.REGEX,
    "json_object": AnswerForm.JSON,
    "json_schema": AnswerForm.JSON,
}

_FLAGS = (
    "messages_as_text", "cap_max_tokens", "ignore_eos", "logprobs", "echo",
    "continue_final_message",
)  # fmt: skip

TOKENIZE = ("ids", "add_special_tokens", "add_generation_prompt")
"""The names in `tokenize`."""

MAX_SHOWN_IDS = 2**20
"""Of one prompt: half of what a client may leave unread."""

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """The request of a client to an engine. Exactly one of the three inputs is given.

    A field that is None was left out: the model's entry or `parameters.NUMBERS` gives its default.
    docs/http-api.md describes each in more detail.

    Attributes:
        prompt: text, tokenised as it is.
        prompt_tokens: token ids, used as they are.
        messages: a chat, rendered with the model's template; each has `role` and `content`, which
            may be None, text, or a list of texts and pictures (see `pictures`).
        messages_as_text: whether a model without a chat template continues the text of the
            messages; otherwise it refuses them.
        max_tokens: how many tokens to generate at most; None for as many as fit into the context;
            0 to be shown the prompt alone, or nothing.
        cap_max_tokens: whether a `max_tokens` that does not fit into the context means as many as
            fit; otherwise it is refused.
        min_tokens: the answer does not end before it has this many tokens.
        sampling: the given fields of `parameters.Sampling`, by name; on the wire they are next to
            the other parameters.
        logit_bias: added to the logits, by token id (a number, or its decimal digits as text).
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: tokens that end the answer; they are not part of it.
        ignore_eos: whether to continue past the model's own end-of-text tokens.
        seed: makes sampling repeatable; drawn at admission if absent.
        logprobs: whether to return how likely each token was.
        top_logprobs: for how many of the likeliest tokens at each position to return it as well.
        prompt_logprobs: how likely each token of the prompt was is shown before the answer, and so
            many of the likeliest in its place.
        echo: whether the text of the prompt is shown before the answer.
        tools: what the model may call, in OpenAI's form; given to the template. A function with
            `strict` is called with arguments by its schema alone.
        tool_choice: `auto`; `none` to answer as if there were no tools; `required`, a function or
            `allowed_tools`, in OpenAI's form, for an answer that is a call.
        chat_template_kwargs: further arguments for the template, by name.
        continue_final_message: whether the answer continues the last message, if that is a text of
            the assistant; None: it does, unless it must have a form. False: it begins a new turn.
        response_format: what the answer must look like: `{"type": "json_schema", "json_schema":
            {"schema": …}}`, `{"type": "json_object"}`, `{"type": "regex", "regex": …}`, or
            `{"type": "text"}`.
        tokenize: the tokens of the prompt are the answer: nothing is computed, the prompt may be
            longer than the context, and what says how to answer has no effect. By name, all true
            unless given: `ids` (show them, at most `MAX_SHOWN_IDS`), `add_special_tokens` (a text
            begins with the begin-of-text token, if the model has one) and `add_generation_prompt`
            (a chat ends with what opens an answer).
    """

    prompt: str | None = None
    prompt_tokens: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    messages_as_text: bool | None = None
    max_tokens: int | None = None
    cap_max_tokens: bool | None = None
    min_tokens: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    logit_bias: dict[Any, float] | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    response_format: dict[str, Any] | None = None
    tokenize: dict[str, bool] | None = None

    def __post_init__(self) -> None:
        given = [name for name in INPUTS if getattr(self, name) is not None]
        if len(given) != 1:
            has = f"{' and '.join(given)} are given" if given else "none is given"
            raise unfit("prompt", f"give exactly one of prompt, prompt_tokens and messages; {has}")
        self._check_input()
        self._check_parameters()

    def _check_input(self) -> None:
        if self.prompt is not None:
            if not isinstance(self.prompt, str):
                raise invalid("prompt", "a string", self.prompt)
            if not self.prompt and self.tokenize is None:
                raise invalid("prompt", "text of at least one character", shown="an empty string")
            check_encodable("prompt", self.prompt)
        elif self.prompt_tokens is not None:
            tokens = self.prompt_tokens
            if not isinstance(tokens, list):
                raise invalid("prompt_tokens", "a list of integers", tokens)
            _check_integers("prompt_tokens", tokens)
            if not tokens and self.tokenize is None:
                raise invalid(
                    "prompt_tokens", "a list of at least one token id", shown="an empty list"
                )
            _check_ids("prompt_tokens", tokens)
        elif not isinstance(self.messages, list):
            raise invalid("messages", "a list of messages", self.messages)
        elif not self.messages:
            raise invalid("messages", "a list of at least one message", shown="an empty list")
        else:
            for message in self.messages:
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise invalid("messages", "maps with a role (text) and its content", message)
            check_pictures(self.messages)

    def _check_parameters(self) -> None:
        for name, number in NUMBERS.items():
            value = self.sampling.get(name) if name in SAMPLING else getattr(self, name)
            if value is not None and not number.is_right(value):
                raise invalid(name, number.expected, value)
        for name in _FLAGS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise invalid(name, "true or false", value)
        least, most = self.min_tokens, self.max_tokens
        if least is not None and most is not None and least > most:
            raise invalid("min_tokens", "at most max_tokens", least)
        is_shown = self.shows_prompt or self.tokenize is not None
        if most == 0 and self.messages is not None and not is_shown:
            raise invalid("max_tokens", f"an integer from 1 to {MOST_TOKENS} in a chat", most)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "0 unless logprobs is true", self.top_logprobs)
        self._check_stop()
        self._check_stop_token_ids()
        self._check_logit_bias()
        if self.response_format is not None and not _is_format(self.response_format):
            raise invalid("response_format", FORMAT_EXPECTED, self.response_format)
        tokenize = self.tokenize
        if tokenize is not None and not (
            isinstance(tokenize, dict)
            and all(
                name in TOKENIZE and isinstance(is_on, bool) for name, is_on in tokenize.items()
            )
        ):
            expected = f"a map of {', '.join(TOKENIZE)}, each true or false"
            raise invalid("tokenize", expected, tokenize)
        self._check_template()

    def _check_stop(self) -> None:
        stop = self.stop
        if stop is None:
            return
        if not isinstance(stop, list):
            raise invalid("stop", "a list of strings", stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                shown = "an empty string" if text == "" else ""
                raise invalid("stop", "strings of at least one character", text, shown=shown)
        if len(stop) > MAX_STOP_STRINGS or any(len(s) > MAX_STOP_LENGTH for s in stop):
            raise invalid(
                "stop",
                f"at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters",
                shown=f"{len(stop)} strings, the longest of {max(map(len, stop))}",
            )
        for text in stop:
            check_encodable("stop", text)

    def _check_stop_token_ids(self) -> None:
        tokens = self.stop_token_ids
        if tokens is None:
            return
        expected = f"a list of at most {MAX_STOP_TOKEN_IDS} token ids"
        if not isinstance(tokens, list):
            raise invalid("stop_token_ids", expected, tokens)
        _check_integers("stop_token_ids", tokens)
        if len(tokens) > MAX_STOP_TOKEN_IDS:
            raise invalid("stop_token_ids", expected, shown=f"a list of {len(tokens)}")
        _check_ids("stop_token_ids", tokens)

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        expected = f"a map of at most {MAX_LOGIT_BIASES} token ids"
        if not isinstance(bias, dict):
            raise invalid("logit_bias", expected, bias)
        if len(bias) > MAX_LOGIT_BIASES:
            raise invalid("logit_bias", expected, shown=f"a map of {len(bias)}")
        for key, value in bias.items():
            if not _is_token_id(key):
                raise invalid("logit_bias", "a map with token ids as keys", shown=repr(key)[:40])
            if not LOGIT_BIAS.is_right(value):
                subject = "each value in logit_bias"
                raise invalid("logit_bias", LOGIT_BIAS.expected, value, subject=subject)

    def _check_template(self) -> None:
        tools, extra = self.tools, self.chat_template_kwargs
        if tools is not None and not isinstance(tools, list):
            raise invalid("tools", "a list of tools", tools)
        for tool in tools or ():
            if not _is_tool(tool):
                form = (
                    '{"type": "function", "function": {"name": …, "parameters": a JSON schema}}'
                    " for each tool"
                )
                shown = "another map" if isinstance(tool, dict) else ""
                raise invalid("tools", form, tool, shown=shown)
        for tool in tools or ():
            strict = tool["function"].get("strict")
            if strict is not None and not isinstance(strict, bool):
                subject = f"strict of the tool {tool['function']['name'][:64]!r}"
                raise invalid("tools", "true or false", strict, subject=subject)
        called = Counter(tool["function"]["name"] for tool in tools or ())
        if called and max(called.values()) > 1:
            [(twice, _)] = called.most_common(1)
            raise unfit("tools", f"tools must have names of their own; two are {twice[:64]!r}")
        form = self.form  # raises if `tool_choice` cannot be read
        if form is not AnswerForm.TEXT and self.continue_final_message:
            name = "tool_choice" if self.choice.is_forced else "response_format"
            raise unfit(
                name,
                f"{name} needs an answer of its own, and continue_final_message asks for the rest"
                " of another one: send only one of them",
            )
        if self.continue_final_message and not self.continues:
            raise unfit(
                "continue_final_message",
                "continue_final_message needs a chat that ends with a text of the assistant",
            )
        if self.messages_as_text and self.messages is None:
            raise unfit("messages_as_text", "messages_as_text needs messages")
        if extra is None:
            return
        if not isinstance(extra, dict) or not all(isinstance(name, str) for name in extra):
            raise invalid("chat_template_kwargs", "a map with names as keys", extra)
        if taken := sorted(RESERVED_TEMPLATE_NAMES & extra.keys()):
            raise unfit(
                "chat_template_kwargs",
                f"chat_template_kwargs cannot set {', '.join(taken)}: mlxsup sets it",
            )
        if self.messages is None:
            raise unfit("chat_template_kwargs", "chat_template_kwargs needs messages")

    def bias_by_token(self) -> dict[int, float]:
        """`logit_bias` with its keys as numbers; empty if absent."""
        return {int(key): float(value) for key, value in (self.logit_bias or {}).items()}

    @property
    def picture_bytes(self) -> int:
        """Return the length of the files of all pictures in the messages."""
        return sum(len(part["data"]) for _, _, part in pictures_of(self.messages or ()))

    @property
    def shows_prompt(self) -> bool:
        """True if something of the prompt is shown before the answer."""
        return self.echo is True or self.prompt_logprobs is not None or self.shows_ids

    @property
    def shows_ids(self) -> bool:
        """True if the ids of the prompt are the answer."""
        return self.tokenize is not None and self.tokenizes("ids")

    def tokenizes(self, name: str) -> bool:
        """True unless `tokenize` says otherwise of this name."""
        return (self.tokenize or {}).get(name, True)

    @property
    def choice(self) -> ToolChoice:
        """Return which functions the answer may call, and whether it must call one."""
        return read_tool_choice(
            self.tool_choice, [one["function"]["name"] for one in self.tools or ()]
        )

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message, a text of the assistant's.

        An answer in a form begins a new turn: agents ask for the outcome of a conversation that
        the model has ended in words of its own.
        """
        can_continue = self.form is AnswerForm.TEXT and self.tokenizes("add_generation_prompt")
        if not self.messages or not can_continue or self.continue_final_message is False:
            return False
        last = self.messages[-1]
        content = last.get("content")
        is_said = bool(content.strip() if isinstance(content, str) else content)
        return last["role"] == "assistant" and is_said and not last.get("tool_calls")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the model is shown, without `strict`, which is no part of a
        description; None if the answer may call none."""
        if not self.choice.names:
            return None
        return [_without_strict(tool) for tool in self.tools or ()]

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the answer may call."""
        names = self.choice.names
        return [one for one in self.tools or () if one["function"]["name"] in names]

    @property
    def may_call(self) -> bool:
        """True if the answer may be a call, and need not be one."""
        return bool(self.callable_tools) and not self.choice.is_forced

    @property
    def strict_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the answer may call with arguments by their schema alone."""
        return [one for one in self.callable_tools if one["function"].get("strict")]

    @property
    def form(self) -> AnswerForm:
        """Return the form that the content of the answer must have."""
        if self.choice.is_forced:
            return AnswerForm.CALL
        kind = self.response_format["type"] if self.response_format is not None else "text"
        return _FORMS[kind]

    def parameters(self) -> dict[str, Any]:
        """Return the fields that say how to answer, by name: all but the seed, the prompt's inputs,
        and those that are None."""
        left_out = (*INPUTS, "messages_as_text", "seed", "chat_template_kwargs",
                    "continue_final_message")  # fmt: skip
        return {name: value for name, value in self.to_wire().items() if name not in left_out}

    @classmethod
    def accepted(
        cls, prompt_tokens: list[int], parameters: dict[str, Any], seed: int
    ) -> RequestBody:
        """Return the body of a request that was accepted earlier, from what `parameters` returned
        then.

        Raises:
            RemoteError: `invalid_request`; another version of mlxsup had accepted it.
        """
        return cls.from_wire({**parameters, "prompt_tokens": prompt_tokens, "seed": seed})

    def to_wire(self) -> dict[str, Any]:
        """Return the map to send: the fields that were given, in their order."""
        wire = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        wire |= wire.pop("sampling")
        return _with_text_keys(wire)

    @classmethod
    def from_wire(cls, value: object) -> RequestBody:
        """Read what a client sent.

        Raises:
            RemoteError: `invalid_request`, naming the parameter and what was expected.
        """
        if not isinstance(value, dict):
            raise invalid("body", "a map", value)
        value = {name: item for name, item in value.items() if item is not None}
        known = {*(f.name for f in fields(cls) if f.name != "sampling"), *SAMPLING}
        for name in value:
            if name in NOT_SUPPORTED:
                raise unfit(name, f"{name} is not supported: {NOT_SUPPORTED[name]}")
            if name not in known:
                raise unknown(name, known)
        sampling = {name: value[name] for name in SAMPLING if name in value}
        others = {name: item for name, item in value.items() if name not in SAMPLING}
        return cls(sampling=sampling, **others)


def _is_format(value: object) -> bool:
    match value:
        case {"type": "text" | "json_object", **rest}:
            return not rest
        case {"type": "regex", "regex": str(regex), **rest}:
            return bool(regex) and not rest
        case {"type": "json_schema", "json_schema": {"schema": dict()}, **rest}:
            return not rest
    return False


def _is_tool(tool: object) -> bool:
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}}:
            return bool(name) and isinstance(rest.get("parameters"), dict | None)
    return False


def _without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _check_integers(parameter: str, tokens: list[int]) -> None:
    for token in tokens:
        if type(token) is not int:
            raise invalid(parameter, "integers", token)


def _check_ids(parameter: str, tokens: list[int]) -> None:
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < 2**32:
            raise invalid(parameter, "ids from 0 to 4294967295", token)


def _is_token_id(key: object) -> bool:
    if isinstance(key, str):
        return key.isascii() and key.isdigit() and len(key) <= 10
    return type(key) is int and 0 <= key < 2**32


def _with_text_keys(wire: dict[str, Any]) -> dict[str, Any]:
    """Convert keys to strings: maps on the wire have no other keys."""
    if "logit_bias" in wire:
        wire["logit_bias"] = {str(key): value for key, value in wire["logit_bias"].items()}
    return wire
