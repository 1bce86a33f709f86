"""Counts what is answered over HTTP, and prints all metrics.

Answers are counted at their end, so a piece of a stream costs nothing, and no name becomes a label
because a request uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from mlxsup.client import ConnectionLost, FinishReason, RequestError, Result
from mlxsup.protocol.states import State, Why
from mlxsup.protocol.tool_choice import UNFIT_CALL, UNREADABLE_CALL

from . import names
from .names import HISTOGRAM, OF_REQUESTS, Metric
from .of_status import families

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
LOST = "daemon_lost"
EVICTIONS = frozenset({Why.EVICT, Why.SWAP, Why.MEMORY, Why.IDLE})
"""Why a process is ended although nobody has asked for that."""

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Meter:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[Metric, Counter] = {}
        self._histograms: dict[Metric, Histogram] = {}
        for metric in OF_REQUESTS:
            if metric.kind == HISTOGRAM:
                self._histograms[metric] = Histogram(
                    metric.name,
                    metric.says,
                    metric.labels,
                    buckets=metric.buckets,
                    registry=self._registry,
                )
            else:
                self._counters[metric] = Counter(
                    metric.name, metric.says, metric.labels, registry=self._registry
                )
        # The model of each name that a daemon has vouched for; others are not repeated in labels.
        self._models: dict[str, str] = {}

    def know(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The daemon has these models.

        Args:
            rows: of its status.
        """
        self._models.update((alias, row["name"]) for row in rows for alias in row["aliases"])
        self._models.update((row["name"], row["name"]) for row in rows)

    def knows(self, name: str) -> bool:
        """Whether it is known which model a name means."""
        return name in self._models

    def changed(self, change: Mapping[str, Any]) -> None:
        """A model has changed, as `Client.events` tells it."""
        is_ending = change["to"] == State.STOPPING and change["from"] != State.STOPPING
        if is_ending and change["why"] in EVICTIONS:
            self._counters[names.EVICTIONS].labels(change["model"], change["why"]).inc()

    def answered(self, model: str, results: Sequence[Result]) -> None:
        """A request over HTTP has its answers."""
        model = self._label(model)
        for result in results:
            self._answered(model, result)

    def failed(self, model: str, error: RequestError | ConnectionLost) -> None:
        """A request over HTTP gets an error of the daemon."""
        code = LOST if isinstance(error, ConnectionLost) else error.code.value
        known = self._label(model)
        self._counters[names.ERRORS].labels(known, code).inc()

    def left(self, model: str) -> None:
        """Who asked did not wait for the answer."""
        known = self._label(model)
        self._counters[names.REQUESTS].labels(known, FinishReason.CANCELLED.value).inc()

    def responded(self, status: int) -> None:
        """A response has begun."""
        self._counters[names.RESPONSES].labels(str(status)).inc()

    def page(self, status: Mapping[str, Any] | None) -> bytes:
        """All metrics, as Prometheus reads them.

        Args:
            status: of the daemon; None if it does not answer.
        """
        now = CollectorRegistry()
        now.register(_Status(status))
        return generate_latest(now) + generate_latest(self._registry)

    def _label(self, name: str) -> str:
        """The model that a name means, as the status calls it; empty if nobody knows."""
        return self._models.get(name, "")

    def _answered(self, model: str, result: Result) -> None:
        counters, usage, timings = self._counters, result.usage, result.timings
        counters[names.REQUESTS].labels(model, result.finish_reason.value).inc()
        for metric, count in (
            (names.RESUMED, result.resumed),
            (names.PROMPT_TOKENS, usage.prompt_tokens),
            (names.CACHED_TOKENS, usage.cached_tokens),
            (names.GENERATED_TOKENS, usage.completion_tokens),
            (names.UNREADABLE_CALLS, UNREADABLE_CALL in result.warnings),
            (names.UNFIT_CALLS, UNFIT_CALL in result.warnings),
        ):
            counters[metric].labels(model).inc(count)
        for metric, took_s in (
            (names.DURATION, timings.total_s),
            (names.QUEUE_TIME, timings.queued_s),
        ):
            self._histograms[metric].labels(model).observe(took_s)
        if not usage.completion_tokens:
            return  # it ended before its first token
        self._histograms[names.FIRST_TOKEN].labels(model).observe(timings.first_token_s)
        self._histograms[names.PREFILL].labels(model).observe(timings.prefill_s)
        if usage.completion_tokens > 1:
            between_s = (timings.total_s - timings.first_token_s) / (usage.completion_tokens - 1)
            self._histograms[names.PER_TOKEN].labels(model).observe(max(0.0, between_s))


class _Status(Collector):
    """Lets a registry print a status."""

    def __init__(self, status: Mapping[str, Any] | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Family]:
        """See `Collector`."""
        return families(self._status)
