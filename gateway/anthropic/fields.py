"""Every field of a request in Anthropic's form, and what it is for."""

from __future__ import annotations

from ..fields import Field, Use, ignored, passed, time_limits

_COUNTED = (
    Field("messages", Use.USED, "the chat; see below"),
    Field("model", Use.USED, "the name of a model of the configuration"),
    Field("system", Use.USED, "a text, or a list of blocks of type `text`; comes before the chat. "
          "A block that begins with `x-anthropic-billing-header:` is left out: it differs from "
          "request to request, and nothing behind it could be taken from the prefix cache"),
    Field("tools", Use.USED, "what the model may call; see below"),
    Field("tool_choice", Use.USED, "of type `auto`, `none`, `any` or `tool` (with `name`). "
          "With `disable_parallel_tool_use`, what comes after the first call is "
          "left out"),
    Field("thinking", Use.USED, "`enabled` or `adaptive`: the chat template is given "
          "`enable_thinking` and `thinking`, and the reasoning is shown unless `display` is "
          "`omitted`; otherwise it is given their opposite. `budget_tokens` has no effect"),
    Field("output_config", Use.USED, "`effort`: given to the chat template as `reasoning_effort`; "
          "`format`: a JSON schema that the answer must match"),
    *passed("chat_template_kwargs", "continue_final_message", "priority"),
    *ignored("cache_control", "metadata", "service_tier", "speed", "inference_geo", "diagnostics",
             "user_profile_id", "workspace_id", "context_management", "thread", "betas",
             "billing_policy", "fallback_credit_token"),
    Field("compaction", Use.HINT, "what is too long is refused"),
    Field("fallbacks", Use.HINT, "no other model answers"),
    Field("container", Use.NEUTRAL, "nothing is run here"),
    Field("mcp_servers", Use.NEUTRAL, "connect them to the program that asks", ([],)),
)  # fmt: skip

MESSAGES_FIELDS = (
    *_COUNTED,
    Field("max_tokens", Use.USED, "required: at most that many tokens, reasoning included; if that "
          "does not fit into the context, as many as do"),
    Field("stream", Use.USED, "true: server-sent events"),
    Field("stop_sequences", Use.USED, "a list of up to 16 texts"),
    *time_limits(),
    *passed("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
)  # fmt: skip

COUNT_FIELDS = _COUNTED

_TYPE = Field("type", Use.USED)

TOOL_FIELDS = (
    Field("name", Use.USED),
    Field("description", Use.USED),
    Field("input_schema", Use.USED),
    Field("strict", Use.USED),
    Field("type", Use.USED),
    Field("defer_loading", Use.USED, "true: shown to the model once a `tool_reference` names it"),
    Field("input_examples", Use.HINT, "put them into the description", ([],)),
    *ignored("cache_control", "eager_input_streaming", "allowed_callers"),
)

CHOICE_FIELDS = (_TYPE, Field("name", Use.USED), Field("disable_parallel_tool_use", Use.USED))

THINKING_FIELDS = (_TYPE, Field("display", Use.USED), *ignored("budget_tokens"))

OUTPUT_FIELDS = (Field("effort", Use.USED), Field("format", Use.USED))
