"""Every field of a request, and what it is for: the one list that checks and documents share.

A field that cannot change the text of an answer is accepted. One that would, and that has no effect
here, is refused, so that nobody takes an answer for what it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..failure import bad_field


class Use(StrEnum):
    """What becomes of a field; the value is the word that the document has."""

    USED = "used"
    PASSED = "used as it is"
    IGNORED = "accepted, no effect"
    NEUTRAL = "only as it would be without it"


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    Attributes:
        name: in the request.
        use: what becomes of it.
        says: for people.
        neutral: with `Use.NEUTRAL`, the values besides null that change nothing.
    """

    name: str
    use: Use
    says: str = ""
    neutral: tuple[Any, ...] = ()


def _passed(*names: str) -> tuple[Field, ...]:
    says = "see [parameters.md](parameters.md)"
    return tuple(Field(name, Use.PASSED, says) for name in names)


def _ignored(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, Use.IGNORED) for name in names)


_BOTH = (
    Field("model", Use.USED, "the name of a model of the configuration"),
    Field("stream", Use.USED, "true: server-sent events"),
    Field("stream_options", Use.USED, "`include_usage`: one more chunk, with the usage"),
    Field("n", Use.USED, "that many answers, each a request of the daemon; with `seed`, the nth "
          "has the seed plus n"),
    Field("stop", Use.USED, "a text, or a list of up to 16"),
    *_passed("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
             "top_k", "min_p", "min_tokens", "repetition_penalty", "penalty_window",
             "xtc_probability", "xtc_threshold", "stop_token_ids", "ignore_eos", "priority",
             "response_format"),
    *_ignored("user", "metadata", "store", "service_tier"),
)  # fmt: skip

CHAT_FIELDS = (
    Field("messages", Use.USED, "the chat; see below"),
    *_BOTH,
    Field("max_completion_tokens", Use.USED, "at most that many tokens, reasoning included; "
          "without it as many as fit into the context"),
    Field("max_tokens", Use.USED, "the older name of `max_completion_tokens`"),
    Field("reasoning_effort", Use.USED, "given to the chat template under this name; one that "
          "does not know it leaves it out"),
    *_passed("logprobs", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs"),
    *_ignored("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction"),
    Field("parallel_tool_calls", Use.NEUTRAL, "the model decides how many calls it makes", (True,)),
    Field("modalities", Use.NEUTRAL, "answers are text", (["text"],)),
    Field("verbosity", Use.NEUTRAL, "say it in a message", ("medium",)),
    Field("audio", Use.NEUTRAL, "answers are text"),
    Field("web_search_options", Use.NEUTRAL, "nothing is searched", ()),
    Field("functions", Use.NEUTRAL, "the older form of `tools`: use that", ([],)),
    Field("function_call", Use.NEUTRAL, "the older form of `tool_choice`: use that", ()),
)  # fmt: skip

COMPLETION_FIELDS = (
    Field("prompt", Use.USED, "a text, a list of token ids, or a list of several of them"),
    *_BOTH,
    Field("max_tokens", Use.USED, "at most that many tokens; without it 16, as OpenAI has it"),
    Field("logprobs", Use.USED, "how many of the likeliest tokens to list at each position"),
    Field("best_of", Use.NEUTRAL, "use `n`, and choose", (1,)),
    Field("echo", Use.NEUTRAL, "the answer does not repeat the prompt", (False,)),
    Field("suffix", Use.NEUTRAL, "nothing can be inserted", ("",)),
)

MESSAGE_FIELDS = (
    Field("role", Use.USED, "`system`, `developer` (which means the same), `user`, `assistant` or "
          "`tool`"),
    Field("content", Use.USED, "a text, or a list of parts of type `text`"),
    Field("name", Use.PASSED, "given to the chat template"),
    Field("tool_calls", Use.PASSED, "of an assistant's message"),
    Field("tool_call_id", Use.PASSED, "of a tool's message"),
    Field("reasoning_content", Use.PASSED, "given to the chat template"),
    Field("refusal", Use.NEUTRAL, "put it into the content"),
    Field("function_call", Use.NEUTRAL, "the older form of `tool_calls`: use that"),
    Field("audio", Use.NEUTRAL, "messages are text"),
    *_ignored("cache_control", "annotations", "id"),
)  # fmt: skip

STREAM_FIELDS = (
    Field("include_usage", Use.USED),
    *_ignored("include_obfuscation"),
)


def check_fields(
    values: Mapping[str, Any], fields: Sequence[Field], *, within: str = ""
) -> dict[str, Any]:
    """The fields that mean something, without those that are null.

    Args:
        values: of a request, or of a part of one.
        fields: those that there are.
        within: the path of the part, `messages[0]`; empty for the whole request.

    Raises:
        Failure: a field is unknown, or would change the answer if it had an effect.
    """
    known = {field.name: field for field in fields}
    given = {}
    for name, value in values.items():
        path = f"{within}.{name[:64]}" if within else name[:64]
        field = known.get(name)
        if field is None:
            raise bad_field(path, f"unknown field {path!r}; known are {', '.join(sorted(known))}")
        if value is None or field.use is Use.IGNORED:
            continue
        if field.use is Use.NEUTRAL:
            # Not `in`: 1 equals True.
            if not any(type(one) is type(value) and one == value for one in field.neutral):
                raise bad_field(path, f"{path} has no effect here: {field.says}")
            continue
        given[name] = value
    return given
