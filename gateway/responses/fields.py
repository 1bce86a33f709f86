"""Every field of a request for a response, and what it is for."""

from __future__ import annotations

from collections.abc import Mapping

from ..fields import Field, Use, ignored, passed, time_limits

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
    Field("input", Use.USED, "a text, or a list of items; see below"),
    Field("model", Use.USED, "the name of a model of the configuration"),
    Field("instructions", Use.USED, "a text; comes before the input, as the system prompt"),
    Field("max_output_tokens", Use.USED, "at most that many tokens, reasoning included; if that "
          "does not fit into the context, as many as do"),
    Field("stream", Use.USED, "true: server-sent events"),
    Field("tools", Use.USED, "what the model may call; see below"),
    Field("tool_choice", Use.USED, "`auto`, `none`, `required`, a function, a custom tool or "
          "`allowed_tools`"),
    Field("parallel_tool_calls", Use.USED, "false: what comes after the first call is left out"),
    Field("reasoning", Use.USED, "`effort`: given to the chat template as `reasoning_effort`; what "
          "else it has is ignored"),
    Field("text", Use.USED, "`format`: `text`, `json_object` or a JSON schema that the answer must "
          "match"),
    *time_limits(),
    Field("include", Use.USED, "a list; `message.output_text.logprobs` has an effect"),
    Field("top_logprobs", Use.USED, "how many of the likeliest tokens to list at each position"),
    *passed("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "chat_template_kwargs",
            "continue_final_message", "priority"),
    *(Field(name, Use.USED, "the response repeats it") for name in ECHOED),
    *ignored("service_tier", "prompt_cache_retention", "prompt_cache_options",
             "client_metadata", "stream_options", "moderation", "access_programs",
             "background_options"),
    Field("store", Use.USED, "false: the response is not kept"),
    Field("previous_response_id", Use.USED, "a kept response, which this one continues"),
    Field("conversation", Use.NEUTRAL, "conversations are not kept; use `previous_response_id`"),
    Field("background", Use.NEUTRAL, "nothing runs in the background; stream it", (False,)),
    Field("prompt", Use.NEUTRAL, "prompts are not kept; send its text"),
    Field("truncation", Use.HINT, "what is too long is refused", ("disabled",)),
    Field("context_management", Use.HINT, "what is too long is refused", ([],)),
    Field("image", Use.HINT, "answers are text"),
    Field("personality", Use.HINT, "say it in the instructions"),
)  # fmt: skip

TOOL_FIELDS = (
    Field("type", Use.USED),
    Field("name", Use.USED),
    Field("description", Use.USED),
    Field("parameters", Use.USED),
    Field("strict", Use.USED),
    Field("format", Use.USED),
    Field("defer_loading", Use.HINT, "every tool is shown to the model", (False,)),
    *ignored("allowed_callers", "output_schema", "async"),
)

NAMESPACE_FIELDS = (
    Field("type", Use.USED),
    Field("name", Use.USED),
    Field("tools", Use.USED),
    *ignored("description"),
)

REASONING_FIELDS = (
    Field("effort", Use.USED),
    *ignored("summary", "generate_summary", "context", "mode"),
)

TEXT_FIELDS = (
    Field("format", Use.USED),
    Field("verbosity", Use.HINT, "say it in the input", ("medium",)),
)
