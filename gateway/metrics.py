"""What Prometheus reads at `GET /metrics`: the list of all metrics, and their values.

Metrics of requests are counted at the end of each answer over HTTP, so a piece of a stream costs
nothing; those of the daemon are read off its status when they are asked for. Labels are bounded:
models of the configuration, words of an enumeration, numbers of statuses. Who asks is never one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from mlxsup.client import ConnectionLost, FinishReason, RequestError, Result
from mlxsup.protocol.states import Priority, State, Why, WorkerPhase
from mlxsup.protocol.tool_choice import UNFIT_CALL, UNREADABLE_CALL

from .names import names_of

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

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


Read = Callable[[Mapping[str, Any]], Iterable[tuple[tuple[str, ...], float | None]]]
"""Takes a model's row or the whole status; yields the values of labels and a number, which is None
if there is none."""


class Metric(NamedTuple):
    """One metric.

    Attributes:
        kind: `counter`, `gauge` or `histogram`.
        name: as it is exposed; a histogram adds `_bucket`, `_sum` and `_count`.
        says: one sentence for people.
        labels: their names.
        buckets: of a histogram, their upper bounds.
        read: finds its values in the status; of requests, each gateway counts them.
    """

    kind: str
    name: str
    says: str
    labels: tuple[str, ...] = ("model",)
    buckets: tuple[float, ...] = WAIT_BUCKETS
    read: Read = lambda status: ()


def _counter(name: str, says: str, *labels: str) -> Metric:
    return Metric(COUNTER, name, says, labels or ("model",))


def _histogram(name: str, says: str, buckets: tuple[float, ...] = WAIT_BUCKETS) -> Metric:
    return Metric(HISTOGRAM, name, says, buckets=buckets)


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
DRAFTED_TOKENS = _counter("mlxsup_drafted_tokens_total", "tokens that were guessed for them")
ACCEPTED_TOKENS = _counter("mlxsup_accepted_draft_tokens_total", "of these, the ones that are "
                           "tokens of their answers")  # fmt: skip
GENERATED_TOKENS = _counter("mlxsup_generation_tokens_total", "tokens that were generated for them")
UNFIT_CALLS = _counter("mlxsup_unfit_tool_calls_total", "answers with a call of a strict tool "
                       "whose arguments do not match its schema")  # fmt: skip
UNREADABLE_CALLS = _counter("mlxsup_unreadable_tool_calls_total", "answers in which a tool call "
                            "cannot be read, so that it is left in the text")  # fmt: skip
FIRST_TOKEN = _histogram(
    "mlxsup_time_to_first_token_seconds", "time from the arrival to the first token"
)
PER_TOKEN = _histogram("mlxsup_time_per_output_token_seconds", "the mean time between two tokens "
                       "of an answer, pauses included", TOKEN_BUCKETS)  # fmt: skip
DURATION = _histogram("mlxsup_request_duration_seconds", "time from the arrival to the end")
QUEUE_TIME = _histogram("mlxsup_queue_time_seconds", "time in the queue")
PREFILL = _histogram(
    "mlxsup_prefill_seconds", "time from the first step of the prompt to the first token"
)
RESPONSES = _counter("mlxsup_http_responses_total", "responses by their status, refusals included",
                     "status")  # fmt: skip

EVICTIONS = _counter("mlxsup_evictions_total", "processes of models that were ended to make room "
                     "or after their idle time", "model", "reason")  # fmt: skip

OF_REQUESTS = (
    EVICTIONS, REQUESTS, ERRORS, RESUMED, PROMPT_TOKENS, CACHED_TOKENS, GENERATED_TOKENS,
    DRAFTED_TOKENS, ACCEPTED_TOKENS,
    UNREADABLE_CALLS, UNFIT_CALLS, FIRST_TOKEN, PER_TOKEN, DURATION, QUEUE_TIME, PREFILL, RESPONSES,
)  # fmt: skip
"""They begin at zero with each gateway."""


# ---------------------------------------------------------------- of the status


MEMORY_KINDS = ("active", "cache", "peak", "kept", "prefix", "footprint", "reserved")
DOWNLOAD_PARTS = ("done", "total")
IN_A_STEP = (WorkerPhase.PREFILL, WorkerPhase.DECODE)


def _whole(kind: str, name: str, says: str, read: Read, *labels: str) -> Metric:
    return Metric(kind, name, says, labels, read=read)


def _model(kind: str, name: str, says: str, read: Read, *labels: str) -> Metric:
    return _whole(kind, name, says, read, "model", *labels)


def _at(*path: str) -> Read:
    """Return a reader of the number at a place."""

    def read(value: Mapping[str, Any]) -> Iterable[tuple[tuple[str, ...], float | None]]:
        found: Any = value
        for key in path:
            found = found[key]
        return [((), found)]

    return read


def _count(*keys: str) -> Read:
    """Return a reader of how many entries some lists have together."""
    return lambda row: [((), sum(len(row[key]) for key in keys))]


def _download(row: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float | None]]:
    """Yield the bytes of a download, while one is under way."""
    progress = row["progress"] or {}
    for part in DOWNLOAD_PARTS:
        if f"{part}_bytes" in progress:
            yield (part,), progress[f"{part}_bytes"]


def _rank(one: Mapping[str, Any]) -> tuple[str, str]:
    return str(one["rank"]), one["host"] or one["address"]


OF_DAEMON = (
    _whole(GAUGE, "mlxsup_build_info", "always 1", lambda s: [((s["version"],), 1)], "version"),
    _whole(GAUGE, "mlxsup_uptime_seconds", "since the daemon's start", _at("uptime_s")),
    _whole(GAUGE, "mlxsup_memory_budget_bytes", "what all models may take together",
           _at("memory", "budget_bytes")),
    _whole(GAUGE, "mlxsup_memory_effective_budget_bytes", "what is left of that while other "
           "programs need memory", _at("memory", "effective_budget_bytes")),
    _whole(GAUGE, "mlxsup_memory_reserved_bytes", "what is reserved of the budget",
           _at("memory", "reserved_bytes")),
    _whole(GAUGE, "mlxsup_memory_machine_bytes", "of the machine", _at("memory", "machine_bytes")),
    _whole(COUNTER, "mlxsup_gateway_restarts_total", "starts of the gateway after its first",
           lambda s: [((), s["gateway"]["restarts"])] if s["gateway"] else []),
)  # fmt: skip

OF_MODELS = (
    _model(GAUGE, "mlxsup_model_state", "1 for the state that the model is in, else 0",
           lambda row: [((state.value,), float(row["state"] == state)) for state in State],
           "state"),
    _model(GAUGE, "mlxsup_model_generation", "processes of it so far", _at("generation")),
    _model(COUNTER, "mlxsup_model_restarts_total", "starts that followed a crash",
           _at("restarts")),
    _model(COUNTER, "mlxsup_model_exits_total", "processes of it that have ended, however they did",
           lambda row: [((one["reason"], one["cause"]), one["count"]) for one in row["exits"]],
           "reason", "cause"),
    _model(GAUGE, "mlxsup_download_bytes", "of the files that are being downloaded for it: `done` "
           "and `total`", _download, "part"),
    _model(GAUGE, "mlxsup_model_load_seconds", "the phases of its latest load",
           lambda row: [((name,), took) for name, took in (row["load_phases_s"] or {}).items()],
           "phase"),
    _model(GAUGE, "mlxsup_requests_running", "requests in its batch", _count("running")),
    _model(GAUGE, "mlxsup_requests_waiting", "requests in its queue, by class",
           lambda row: [((word.value,), row["queued_per_class"].get(word.value, 0))
                        for word in Priority], "priority"),
    _model(GAUGE, "mlxsup_requests_paused", "requests that wait since they were paused, by hand or "
           "for others", _count("paused", "yielded")),
    _model(GAUGE, "mlxsup_requests_quarantined", "requests that are refused now, because they have "
           "crashed it again and again", _at("quarantined")),
    _model(GAUGE, "mlxsup_tokens_per_second", "tokens of all its answers", _at("tokens_per_s")),
    _model(COUNTER, "mlxsup_engine_seconds_total", "engine time that requests were charged",
           _at("engine_s")),
    _model(COUNTER, "mlxsup_repeated_seconds_total", "engine time for what was lost with a process "
           "or a row and computed again", _at("repeated_s")),
    _model(COUNTER, "mlxsup_steps_total", "steps of its process", _at("steps")),
    _model(GAUGE, "mlxsup_step_age_seconds", "for how long it has been in the step under way; 0 "
           "between steps",
           lambda row: [((), row["phase_s"] if row["phase"] in IN_A_STEP else 0)]),
    _model(GAUGE, "mlxsup_memory_bytes", "its memory, by kind",
           lambda row: [((kind,), row[f"{kind}_bytes"]) for kind in MEMORY_KINDS], "kind"),
    _model(GAUGE, "mlxsup_rank_ready", "1 if a host that serves it with others is ready, else 0",
           lambda row: [(_rank(one), float(one["state"] == "ready")) for one in row["ranks"]],
           "rank", "host"),
    _model(GAUGE, "mlxsup_rank_memory_bytes", "memory of its arrays on a host that serves it with "
           "others", lambda row: [(_rank(one), one["active_bytes"]) for one in row["ranks"]],
           "rank", "host"),
)  # fmt: skip

UP = Metric(GAUGE, "mlxsup_up", "1 if the daemon has answered, else 0", ())


# ---------------------------------------------------------------- values


LOST = "daemon_lost"
EVICTION_REASONS = frozenset({Why.EVICT, Why.SWAP, Why.MEMORY, Why.IDLE})
"""Why a process is ended although nobody has asked for that."""

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Meter:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[Metric, Counter] = {}
        self._histograms: dict[Metric, Histogram] = {}
        for one in OF_REQUESTS:
            about = one.name, one.says, one.labels
            if one.kind == HISTOGRAM:
                histogram = Histogram(*about, buckets=one.buckets, registry=self._registry)
                self._histograms[one] = histogram
            else:
                self._counters[one] = Counter(*about, registry=self._registry)
        # The model of each name that a daemon has vouched for; others are not repeated in labels.
        self._models: dict[str, str] = {}

    def know(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Note that the daemon has these models."""
        for row in rows:
            self._models |= dict.fromkeys([*names_of(row), *row["aliases"]], row["name"])

    def knows(self, name: str) -> bool:
        """True if it is known which model a name means."""
        return name in self._models

    def changed(self, change: Mapping[str, Any]) -> None:
        """Count a change of a model, as `Client.events` tells it."""
        is_ending = change["to"] == State.STOPPING and change["from"] != State.STOPPING
        if is_ending and change["why"] in EVICTION_REASONS:
            self._counters[EVICTIONS].labels(change["model"], change["why"]).inc()

    def answered(self, model: str, results: Sequence[Result]) -> None:
        """Count the answers to a request over HTTP."""
        for result in results:
            self._answered(self._label(model), result)

    def failed(self, model: str, error: RequestError | ConnectionLost) -> None:
        """Count an error of the daemon."""
        code = LOST if isinstance(error, ConnectionLost) else error.code.value
        self._counters[ERRORS].labels(self._label(model), code).inc()

    def left(self, model: str) -> None:
        """Count a client that has not waited for its answer."""
        self._counters[REQUESTS].labels(self._label(model), FinishReason.CANCELLED.value).inc()

    def responded(self, status: int) -> None:
        """Count a response that has begun."""
        self._counters[RESPONSES].labels(str(status)).inc()

    def page(self, status: Mapping[str, Any] | None) -> bytes:
        """Return all metrics, as Prometheus reads them.

        Args:
            status: of the daemon; None if it does not answer.
        """
        now = CollectorRegistry()
        now.register(_Status(status))
        return generate_latest(now) + generate_latest(self._registry)

    def _label(self, name: str) -> str:
        """Return the model that a name means, as the status calls it; empty if none is known."""
        return self._models.get(name, "")

    def _answered(self, model: str, result: Result) -> None:
        counters, usage, timings = self._counters, result.usage, result.timings
        counters[REQUESTS].labels(model, result.finish_reason.value).inc()
        for metric, count in (
            (RESUMED, result.resumed),
            (PROMPT_TOKENS, usage.prompt_tokens),
            (CACHED_TOKENS, usage.cached_tokens),
            (GENERATED_TOKENS, usage.completion_tokens),
            (DRAFTED_TOKENS, usage.drafted),
            (ACCEPTED_TOKENS, usage.draft_accepted),
            (UNREADABLE_CALLS, UNREADABLE_CALL in result.warnings),
            (UNFIT_CALLS, UNFIT_CALL in result.warnings),
        ):
            counters[metric].labels(model).inc(count)
        self._histograms[DURATION].labels(model).observe(timings.total_s)
        self._histograms[QUEUE_TIME].labels(model).observe(timings.queued_s)
        if not usage.completion_tokens:
            return  # it ended before its first token
        self._histograms[FIRST_TOKEN].labels(model).observe(timings.first_token_s)
        self._histograms[PREFILL].labels(model).observe(timings.prefill_s)
        if usage.completion_tokens > 1:
            between_s = (timings.total_s - timings.first_token_s) / (usage.completion_tokens - 1)
            self._histograms[PER_TOKEN].labels(model).observe(max(0.0, between_s))


class _Status(Collector):
    """Lets a registry print a status."""

    def __init__(self, status: Mapping[str, Any] | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Family]:
        """See `Collector`."""
        return families(self._status)


def families(status: Mapping[str, Any] | None) -> Iterator[Family]:
    """Return the metrics of a status; without one, only that the daemon has not answered."""
    yield _filled(UP._replace(read=lambda _: [((), status is not None)]), [((), {})])
    if status is not None:
        for metric in OF_DAEMON:
            yield _filled(metric, [((), status)])
        for metric in OF_MODELS:
            yield _filled(metric, [((row["name"],), row) for row in status["models"]])


def _filled(metric: Metric, sources: Iterable[tuple[tuple[str, ...], Mapping[str, Any]]]) -> Family:
    make = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
    family = make(metric.name, metric.says, labels=metric.labels)
    for labels, source in sources:
        for more, value in metric.read(source):
            if value is not None:
                family.add_metric([*labels, *more], float(value))
    return family
