"""Every field of a request for a response, and what it is for."""

from __future__ import annotations

from collections.abc import Mapping

from ..fields import Field, Use, ignored, object_of, passed, time_limits, used

ECHOED: Mapping[str, type] = {
    "metadata": dict,
    "max_tool_calls": int,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "user": str,
}
"""Fields that have no other effect than to be repeated in the response, and their types."""

SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""The parameters of sampling that a response names."""

RESPONSE_FIELDS = (
    used("input", "a text, or a list of items; see below"),
    used("model", "the name of a model of the configuration"),
    used("instructions", "a text; comes before the input, as the system prompt", str),
    used("max_output_tokens", "at most that many tokens, reasoning included; if that "
          "does not fit into the context, as many as do"),
    used("stream", "true: server-sent events", bool),
    used("tools", "what the model may call; see below"),
    used("tool_choice", "`auto`, `none`, `required`, a function, a custom tool or "
          "`allowed_tools`"),
    used("parallel_tool_calls", "false: what comes after the first call is left out", bool),
    object_of("reasoning", "how much the model thinks",
              used("effort", "given to the chat template as `reasoning_effort`"),
              used("summary", "the response repeats it"),
              *ignored("generate_summary", "context", "mode")),
    object_of("text", "what the answer looks like",
              used("format", "`text`, `json_object` or a JSON schema that the answer must match"),
              Field("verbosity", Use.HINT, "say it in the input", ("medium",))),
    *time_limits(),
    used("include", "a list; `message.output_text.logprobs` has an effect", list),
    used("top_logprobs", "how many of the likeliest tokens to list at each position"),
    *passed("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "chat_template_kwargs",
            "continue_final_message", "priority"),
    *(used(name, "the response repeats it", kind) for name, kind in ECHOED.items()),
    *ignored("service_tier", "prompt_cache_retention", "prompt_cache_options",
             "client_metadata", "stream_options", "moderation", "access_programs",
             "background_options"),
    used("store", "false: the response is not kept", bool),
    used("previous_response_id", "a kept response, which this one continues", str),
    Field("conversation", Use.NEUTRAL, "conversations are not kept; use `previous_response_id`"),
    Field("background", Use.NEUTRAL, "nothing runs in the background: stream it instead", (False,)),
    Field("prompt", Use.NEUTRAL, "prompts are not kept; send the text itself"),
    Field("truncation", Use.HINT, "what is too long is refused", ("disabled",)),
    Field("context_management", Use.HINT, "what is too long is refused", ([],)),
    Field("image", Use.HINT, "answers are text"),
    Field("personality", Use.HINT, "say it in the instructions"),
)  # fmt: skip

TOOL_FIELDS = (
    used("type"),
    used("name"),
    used("description"),
    used("parameters"),
    used("strict"),
    used("format"),
    Field("defer_loading", Use.HINT, "every tool is shown to the model", (False,)),
    *ignored("allowed_callers", "output_schema", "async"),
)

NAMESPACE_FIELDS = (
    used("type"),
    used("name"),
    used("tools"),
    *ignored("description"),
)
