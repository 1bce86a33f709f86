"""Entries of the flight recorder, made from what the core knows of models and requests."""

from __future__ import annotations

from mlxsup.protocol.client_messages import Timings, Usage
from mlxsup.protocol.flight import (
    ModelChanged,
    RequestContinued,
    RequestEnded,
    RequestPaused,
    RequestStarted,
)
from mlxsup.protocol.states import State

from .model import Model
from .requests.ledger import Request


def model_changed(model: Model, before: State, note: str) -> ModelChanged:
    """A model has another state than before."""
    life = model.life
    return ModelChanged(
        model=life.name,
        generation=life.generation,
        before=before.value,
        after=life.state.value,
        why=life.why.value,
        note=note,
    )


def request_started(model: Model, request: Request, now: float) -> RequestStarted:
    """A request is handed to a worker as new."""
    return RequestStarted(
        id=request.id,
        number=request.key,
        model=request.model,
        client=request.account,
        generation=model.life.generation,
        queued_s=now - request.arrived_at,
    )


def request_paused(request: Request) -> RequestPaused:
    """The row of a request has left the batch."""
    return RequestPaused(
        id=request.id,
        number=request.key,
        model=request.model,
        reason=request.pause_reason.value,
        tokens=request.tokens_sent,
    )


def request_continued(model: Model, request: Request) -> RequestContinued:
    """A request is about to say something again, after a crash or a pause."""
    return RequestContinued(
        id=request.id,
        number=request.key,
        model=request.model,
        after="crash" if request.is_interrupted else "pause",
        generation=model.life.generation,
        tokens=request.tokens_sent,
    )


def request_ended(request: Request, outcome: str, usage: Usage, timings: Timings) -> RequestEnded:
    """A request has its end.

    Args:
        request: which.
        outcome: its finish reason, the code of its error, or `gone`.
        usage, timings: its last ones.
    """
    return RequestEnded(
        id=request.id,
        number=request.key,
        model=request.model,
        outcome=outcome,
        client=request.account,
        usage=usage,
        timings=timings,
        resumed=request.resumed,
        paused=request.paused,
    )
