"""Every field of a request for a response, and what it is for."""

from __future__ import annotations

from ..fields import Field, Use, ignored, passed, time_limits

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
    Field("include", Use.USED, "a list; only `message.output_text.logprobs` is refused"),
    *passed("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
            "chat_template_kwargs", "continue_final_message", "priority"),
    *ignored("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
             "prompt_cache_retention", "prompt_cache_options", "client_metadata",
             "stream_options", "moderation", "access_programs"),
    Field("previous_response_id", Use.NEUTRAL, "nothing is kept: send the whole conversation"),
    Field("conversation", Use.NEUTRAL, "nothing is kept: send the whole conversation"),
    Field("background", Use.NEUTRAL, "nothing is kept: stream it", (False,)),
    Field("prompt", Use.NEUTRAL, "nothing is kept: send its text"),
    Field("truncation", Use.HINT, "what is too long is refused", ("disabled",)),
    Field("context_management", Use.HINT, "what is too long is refused", ([],)),
    *ignored("max_tool_calls", "background_options"),
    Field("image", Use.HINT, "answers are text"),
    Field("top_logprobs", Use.NEUTRAL, "`/v1/chat/completions` has them", (0,)),
)  # fmt: skip

TOOL_FIELDS = (
    Field("type", Use.USED),
    Field("name", Use.USED),
    Field("description", Use.USED),
    Field("parameters", Use.USED),
    Field("format", Use.USED),
    Field("defer_loading", Use.HINT, "every tool is shown to the model", (False,)),
    *ignored("strict", "allowed_callers", "output_schema", "async"),
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
