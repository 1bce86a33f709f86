"""Every field of a request in Anthropic's form, and what it is for."""

from __future__ import annotations

from ..fields import Field, Use, ignored, object_of, passed, time_limits, used

_COUNTED = (
    used("messages", "the chat; see below"),
    used("model", "the name of a model of the configuration"),
    used("system", "a text, or a list of blocks of type `text`; comes before the chat. "
          "A block that begins with `x-anthropic-billing-header:` is left out: it differs from "
          "request to request, and nothing behind it could be taken from the prefix cache"),
    used("tools", "what the model may call; see below"),
    object_of("tool_choice", "whether the model calls something",
              used("type", "`auto`, `none`, `any` or `tool` (with `name`)"),
              used("name"),
              used("disable_parallel_tool_use", "true: what comes after the first call is left out",
                   bool)),
    object_of("thinking", "whether the model thinks",
              used("type", "`enabled` or `adaptive`: the chat template is given `enable_thinking` "
                   "and `thinking`, otherwise their opposite"),
              used("display", "`omitted`: the reasoning is not shown"),
              *ignored("budget_tokens")),
    object_of("output_config", "what the answer looks like",
              used("effort", "given to the chat template as `reasoning_effort`"),
              used("format", "a JSON schema that the answer must match")),
    *passed("chat_template_kwargs", "continue_final_message", "priority"),
    *ignored("cache_control", "metadata", "service_tier", "speed", "inference_geo", "diagnostics",
             "user_profile_id", "workspace_id", "context_management", "thread", "betas",
             "billing_policy", "fallback_credit_token"),
    Field("compaction", Use.HINT, "what is too long is refused"),
    Field("fallbacks", Use.HINT, "no other model answers"),
    Field("container", Use.NEUTRAL, "no code is run here"),
    Field("mcp_servers", Use.NEUTRAL, "connect the servers to your program", ([],)),
)  # fmt: skip

MESSAGES_FIELDS = (
    *_COUNTED,
    used("max_tokens", "required: at most that many tokens, reasoning included; if that "
          "does not fit into the context, as many as do"),
    used("stream", "true: server-sent events", bool),
    used("stop_sequences", "a list of up to 16 texts"),
    *time_limits(),
    *passed("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
)  # fmt: skip

COUNT_FIELDS = _COUNTED

TOOL_FIELDS = (
    used("name"),
    used("description"),
    used("input_schema"),
    used("strict"),
    used("type"),
    used("defer_loading", "true: shown to the model once a `tool_reference` names it"),
    Field("input_examples", Use.HINT, "put them into the description", ([],)),
    *ignored("cache_control", "eager_input_streaming", "allowed_callers"),
)
