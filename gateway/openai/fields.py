"""Every field of a request in OpenAI's form, and what it is for."""

from __future__ import annotations

from mlxsup.protocol.parameters import SAMPLING

from ..fields import (
    KEEP_ALIVE,
    Field,
    Use,
    hints,
    ignored,
    object_of,
    passed,
    time_limits,
    used,
)
from .synonyms import NEUTRAL_ELSEWHERE, NEUTRAL_IN_CHATS

_BOTH = (
    used("model", "the name of a model of the configuration"),
    used("stream", "true: server-sent events", bool),
    object_of("stream_options", "of a stream",
              used("include_usage", "true: one more chunk, with the usage, which is null in all "
                   "others", bool),
              *ignored("include_obfuscation"), *hints((False,), "continuous_usage_stats")),
    used("n", "that many answers, each a request of the daemon; with `seed`, the nth "
          "has the seed plus n"),
    used("stop", "a text, or a list of up to 16"),
    used("prompt_logprobs", "vLLM's: how likely each token of the prompt was, and so "
          "many of the likeliest in its place; not in a stream"),
    *passed(*SAMPLING, "seed", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos",
             "priority", "response_format"),
    KEEP_ALIVE,
    used("ttl", "LM Studio's name of `keep_alive`"),
    *time_limits(),
    *ignored("user", "metadata", "store", "service_tier"),
    *NEUTRAL_ELSEWHERE,
)  # fmt: skip

CHAT_FIELDS = (
    used("messages", "the chat; see below"),
    *_BOTH,
    used("max_completion_tokens", "at most that many tokens, reasoning included; "
          "without it as many as fit into the context"),
    used("max_tokens", "the older name of `max_completion_tokens`"),
    used("reasoning_effort", "given to the chat template under this name; one that "
          "does not know it leaves it out; `none`: no reasoning"),
    *passed("logprobs", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs",
             "continue_final_message"),
    *ignored("safety_identifier", "prompt_cache_key", "prompt_cache_retention",
             "prompt_cache_options", "moderation", "prediction"),
    used("parallel_tool_calls", "false: what comes after the first call is left out", bool),
    Field("modalities", Use.NEUTRAL, "answers are text", (["text"],)),
    Field("verbosity", Use.HINT, "say it in a message", ("medium",)),
    Field("audio", Use.NEUTRAL, "answers are text"),
    Field("web_search_options", Use.NEUTRAL, "the web is not searched", ()),
    Field("functions", Use.NEUTRAL, "use `tools`, its newer form", ([],)),
    Field("function_call", Use.NEUTRAL, "use `tool_choice`, its newer form", ("auto",)),
    *NEUTRAL_IN_CHATS,
)  # fmt: skip

COMPLETION_FIELDS = (
    used("prompt", "a text, a list of token ids, or a list of several of them"),
    *_BOTH,
    used("max_tokens", "at most that many tokens; without it 16, as OpenAI has it; 0: none"),
    used("logprobs", "how many of the likeliest tokens to list at each position"),
    Field("best_of", Use.NEUTRAL, "use `n` and choose among the answers", (1,)),
    used(
        "echo",
        "true: the text begins with the prompt, and with `logprobs` they begin "
        "with those of its tokens; the first token has none",
    ),
    Field("suffix", Use.NEUTRAL, "text cannot be inserted", ("",)),
)
