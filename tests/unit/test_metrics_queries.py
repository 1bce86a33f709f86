"""The queries of docs/metrics, the board and the alert rules, ask for metrics that exist."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.gateway.metrics import DOWNLOAD_PARTS, EVICTION_REASONS, MEMORY_KINDS
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import DeathCause, ExitReason, State

from support.bad.exposed import declared_samples

DOCS = Path(__file__).parents[2] / "docs"
BOARD: dict[str, Any] = json.loads((DOCS / "metrics" / "grafana.json").read_text())
RULES: list[dict[str, Any]] = importlib.import_module("yaml").safe_load(
    (DOCS / "metrics" / "alerts.yml").read_text()
)["groups"][0]["rules"]

SAMPLE = re.compile(r"\b(mlxsup_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
BY = re.compile(r"\bby \(([^)]*)\)")
BOUNDED: dict[str, set[str]] = {
    "state": set(State), "kind": set(MEMORY_KINDS), "code": {*ErrorCode, "daemon_lost"},
    "status": {"401"}, "cause": set(DeathCause), "part": set(DOWNLOAD_PARTS),
    "reason": {*EVICTION_REASONS, *ExitReason},
}  # fmt: skip
"""The values that a query may ask a label for."""


def expressions() -> Iterator[tuple[str, str]]:
    """Every query, with where it stands."""
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield f"board: {panel['title']}", target["expr"]
    for rule in RULES:
        yield f"rule: {rule['alert']}", rule["expr"]


def problems(expression: str) -> list[str]:
    """Return a line for each thing of a query that is not exposed."""
    known, found, used = declared_samples(), [], set()
    for name, selector in SAMPLE.findall(expression):
        if name not in known:
            found.append(f"no metric {name}")
            continue
        used |= known[name]
        for label, value in MATCHER.findall(selector):
            if label not in known[name]:
                found.append(f"{name} has no label {label}")
            words = set() if value.startswith("$") else set(value.split("|"))
            if not words <= BOUNDED.get(label, words):
                found.append(f"{label} is never {value}")
    grouped = {label.strip() for labels in BY.findall(expression) for label in labels.split(",")}
    found += [f"nothing there has a label {label}" for label in sorted(grouped - used)]
    return found


def test_queries_parse_and_name_existing_metrics_and_labels() -> None:
    promql = pytest.importorskip("promql_parser")
    for where, expression in expressions():
        assert SAMPLE.search(expression), f"{where} asks for nothing of ours"
        assert (where, problems(expression)) == (where, [])
        assert promql.parse(expression.replace("$__rate_interval", "5m")), where


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("mlxsup_nothing", "no metric mlxsup_nothing"),
        ("mlxsup_queue_time_seconds", "no metric mlxsup_queue_time_seconds"),
        ('mlxsup_up{model="a"}', "mlxsup_up has no label model"),
        ('mlxsup_model_state{state="BROKEN"}', "state is never BROKEN"),
        ("sum by (le, model) (rate(mlxsup_steps_total[5m]))", "nothing there has a label le"),
    ],
)
def test_unknown_metric_or_label_is_found(expression: str, problem: str) -> None:
    assert problems(expression) == [problem]


def test_counters_are_read_as_rates() -> None:
    for where, expression in expressions():
        for match in re.finditer(r"mlxsup_\w+_(?:total|bucket|sum|count)\b", expression):
            before = expression[: match.start()]
            assert re.search(r"(rate|increase)\($", before), (where, match.group())


def test_rules_have_severity_and_text() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        given = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        by = BY.findall(rule["expr"])
        left = {label.strip() for label in by[0].split(",")} - {"le"} if by else {"model"}
        assert given <= left, rule["alert"]


ENDS_OF_MODELS = (
    "mlxsup_model_state", "mlxsup_model_restarts_total", "mlxsup_model_exits_total",
    "mlxsup_requests_quarantined", "mlxsup_step_age_seconds", "mlxsup_repeated_seconds_total",
)  # fmt: skip
ENDS_OF_DAEMONS = ("mlxsup_up", "resets(mlxsup_uptime_seconds")


def test_rule_about_an_exit_names_mlxsup_why() -> None:
    found = set()
    for rule in RULES:
        said = rule["annotations"]["description"]
        for sign in (*ENDS_OF_MODELS, *ENDS_OF_DAEMONS):
            if re.search(rf"\b{re.escape(sign)}\b", rule["expr"]):
                model = " {{ $labels.model }}" if sign in ENDS_OF_MODELS else " says"
                assert f"mlxsup why{model}" in said, rule["alert"]
                found.add(sign)
    assert found == {*ENDS_OF_MODELS, *ENDS_OF_DAEMONS}


def test_rules_stay_quiet_on_a_healthy_daemon() -> None:
    """And not for a daemon with nothing wrong, of which every metric but those of life is 0."""
    for rule in RULES:
        compared = re.findall(r"(==|[<>]=?) ([\d.]+)", rule["expr"])
        assert compared or rule["expr"].startswith("absent("), rule["alert"]
        is_of_life = any(one in rule["expr"] for one in ("mlxsup_up", "changes("))
        for sign, number in compared:
            allowed = {"==", ">="} if is_of_life else {">", ">=", "=="}
            assert sign in allowed, rule["alert"]
            assert is_of_life or sign == ">" or float(number) > 0, rule["alert"]


def test_panels_do_not_overlap() -> None:
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in BOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({one["id"] for one in BOARD["panels"]}) == len(places)
