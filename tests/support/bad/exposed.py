"""The metrics of a gateway, read with Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from mlxsup.gateway.metrics import COUNTER, HISTOGRAM, OF_DAEMON, OF_MODELS, OF_REQUESTS, UP, Metric

DECLARED: tuple[Metric, ...] = (UP, *OF_DAEMON, *OF_MODELS, *OF_REQUESTS)

Labels = dict[str, str]


class Exposed:
    """One answer to `GET /metrics`.

    Attributes:
        kinds: of each metric, by the name that is declared.
        samples: name, labels and value of each, in their order.

    Args:
        text: the body.
    """

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self.samples: list[tuple[str, Labels, float]] = []
        for family in text_string_to_metric_families(text):
            # The parser takes the ending of a counter's name off.
            name = family.name + ("_total" if family.type == COUNTER else "")
            assert name not in self.kinds, f"{name} is exposed twice"
            self.kinds[name] = family.type
            self.samples += [(one.name, one.labels, one.value) for one in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        """The value of the only sample with this name and exactly these labels; None: no such."""
        found = [value for one, has, value in self.samples if (one, has) == (name, labels)]
        assert len(found) <= 1
        return found[0] if found else None

    def labels(self, name: str, label: str) -> set[str]:
        """Every value that a label has."""
        return {has[label] for one, has, _ in self.samples if one == name}


def names_of(metric: Metric) -> Iterator[str]:
    """Return the names of its samples."""
    if metric.kind == HISTOGRAM:
        yield from (f"{metric.name}_{ending}" for ending in ("bucket", "sum", "count"))
    else:
        yield metric.name


def declared_samples() -> dict[str, set[str]]:
    """The labels of every sample that there can be, by its name."""
    found = {}
    for metric in DECLARED:
        for name in names_of(metric):
            found[name] = {*metric.labels, *(["le"] if name.endswith("_bucket") else [])}
    return found
