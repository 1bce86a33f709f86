"""Every typed error that the core answers with, in one place, so that equal causes read alike."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import Priority, Why
from mlxsup.protocol.suggestions import close_names
from mlxsup.protocol.text import size_text


def unknown_model(name: str, known: Iterable[ModelName]) -> RemoteError:
    """Return the error of a name that is not in the configuration (H10)."""
    names = sorted(known)
    close = close_names(name, names)
    message = f"there is no model {name!r}; configured: {', '.join(names) or 'none'}"
    return RemoteError(ErrorCode.UNKNOWN_MODEL, message, detail={"known": names, "close": close})


def model_failed(name: ModelName, cause: str) -> RemoteError:
    """Return the error of a request for a model that had failed before."""
    return RemoteError(
        ErrorCode.MODEL_FAILED,
        f"{name} has failed: {cause}",
        detail={"model": name, "cause": cause},
    )


def load_failed(name: ModelName, cause: str, *, is_retryable: bool) -> RemoteError:
    """Return the error of requests and commands that waited for a load that failed."""
    return RemoteError(
        ErrorCode.LOAD_FAILED,
        f"{name} could not be loaded: {cause}",
        retryable=is_retryable,
        detail={"model": name, "cause": cause},
    )


def cut_off(name: ModelName, why: Why) -> RemoteError:
    """Return the error of requests that an unload, an eviction or a shutdown cuts off or
    refuses."""
    if why is Why.SHUTDOWN:
        return shutting_down()
    return RemoteError(
        ErrorCode.UNLOADED,
        f"{name} is being unloaded; a request that comes after that loads it again",
        detail={"model": name, "why": why.value},
    )


def shutting_down() -> RemoteError:
    """Return the error of requests that a shutdown cuts off or refuses (E4)."""
    return RemoteError(ErrorCode.SHUTTING_DOWN, "the daemon is shutting down")


def superseded(name: ModelName, by: str) -> RemoteError:
    """Return the error of a command that was overtaken by its opposite."""
    return RemoteError(
        ErrorCode.SUPERSEDED,
        f"{by} of {name} was requested meanwhile",
        detail={"model": name},
    )


def worker_crashed(name: ModelName, text: str, tokens_sent: int) -> RemoteError:
    """Return the error of a request whose worker died while running it."""
    return RemoteError(
        ErrorCode.WORKER_CRASHED,
        f"the worker of {name} died ({text}) after {tokens_sent} tokens of this answer",
        detail={"model": name, "cause": text, "tokens_sent": tokens_sent},
    )


def quarantined(name: ModelName, tokens_sent: int, lifted_in_s: float) -> RemoteError:
    """Return the error of a request that kills its engine."""
    return RemoteError(
        ErrorCode.QUARANTINED,
        f"this request crashed {name} each time it ran, so it is refused for "
        f"{math.ceil(lifted_in_s / 60)} minutes or until `mlxsup restart {name}`",
        detail={"model": name, "tokens_sent": tokens_sent, "lifted_in_s": lifted_in_s},
    )


def insufficient_memory(name: ModelName, text: str, tokens_sent: int) -> RemoteError:
    """Return the error of a request that has run out of memory alone, and did so again when others
    had been asked to give back what they could."""
    return RemoteError(
        ErrorCode.INSUFFICIENT_MEMORY,
        f"{name} ran out of memory twice while it ran only this request ({text}); shorten the "
        "prompt or the answer, or unload other models",
        detail={"model": name, "cause": text, "tokens_sent": tokens_sent},
    )


def row_does_not_fit(
    name: ModelName, *, needed_bytes: int, available_bytes: int, tokens_sent: int
) -> RemoteError:
    """Return the error of a request whose row needs more memory than there is for it, even if it
    runs alone.

    Args:
        needed_bytes: what the row needs, with what there is of its answer.
        available_bytes: what there could be at most.
    """
    available_bytes = max(0, available_bytes)
    return RemoteError(
        ErrorCode.INSUFFICIENT_MEMORY,
        f"this request needs {size_text(needed_bytes)}, but {name} has only "
        f"{size_text(available_bytes)} for requests; shorten the prompt or the answer, or "
        "raise memory_budget or the memory of the model",
        detail={
            "model": name,
            "needed_bytes": needed_bytes,
            "available_bytes": available_bytes,
            "tokens_sent": tokens_sent,
        },
    )


def does_not_fit(
    name: ModelName,
    reason: str,
    *,
    needed_bytes: int,
    budget_bytes: int,
    blockers: Iterable[ModelName],
) -> RemoteError:
    """Return the error of a load for which there is no memory, even if all others are evicted (I4).

    Args:
        reason: what it needs and what is in the way, a phrase that follows its name.
        budget_bytes: what all models may take together.
        blockers: the models that would have to go.
    """
    return RemoteError(
        ErrorCode.INSUFFICIENT_MEMORY,
        f"{name} cannot be loaded: it {reason}",
        detail={
            "model": name,
            "cause": reason,
            "needed_bytes": needed_bytes,
            "budget_bytes": budget_bytes,
            "blocked_by": list(blockers),
        },
    )


def for_interrupted(error: RemoteError, name: ModelName, tokens_sent: int) -> RemoteError:
    """Return the same error for a request whose answer had begun, with how far it had got."""
    if error.code is ErrorCode.LOAD_FAILED:
        return worker_crashed(name, str(error.detail.get("cause", "")), tokens_sent)
    detail = {**error.detail, "tokens_sent": tokens_sent}
    if error.code is ErrorCode.WORKER_CRASHED:  # said by the worker, which knows no names
        detail = {"model": name, "cause": error.message} | detail
    return RemoteError(error.code, error.message, retryable=error.retryable, detail=detail)


def with_engine_s(error: RemoteError, engine_s: float) -> RemoteError:
    """Return the same error for a request that has run, with the engine seconds that it was
    charged."""
    detail = {**error.detail, "engine_s": engine_s}
    return RemoteError(error.code, error.message, retryable=error.retryable, detail=detail)


def overloaded(
    name: ModelName,
    limit: str,
    sentence: str,
    *,
    queue_depth: int,
    running: list[RequestId],
    retry_after_s: float,
) -> RemoteError:
    """No room for one more request; names the setting that limits it, and the requests that hold
    rows (H3)."""
    return RemoteError(
        ErrorCode.OVERLOADED,
        f"{name} cannot take more requests: {sentence} ({limit})",
        detail={
            "model": name,
            "limit": limit,
            "queue_depth": queue_depth,
            "running": running,
            "retry_after_s": retry_after_s,
        },
    )


def priority_too_high(priority: Priority, highest: Priority, table: str) -> RemoteError:
    """Return the error of a request of a class that its client must not use."""
    return RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"this client may not use priority {priority}; use {highest} or a lower one, or raise "
        f"max_priority in [{table}] and reload",
        detail={"parameter": "priority", "max_priority": highest.value},
    )


def bad_configuration(problems: Iterable[str]) -> RemoteError:
    """Return the error of a reload that was not carried out."""
    found = list(problems)
    return RemoteError(
        ErrorCode.INVALID_REQUEST,
        "the configuration has errors, so nothing was changed:"
        + "".join(f"\n  {p}" for p in found),
        detail={"problems": found},
    )


def duplicate_id(id: RequestId) -> RemoteError:
    """Return the error of an id that this connection uses for another open request, which
    continues."""
    return RemoteError(
        ErrorCode.DUPLICATE_ID,
        f"this connection already has an open request {id!r}",
        detail={"id": id, "refused": "second use"},
    )


def superseded_subscription() -> RemoteError:
    """Return the error that ends a subscription whose connection has subscribed again."""
    return RemoteError(
        ErrorCode.SUPERSEDED,
        "a newer subscription of this connection replaced this one",
    )


def already_paused(name: ModelName, id: RequestId) -> RemoteError:
    """Return the error of a second pause."""
    return _unsuitable(name, id, f"request {id!r} is already paused; resume or cancel it")


def not_paused(name: ModelName, id: RequestId) -> RemoteError:
    """Return the error of a resume of a request that is not paused."""
    return _unsuitable(name, id, f"request {id!r} is not paused; it is running or waiting")


def may_not_be_paused(name: ModelName, id: RequestId, why: str) -> RemoteError:
    """Return the error of a pause of a request that must not leave its batch and come back."""
    return _unsuitable(name, id, f"request {id!r} cannot be paused: {why}")


def too_many_readers(name: ModelName, id: RequestId, most: int) -> RemoteError:
    """Return the error of one reader too many of a stream."""
    return _unsuitable(
        name, id, f"request {id!r} already has {most} other readers, which is the limit"
    )


def nothing_rendered(name: ModelName, id: RequestId) -> RemoteError:
    """Return the error of a client that joins a stream while no worker can show its beginning."""
    sentence = f"the answer to request {id!r} can be shown once {name} is READY again"
    return _unsuitable(name, id, sentence)


def renderer_lost(name: ModelName, id: RequestId) -> RemoteError:
    """Return the error of a reader to whom the worker has not shown the beginning of a stream that
    it has joined."""
    return RemoteError(
        ErrorCode.WORKER_CRASHED,
        (
            f"{name} could not show the answer to request {id!r}; try again if the request is "
            "still open"
        ),
        detail={"model": name, "request": id, "cause": "its worker has ended or is too slow"},
    )


def _unsuitable(name: ModelName, id: RequestId, sentence: str) -> RemoteError:
    return RemoteError(ErrorCode.INVALID_REQUEST, sentence, detail={"request": id, "model": name})


def queue_timeout(name: ModelName, waited_s: float, cause: str = "") -> RemoteError:
    """Return the error of a request that waited too long to be dispatched.

    Args:
        cause: what kept the model from being loaded; empty if nothing is known of that.
    """
    why = f": {name} {cause}" if cause else ""
    return RemoteError(
        ErrorCode.QUEUE_TIMEOUT,
        f"the request waited {waited_s:.1f} s for {name} and was not started{why}",
        detail={"model": name, "waited_s": waited_s},
    )


def deadline_exceeded(name: ModelName, what: str, tokens_sent: int) -> RemoteError:
    """Return the error of a request whose first token or whose end came too late."""
    return RemoteError(
        ErrorCode.DEADLINE_EXCEEDED,
        f"{what} of {name} did not arrive within the request's time limit",
        detail={"model": name, "tokens_sent": tokens_sent},
    )


def slow_consumer() -> RemoteError:
    """Return the error of a client that does not read the answers that it asked for (H7)."""
    return RemoteError(
        ErrorCode.SLOW_CONSUMER, "the client did not read its answers, so they were dropped"
    )
