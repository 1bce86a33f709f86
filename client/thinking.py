"""The arguments of a request that decide whether the model reasons before it answers."""

from __future__ import annotations

from typing import Any


def thinking_arguments(*, thinks: bool) -> dict[str, Any]:
    """`chat_template_kwargs` that say so; each family's template knows one of these names."""
    return {"enable_thinking": thinks, "thinking": thinks}
