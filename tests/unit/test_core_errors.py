"""The words, the codes and the facts of every error that the core answers with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import Why
from mlxsup.supervisor.core import errors

M = ModelName("m")

ERRORS: dict[str, tuple[Callable[[], RemoteError], ErrorCode, str, bool, dict[str, object]]] = {
    "model failed": (
        lambda: errors.model_failed(M, "no disk"),
        ErrorCode.MODEL_FAILED,
        "m has failed: no disk",
        False,
        {"model": "m", "cause": "no disk"},
    ),
    "load failed": (
        lambda: errors.load_failed(M, "no disk", is_retryable=False),
        ErrorCode.LOAD_FAILED,
        "m could not be loaded: no disk",
        False,
        {"model": "m", "cause": "no disk"},
    ),
    "load failed, to be tried again": (
        lambda: errors.load_failed(M, "killed", is_retryable=True),
        ErrorCode.LOAD_FAILED,
        "m could not be loaded: killed",
        True,
        {"model": "m", "cause": "killed"},
    ),
    "cut off by an unload": (
        lambda: errors.cut_off(M, Why.IDLE),
        ErrorCode.UNLOADED,
        "m is being unloaded (idle)",
        True,
        {"model": "m", "why": "idle"},
    ),
    "cut off by a shutdown": (
        lambda: errors.cut_off(M, Why.SHUTDOWN),
        ErrorCode.SHUTTING_DOWN,
        "the supervisor is shutting down",
        True,
        {},
    ),
    "superseded": (
        lambda: errors.superseded(M, "a load"),
        ErrorCode.SUPERSEDED,
        "a load of m was requested in the meantime",
        True,
        {"model": "m"},
    ),
    "worker crashed": (
        lambda: errors.worker_crashed(M, "SIGKILL", 7),
        ErrorCode.WORKER_CRASHED,
        "the worker of m died (SIGKILL) after 7 tokens of this answer",
        True,
        {"model": "m", "cause": "SIGKILL", "tokens_sent": 7},
    ),
    "quarantined, for whole minutes": (
        lambda: errors.quarantined(M, 7, 120.0),
        ErrorCode.QUARANTINED,
        "this request crashed m each time it ran; it is refused for 2 minutes, or until"
        " `mlxsup restart m`",
        False,
        {"model": "m", "tokens_sent": 7, "lifted_in_s": 120.0},
    ),
    "quarantined, for a part of one more": (
        lambda: errors.quarantined(M, 0, 121.0),
        ErrorCode.QUARANTINED,
        "this request crashed m each time it ran; it is refused for 3 minutes, or until"
        " `mlxsup restart m`",
        False,
        {"model": "m", "tokens_sent": 0, "lifted_in_s": 121.0},
    ),
    "out of memory alone": (
        lambda: errors.insufficient_memory(M, "exit code 75", 7),
        ErrorCode.INSUFFICIENT_MEMORY,
        "m ran out of memory for this request alone, twice (exit code 75): shorten the prompt or"
        " the answer, or unload other models",
        False,
        {"model": "m", "cause": "exit code 75", "tokens_sent": 7},
    ),
    "overloaded": (
        lambda: errors.overloaded(
            M,
            "max_queue",
            "9 are waiting",
            queue_depth=9,
            running=[RequestId("r")],
            retry_after_s=2.5,
        ),
        ErrorCode.OVERLOADED,
        "m cannot take more requests: 9 are waiting (max_queue)",
        True,
        {
            "model": "m",
            "limit": "max_queue",
            "queue_depth": 9,
            "running": ["r"],
            "retry_after_s": 2.5,
        },
    ),
    "bad configuration": (
        lambda: errors.bad_configuration(iter(["line 1", "line 2"])),
        ErrorCode.INVALID_REQUEST,
        "the configuration is wrong, and nothing has changed:\n  line 1\n  line 2",
        False,
        {"problems": ["line 1", "line 2"]},
    ),
    "duplicate id": (
        lambda: errors.duplicate_id(RequestId("r")),
        ErrorCode.DUPLICATE_ID,
        "this connection already has an open request 'r'",
        False,
        {"id": "r", "refused": "second use"},
    ),
    "superseded subscription": (
        lambda: errors.superseded_subscription(),
        ErrorCode.SUPERSEDED,
        "the connection subscribed again; it can have one subscription at a time",
        True,
        {},
    ),
    "queue time-out": (
        lambda: errors.queue_timeout(M, 2.25),
        ErrorCode.QUEUE_TIMEOUT,
        "the request waited 2.2 s for m without being started",
        True,
        {"model": "m", "waited_s": 2.25},
    ),
    "deadline exceeded": (
        lambda: errors.deadline_exceeded(M, "the first token", 0),
        ErrorCode.DEADLINE_EXCEEDED,
        "the first token of m did not arrive within the request's time limit",
        False,
        {"model": "m", "tokens_sent": 0},
    ),
    "slow consumer": (
        lambda: errors.slow_consumer(),
        ErrorCode.SLOW_CONSUMER,
        "the client did not read its answers; they were dropped",
        True,
        {},
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_happened_and_has_its_facts(name: str) -> None:
    make, code, message, retryable, detail = ERRORS[name]
    error = make()
    assert (error.code, error.message, error.detail) == (code, message, detail)
    assert error.retryable is retryable


def test_an_unknown_model_is_answered_with_the_names_there_are_and_the_close_ones_H10() -> None:
    known = [ModelName(name) for name in ("qwen", "Llama-3b", "llama-8b", "llama-1b", "llama-70b")]
    error = errors.unknown_model("LLAMA-3B", known)
    assert error.code is ErrorCode.UNKNOWN_MODEL
    assert error.message == (
        "no model is called 'LLAMA-3B'; configured: Llama-3b, llama-1b, llama-70b, llama-8b, qwen"
    )
    assert error.detail["known"] == ["Llama-3b", "llama-1b", "llama-70b", "llama-8b", "qwen"]
    assert error.detail["close"] == ["Llama-3b", "llama-8b", "llama-1b"], "the best three"
    assert error.retryable is False
    assert errors.unknown_model("m", []).message == "no model is called 'm'; configured: none"


def test_an_interrupted_answer_learns_how_far_it_had_come() -> None:
    error = errors.for_interrupted(errors.cut_off(M, Why.USER), M, 7)
    assert (error.code, error.message) == (ErrorCode.UNLOADED, "m is being unloaded (user)")
    assert error.detail == {"model": "m", "why": "user", "tokens_sent": 7}
    odd = RemoteError(ErrorCode.UNLOADED, "why", retryable=False, detail={"tokens_sent": 1})
    assert errors.for_interrupted(odd, M, 7).retryable is False, "as the error was"
    assert errors.for_interrupted(odd, M, 7).detail == {"tokens_sent": 7}


def test_a_worker_that_cannot_continue_an_answer_gives_the_detail_of_every_crash() -> None:
    said = RemoteError(ErrorCode.WORKER_CRASHED, "the model changed", detail={"tokens_sent": 1})
    detail = {"model": "m", "cause": "the model changed", "tokens_sent": 7}
    assert errors.for_interrupted(said, M, 7).detail == detail


def test_to_an_interrupted_answer_a_load_that_failed_is_the_death_of_its_worker() -> None:
    failed = errors.load_failed(M, "no disk", is_retryable=False)
    error = errors.for_interrupted(failed, M, 7)
    assert (error.code, error.retryable) == (ErrorCode.WORKER_CRASHED, True)
    assert error.detail == {"model": "m", "cause": "no disk", "tokens_sent": 7}
    nameless = RemoteError(ErrorCode.LOAD_FAILED, "failed")
    assert errors.for_interrupted(nameless, M, 7).detail["cause"] == ""
