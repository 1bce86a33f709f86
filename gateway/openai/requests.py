"""What a request in OpenAI's form asks of the daemon. Pure: a map in, an `Ask` out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.errors import invalid

from .. import limits
from ..ask import Ask
from ..failure import bad_field, bad_value
from ..fields import check_fields, read_keep_alive, read_model
from ..pictures import name_details
from .fields import CHAT_FIELDS, COMPLETION_FIELDS
from .messages import read_messages, read_tools
from .synonyms import translate

COMPLETION_TOKENS = 16
"""What OpenAI generates for a completion that does not say how much."""

MAX_TOP_LOGPROBS = 20


def read_chat(body: dict[str, Any]) -> Ask:
    """Read the body of a chat completion.

    Raises:
        Failure: a field is missing, unknown or of another type; `param` names it.
    """
    unread: list[str] = []
    given = check_fields(translate(body, unread, is_chat=True), CHAT_FIELDS, unread)
    model = read_model(given)
    name_details(given.get("messages"), "messages", unread)
    messages = read_messages(given.pop("messages", []))
    older, newer = given.pop("max_tokens", None), given.pop("max_completion_tokens", None)
    if older is not None and newer is not None and older != newer:
        raise bad_field(
            "max_tokens", "max_tokens and max_completion_tokens differ; send only one of them"
        )
    least = 0 if "prompt_logprobs" in given else 1
    if newer is not None and (type(newer) is not int or newer < least):
        name = "max_completion_tokens"
        raise bad_field(name, invalid(name, f"an integer of {least} or more", newer).message)
    customs: list[str] = []
    if "tools" in given:
        given["tools"], customs = read_tools(given["tools"], unread)
        if given["tools"] == []:
            del given["tools"]
    _read_end(given)
    limit = older if newer is None else newer
    if limit is not None:
        given["max_tokens"] = limit
    is_parallel = given.pop("parallel_tool_calls", True)
    ask = _ask(model, ({"messages": messages},), given, unread)
    return replace(ask, has_one_call=not is_parallel, customs=customs)


def _read_end(given: dict[str, Any]) -> None:
    """Read vLLM's two names for whether the answer begins a new turn."""
    opens = given.pop("add_generation_prompt", None)
    if opens is None:
        return
    if given.setdefault("continue_final_message", not opens) is opens:
        raise bad_field(
            "add_generation_prompt",
            (
                "add_generation_prompt and continue_final_message contradict each other; send "
                "only one of them"
            ),
        )


def read_completion(body: dict[str, Any]) -> Ask:
    """Read the body of a completion."""
    unread: list[str] = []
    values = translate(body, unread, is_chat=False)
    if type(best := values.get("best_of")) is int and best == values.get("n"):
        del values["best_of"]  # the best n of n are all of them
    given = check_fields(values, COMPLETION_FIELDS, unread)
    model = read_model(given)
    if "prompt" not in given:
        raise bad_value("prompt", "text", None)
    inputs = _prompts(given.pop("prompt"))
    listed = given.pop("logprobs", None)
    if listed is not None:
        if type(listed) is not int or not 0 <= listed <= MAX_TOP_LOGPROBS:
            raise bad_value("logprobs", f"an integer from 0 to {MAX_TOP_LOGPROBS}", listed)
        given |= {"logprobs": True, "top_logprobs": listed}
    has_echo, has_logprobs = given.get("echo", False), listed is not None
    if has_echo is False:
        given.pop("echo", None)
    ask = _ask(model, inputs, given, unread)
    if has_echo is True and has_logprobs:
        if given.setdefault("prompt_logprobs", listed) != listed:
            raise bad_field(
                "prompt_logprobs", "prompt_logprobs and logprobs differ; send only one of them"
            )
        if given.get("max_tokens") == 1:
            # Who evaluates continuations leaves out the last token, which must then be there even
            # if it is an end of text.
            given.setdefault("ignore_eos", True)
    return replace(
        ask,
        defaults={"max_tokens": COMPLETION_TOKENS},
        names={"prompt_tokens": "prompt"},
        has_echo=has_echo,
        has_logprobs=has_logprobs,
    )


def _ask(
    model: str, inputs: tuple[dict[str, Any], ...], given: dict[str, Any], unread: list[str]
) -> Ask:
    n = given.pop("n", 1)
    most = limits.MAX_CHOICES // len(inputs)
    if type(n) is not int or not 1 <= n <= most:
        raise bad_value("n", f"an integer from 1 to {most}", n)
    is_streamed = given.pop("stream", False)
    options = given.pop("stream_options", {})
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    read_keep_alive(given)
    tells_prompt = "prompt_logprobs" in given
    if tells_prompt and is_streamed:
        raise bad_field(
            "prompt_logprobs",
            "prompt_logprobs cannot be streamed; remove prompt_logprobs or stream",
        )
    return Ask(
        model=model,
        inputs=inputs,
        n=n,
        parameters=given,
        is_streamed=is_streamed,
        has_usage=options.get("include_usage", False),
        tells_prompt=tells_prompt,
        unread=unread,
    )


def _prompts(prompt: Any) -> tuple[dict[str, Any], ...]:
    """Return the inputs of a prompt: a text, token ids, or a list of several of them."""
    several = isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is not int
    prompts = prompt if several else [prompt]
    if len(prompts) > limits.MAX_CHOICES:
        raise bad_field("prompt", f"prompt must have at most {limits.MAX_CHOICES} prompts")
    return tuple(_prompt(one) for one in prompts)


def _prompt(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return {"prompt_tokens": prompt}
    raise bad_field("prompt", "prompt must be text, a list of token ids, or a list of these")
