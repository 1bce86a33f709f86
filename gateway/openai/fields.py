"""Every field of a request in OpenAI's form, and what it is for."""

from __future__ import annotations

from ..fields import Field, Use, ignored, passed, time_limits
from .synonyms import NEUTRAL_ELSEWHERE, NEUTRAL_IN_CHATS

_BOTH = (
    Field("model", Use.USED, "the name of a model of the configuration"),
    Field("stream", Use.USED, "true: server-sent events"),
    Field("stream_options", Use.USED, "`include_usage`: one more chunk, with the usage, "
          "which is null in all others"),
    Field("n", Use.USED, "that many answers, each a request of the daemon; with `seed`, the nth "
          "has the seed plus n"),
    Field("stop", Use.USED, "a text, or a list of up to 16"),
    Field("prompt_logprobs", Use.USED, "vLLM's: how likely each token of the prompt was, and so "
          "many of the likeliest in its place; not in a stream"),
    *passed("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
             "top_k", "min_p", "min_tokens", "repetition_penalty", "penalty_window",
             "xtc_probability", "xtc_threshold", "stop_token_ids", "ignore_eos", "priority",
             "response_format"),
    Field("keep_alive", Use.USED, "how long the model stays loaded once it is idle, until the next "
          "request: seconds, or a text such as `5m`; 0: it goes then; below 0: for ever"),
    Field("ttl", Use.USED, "LM Studio's name of `keep_alive`"),
    *time_limits(),
    *ignored("user", "metadata", "store", "service_tier"),
    *NEUTRAL_ELSEWHERE,
)  # fmt: skip

CHAT_FIELDS = (
    Field("messages", Use.USED, "the chat; see below"),
    *_BOTH,
    Field("max_completion_tokens", Use.USED, "at most that many tokens, reasoning included; "
          "without it as many as fit into the context"),
    Field("max_tokens", Use.USED, "the older name of `max_completion_tokens`"),
    Field("reasoning_effort", Use.USED, "given to the chat template under this name; one that "
          "does not know it leaves it out; `none`: no reasoning"),
    *passed("logprobs", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs",
             "continue_final_message"),
    *ignored("safety_identifier", "prompt_cache_key", "prompt_cache_retention",
             "prompt_cache_options", "moderation", "prediction"),
    Field("parallel_tool_calls", Use.USED, "false: what comes after the first call is left out"),
    Field("modalities", Use.NEUTRAL, "answers are text", (["text"],)),
    Field("verbosity", Use.HINT, "say it in a message", ("medium",)),
    Field("audio", Use.NEUTRAL, "answers are text"),
    Field("web_search_options", Use.NEUTRAL, "nothing is searched", ()),
    Field("functions", Use.NEUTRAL, "the older form of `tools`: use that", ([],)),
    Field("function_call", Use.NEUTRAL, "the older form of `tool_choice`: use that", ("auto",)),
    *NEUTRAL_IN_CHATS,
)  # fmt: skip

COMPLETION_FIELDS = (
    Field("prompt", Use.USED, "a text, a list of token ids, or a list of several of them"),
    *_BOTH,
    Field(
        "max_tokens", Use.USED, "at most that many tokens; without it 16, as OpenAI has it; 0: none"
    ),
    Field("logprobs", Use.USED, "how many of the likeliest tokens to list at each position"),
    Field("best_of", Use.NEUTRAL, "use `n`, and choose", (1,)),
    Field(
        "echo",
        Use.USED,
        "true: the text begins with the prompt, and with `logprobs` they begin "
        "with those of its tokens; the first token has none",
    ),
    Field("suffix", Use.NEUTRAL, "nothing can be inserted", ("",)),
)

MESSAGE_FIELDS = (
    Field("role", Use.USED, "`system`, `developer` (which means the same), `user`, `assistant`, "
          "`tool` or `function` (which means the same)"),
    Field("content", Use.USED, "a text, or a list of parts of type `text`"),
    Field("name", Use.PASSED, "given to the chat template"),
    Field("tool_calls", Use.PASSED, "of an assistant's message"),
    Field("function_call", Use.USED, "the older form of `tool_calls`"),
    Field("tool_call_id", Use.PASSED, "of a tool's message"),
    Field("reasoning_content", Use.PASSED, "given to the chat template"),
    Field("reasoning", Use.USED, "another name of `reasoning_content`"),
    Field("thinking", Use.USED, "another name of `reasoning_content`"),
    Field("refusal", Use.USED, "of an assistant's message without `content`"),
)  # fmt: skip
"""Fields of a message that are read; others describe it, and are ignored."""

STREAM_FIELDS = (
    Field("include_usage", Use.USED),
    *ignored("include_obfuscation"),
    Field("continuous_usage_stats", Use.HINT, "", (False,)),
)
