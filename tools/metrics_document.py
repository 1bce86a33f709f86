"""The tables of docs/metrics.md and the Grafana board, out of the metrics of the gateway.

`python tools/metrics_document.py` writes both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.gateway.metrics.names import OF_REQUESTS, Metric
from mlxsup.gateway.metrics.of_status import OF_DAEMON, OF_MODELS, UP

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "metrics.md"
BOARD = DOCS / "metrics" / "grafana.json"
END = "<!-- end -->"

SOURCE = {"type": "prometheus", "uid": "${source}"}
MODELS = 'model=~"$model"'
RATE = "[$__rate_interval]"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the board.

    Attributes:
        title: above it.
        unit: of Grafana.
        queries: each with what it is called in the legend.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """The median and the 95th percentile of a histogram, over the models that are chosen."""
    return tuple(
        (f"histogram_quantile({q}, sum by (le, model) (rate({name}_bucket{{{MODELS}}}{RATE})))",
         f"{{{{model}}}} p{q * 100:.0f}")
        for q in (0.5, 0.95)
    )  # fmt: skip


def rate(name: str, by: str = "model") -> tuple[tuple[str, str], ...]:
    """How fast a counter grows."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return ((f"sum by ({by}) (rate({name}{{{MODELS}}}{RATE}))", legend),)


def plain(name: str, by: str = "model") -> tuple[tuple[str, str], ...]:
    """A gauge as it is."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return ((f"sum by ({by}) ({name}{{{MODELS}}})", legend),)


PANELS = (
    Panel("State", "none", ((f"mlxsup_model_state{{{MODELS}}} == 1", "{{model}} {{state}}"),)),
    Panel("Restarts after crashes", "none",
          ((f"increase(mlxsup_model_restarts_total{{{MODELS}}}{RATE})", "{{model}}"),)),
    Panel("Ends of processes", "none",
          ((f"sum by (model, reason, cause) (increase(mlxsup_model_exits_total{{{MODELS}}}{RATE}))",
            "{{model}} {{reason}} {{cause}}"),)),
    Panel("Evictions and swaps", "none",
          ((f"sum by (model, reason) (increase(mlxsup_evictions_total{{{MODELS}}}{RATE}))",
            "{{model}} {{reason}}"),)),
    Panel("Downloads", "bytes", plain("mlxsup_download_bytes", "model, part")),
    Panel("Step under way", "s", plain("mlxsup_step_age_seconds")),
    Panel("Running", "none", plain("mlxsup_requests_running")),
    Panel("Waiting", "none", plain("mlxsup_requests_waiting", "model, priority")),
    Panel("Paused and refused", "none", (
        (f"sum by (model) (mlxsup_requests_paused{{{MODELS}}})", "{{model}} paused"),
        (f"sum by (model) (mlxsup_requests_quarantined{{{MODELS}}})", "{{model}} quarantined"))),
    Panel("Tokens per second", "none", plain("mlxsup_tokens_per_second")),
    Panel("Time to first token", "s", quantiles("mlxsup_time_to_first_token_seconds")),
    Panel("Time per token", "s", quantiles("mlxsup_time_per_output_token_seconds")),
    Panel("In the queue", "s", quantiles("mlxsup_queue_time_seconds")),
    Panel("Whole answer", "s", quantiles("mlxsup_request_duration_seconds")),
    Panel("Prompt tokens from the cache", "percentunit", (
        (f"sum by (model) (rate(mlxsup_cached_prompt_tokens_total{{{MODELS}}}{RATE}))"
         f" / sum by (model) (rate(mlxsup_prompt_tokens_total{{{MODELS}}}{RATE}))", "{{model}}"),)),
    Panel("Answers", "reqps", rate("mlxsup_requests_total", "model, finish_reason")),
    Panel("Errors", "reqps", rate("mlxsup_request_errors_total", "model, code")),
    Panel("Responses", "reqps",
          ((f"sum by (status) (rate(mlxsup_http_responses_total{RATE}))", "{{status}}"),)),
    Panel("Memory of the models", "bytes",
          ((f'sum by (model) (mlxsup_memory_bytes{{{MODELS}, kind="footprint"}})', "{{model}}"),)),
    Panel("Memory in all", "bytes", (("mlxsup_memory_reserved_bytes", "reserved"),
                                     ("mlxsup_memory_budget_bytes", "budget"),
                                     ("mlxsup_memory_effective_budget_bytes", "budget now"),
                                     ("mlxsup_memory_machine_bytes", "machine"))),
    Panel("Engine time", "percentunit", rate("mlxsup_engine_seconds_total")),
)  # fmt: skip


def board() -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "uid": "mlxsup",
        "title": "mlxsup",
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [
            {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"},
            {"name": "model", "type": "query", "label": "Model", "datasource": SOURCE,
             "query": "label_values(mlxsup_model_generation, model)", "refresh": 2,
             "multi": True, "includeAll": True, "allValue": ".*",
             "current": {"text": "All", "value": "$__all"}},
        ]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }  # fmt: skip


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + nth), "datasource": SOURCE, "expr": query,
             "legendFormat": legend}
            for nth, (query, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip


def table(metrics: Sequence[Metric]) -> list[str]:
    """Names, labels and what they say."""
    lines = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.says} |")
    return lines


TABLES = {"daemon": (UP, *OF_DAEMON), "models": OF_MODELS, "requests": OF_REQUESTS}


def with_tables(page: str) -> str:
    """The page with the tables as the code has them now."""
    for name, metrics in TABLES.items():
        mark = f"<!-- {name}: tools/metrics_document.py -->"
        head, rest = page.split(mark, 1)
        _, after = rest.split(END, 1)
        printed = "\n".join(table(metrics))
        page = f"{head}{mark}\n\n{printed}\n\n{END}{after}"
    return page


def board_text() -> str:
    """The board as it is written to its file."""
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    BOARD.write_text(board_text())
