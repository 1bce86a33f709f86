"""Every metric of requests over HTTP: the one list that the meter and the documents share.

Labels are bounded: models of the configuration, words of an enumeration, numbers of statuses. Who
asks is never one.
"""

from __future__ import annotations

from dataclasses import dataclass

COUNTER = "counter"
GAUGE = "gauge"
HISTOGRAM = "histogram"

WAIT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""Seconds; those of vLLM, whose boards people know."""

TOKEN_BUCKETS = (
    0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
"""Seconds; those of OpenTelemetry, and two more for small models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is exposed; a histogram adds `_bucket`, `_sum` and `_count`.
        kind: `counter`, `gauge` or `histogram`.
        labels: their names.
        says: one sentence for people.
        buckets: of a histogram, their upper bounds.
    """

    name: str
    kind: str
    says: str
    labels: tuple[str, ...] = ("model",)
    buckets: tuple[float, ...] = ()


def _counter(name: str, says: str, *labels: str) -> Metric:
    return Metric(name=name, kind=COUNTER, says=says, labels=labels or ("model",))


def _histogram(name: str, says: str, buckets: tuple[float, ...] = WAIT_BUCKETS) -> Metric:
    return Metric(name=name, kind=HISTOGRAM, says=says, buckets=buckets)


REQUESTS = _counter("mlxsup_requests_total", "answers over HTTP, by how they ended; `cancelled`: "
                    "the reader left", "model", "finish_reason")  # fmt: skip
ERRORS = _counter("mlxsup_request_errors_total", "requests over HTTP that the daemon refused or "
                  "could not answer; without a model if none has the name",
                  "model", "code")  # fmt: skip
RESUMED = _counter("mlxsup_requests_resumed_total", "how often these answers continued after a "
                   "crash or a restart of their worker")  # fmt: skip
PROMPT_TOKENS = _counter("mlxsup_prompt_tokens_total", "tokens of their prompts")
CACHED_TOKENS = _counter("mlxsup_cached_prompt_tokens_total", "of these, the ones that were "
                         "computed before")  # fmt: skip
GENERATED_TOKENS = _counter("mlxsup_generation_tokens_total", "tokens that were generated for them")
UNREADABLE_CALLS = _counter("mlxsup_unreadable_tool_calls_total", "answers in which a tool call "
                            "cannot be read, so that it is left in the text")  # fmt: skip
UNFIT_CALLS = _counter("mlxsup_unfit_tool_calls_total", "answers with a call of a strict tool "
                       "whose arguments do not match its schema")  # fmt: skip
FIRST_TOKEN = _histogram(
    "mlxsup_time_to_first_token_seconds", "from the arrival to the first token"
)
PER_TOKEN = _histogram("mlxsup_time_per_output_token_seconds", "the mean time between two tokens "
                       "of an answer, pauses included", TOKEN_BUCKETS)  # fmt: skip
DURATION = _histogram("mlxsup_request_duration_seconds", "from the arrival to the end")
QUEUE_TIME = _histogram("mlxsup_queue_time_seconds", "in the queue")
PREFILL = _histogram("mlxsup_prefill_seconds", "from the first step to the first token")
RESPONSES = _counter("mlxsup_http_responses_total", "responses by their status, refusals included",
                     "status")  # fmt: skip

EVICTIONS = _counter("mlxsup_evictions_total", "processes of models that were ended to make room, "
                     "or because nobody used them", "model", "reason")  # fmt: skip

OF_REQUESTS = (
    EVICTIONS, REQUESTS, ERRORS, RESUMED, PROMPT_TOKENS, CACHED_TOKENS, GENERATED_TOKENS,
    UNREADABLE_CALLS, UNFIT_CALLS, FIRST_TOKEN, PER_TOKEN, DURATION, QUEUE_TIME, PREFILL, RESPONSES,
)  # fmt: skip
"""They begin at zero with each gateway."""
