"""What is logged of a request when it ends: who, tokens, speed, outcome; nothing of its text."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.client_messages import Generate
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.flight import RequestEnded

from .ledger import Request


def tokens_per_s(request: Request, now: float) -> float | None:
    """How fast its answer has come since its first token, pauses and crashes included; None before
    its second token."""
    if request.first_token_at is None or request.tokens_sent < 2:
        return None
    took_s = now - request.first_token_at
    return (request.tokens_sent - 1) / took_s if took_s > 0 else None


def report_of(ended: RequestEnded) -> dict[str, Any]:
    """The facts of one line, in order."""
    usage, timings = ended.usage, ended.timings
    facts: dict[str, Any] = {
        "id": ended.id,
        "number": ended.number,
        "model": ended.model,
        "client": ended.client,
        "outcome": ended.outcome,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "queued_s": timings.queued_s,
        "first_token_s": timings.first_token_s,
        "total_s": timings.total_s,
        "engine_s": usage.engine_s,
    }
    if (rate := ended.tokens_per_s) is not None:
        facts["tokens_per_s"] = rate
    if ended.resumed:
        facts["resumed"] = ended.resumed
    if ended.paused:
        facts["paused"] = ended.paused
    return facts


def report_of_refused(message: Generate, code: ErrorCode) -> dict[str, Any]:
    """The facts of the line about a request that was refused when it came."""
    return {"id": message.id, "model": message.model, "outcome": code.value}
