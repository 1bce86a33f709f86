"""Metrics that are read off the daemon's status when somebody asks: of all requests, over HTTP or
not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from mlxsup.protocol.states import Priority, State, WorkerPhase

from .names import COUNTER, GAUGE, Metric

Read = Callable[[Mapping[str, Any]], Iterable[tuple[tuple[str, ...], float | None]]]
"""Takes a model's row or the whole status; yields the values of labels and a number, which is None
if there is none."""

MEMORY_KINDS = ("active", "cache", "peak", "kept", "prefix", "footprint", "reserved")
DOWNLOAD_PARTS = ("done", "total")
IN_A_STEP = (WorkerPhase.PREFILL, WorkerPhase.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusMetric(Metric):
    """A metric, and where it is in the status.

    Attributes:
        read: finds its values.
    """

    read: Read


def _model(kind: str, name: str, says: str, read: Read, *labels: str) -> StatusMetric:
    return StatusMetric(name=name, kind=kind, says=says, labels=("model", *labels), read=read)


def _whole(kind: str, name: str, says: str, read: Read, *labels: str) -> StatusMetric:
    return StatusMetric(name=name, kind=kind, says=says, labels=labels, read=read)


def _at(*path: str) -> Read:
    """The number at a place."""

    def read(value: Mapping[str, Any]) -> Iterable[tuple[tuple[str, ...], float | None]]:
        found: Any = value
        for key in path:
            found = found[key]
        return [((), found)]

    return read


def _count(*keys: str) -> Read:
    """How many entries some lists have together."""
    return lambda row: [((), sum(len(row[key]) for key in keys))]


def _last_exit(row: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float | None]]:
    if (last := row["last_exit"]) is not None:
        yield (last["reason"], last["cause"]), last["at"]


def _download(row: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float | None]]:
    """Only while one is under way."""
    progress = row["progress"] or {}
    for part in DOWNLOAD_PARTS:
        if f"{part}_bytes" in progress:
            yield (part,), progress[f"{part}_bytes"]


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
    _model(GAUGE, "mlxsup_model_last_exit_timestamp_seconds", "when its last process ended; why",
           _last_exit, "reason", "cause"),
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
)  # fmt: skip

UP = Metric(name="mlxsup_up", kind=GAUGE, says="1 if the daemon has answered, else 0", labels=())


def families(status: Mapping[str, Any] | None) -> Iterator[Family]:
    """The metrics of a status; without one, only that the daemon has not answered."""
    up = _family(UP)
    up.add_metric([], 0 if status is None else 1)
    yield up
    if status is None:
        return
    for metric in OF_DAEMON:
        yield _filled(metric, [((), status)])
    for metric in OF_MODELS:
        yield _filled(metric, [((row["name"],), row) for row in status["models"]])


def _filled(
    metric: StatusMetric, sources: Iterable[tuple[tuple[str, ...], Mapping[str, Any]]]
) -> Family:
    family = _family(metric)
    for labels, source in sources:
        for more, value in metric.read(source):
            if value is not None:
                family.add_metric([*labels, *more], float(value))
    return family


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    make = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
    return make(metric.name, metric.says, labels=metric.labels)
