"""What people look up, printed from the code: settings, commands and metrics.

`make reference` writes build/reference.md, config.example.toml and cli/mlxsup.schema.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_origin

import click
from pydantic.fields import FieldInfo

from mlxsup.cli.main import root
from mlxsup.gateway.metrics import OF_DAEMON, OF_MODELS, OF_REQUESTS, UP, Metric
from mlxsup.supervisor.config.tables import (
    SECTIONS,
    ClientTable,
    FileTable,
    GatewayTable,
    ModelTable,
    RestartTable,
    SamplingTable,
    SupervisorTable,
    Table,
)

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "config.example.toml"
REFERENCE = ROOT / "build" / "reference.md"
SCHEMA = ROOT / "cli" / "mlxsup.schema.json"

HEAD = """\
#:schema cli/mlxsup.schema.json
# The configuration of mlxsup: every key with its default. `mlxsup config check FILE` checks a file.
# Relative paths are relative to this file. Keys that end in _s also take "90s", "5m" or "1h".
"""
GATEWAY = "[gateway]"
GATEWAY_TITLE = "OpenAI's API over HTTP; needs pip install 'mlxsup[gateway]'"
CLIENTS = '[clients."*"]'
MODEL = "smollm2"
REPO = "mlx-community/SmolLM2-135M-Instruct"
COPY = f"""
[models.{MODEL}-copy]{{gap}}# the same folder again: a second process, with its own batch
path = "models/{MODEL}"
"""
COMMENT_COLUMN = 32
MAX_COLUMNS = 100

ENDINGS = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_dir": "folder"}
KINDS: dict[Any, str] = {bool: "yes or no", dict: "table"}
SIZE_WORDS = ("auto", "off")
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def keys(table: type[Table]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys of a table that hold values; each inner table is its own section."""
    for name, field in table.model_fields.items():
        if not _is_table(field):
            yield name, field


def shown_default(name: str, field: FieldInfo) -> str:
    """Return the default as it stands in a file."""
    value = field.get_default(call_default_factory=True)
    if name.endswith("_bytes"):
        return f'"{value // 2**20}MiB"'
    if value is True or value is False:
        return str(value).lower()
    if name.endswith("_s"):
        return f"{value:.1f}" if value else "0"
    return "{}" if value == {} else json.dumps(value)


def unit(name: str, field: FieldInfo) -> str:
    """Return the unit of a key's values, or else their kind."""
    given = _extra(field).get("unit")
    if given:
        return str(given)
    for ending, word in ENDINGS.items():
        if name.endswith(ending):
            return word
    if name == "path":
        return "folder"
    kind = get_origin(field.annotation) or field.annotation
    default = field.get_default(call_default_factory=True)
    if kind is not Literal and default in SIZE_WORDS:
        return "size"
    return KINDS.get(kind, "word")


def example() -> str:
    """Return the whole example file."""
    lines = [HEAD, *_section("[supervisor]", SupervisorTable), ""]
    # Not in effect: it needs an extra, and a port.
    lines += [f"# {line}" for line in _section(GATEWAY, GatewayTable, GATEWAY_TITLE)] + [""]
    clients = FileTable.model_fields["clients"].title
    lines += [_commented(CLIENTS, clients), *_section("", ClientTable), ""]
    lines += [_commented("[defaults]", FileTable.model_fields["defaults"].title), ""]
    lines += [*_section(f"[models.{MODEL}]", ModelTable), ""]
    lines += [*_section(f"[models.{MODEL}.restart]", RestartTable), ""]
    title = ModelTable.model_fields["sampling"].title
    lines += [_commented(f"[models.{MODEL}.sampling]", title)]
    lines += _section("", SamplingTable)
    gap = " " * (COMMENT_COLUMN - len(f"[models.{MODEL}-copy]"))
    return "\n".join(lines) + "\n" + COPY.format(gap=gap)


def setting_table(table: type[Table]) -> list[str]:
    """Return the keys of a table of the configuration, with default, unit, and what each does."""
    lines = ["| key | default | unit | what it does |", "|---|---|---|---|"]
    for name, field in keys(table):
        has_none = field.get_default(call_default_factory=True) is None
        default = "none" if has_none else f"`{shown_default(name, field)}`"
        what = f"{field.title}{_extra(field).get('more', '')}"
        what = re.sub(r"\b(window_s|max_queue_per_client)\b", r"`\1`", what)
        lines.append(f"| `{name}` | {default} | {unit(name, field)} | {what} |")
    return lines


def metric_table(metrics: Sequence[Metric]) -> list[str]:
    """Names, labels and meaning of metrics."""
    lines = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.says} |")
    return lines


def command_lines(command: click.Command = root, words: str = "mlxsup") -> list[str]:
    """Return the help of this command and of every one below it."""
    with click.Context(command, info_name=words, max_content_width=100) as context:
        lines = [f"### {words}", "", "```", *command.get_help(context).splitlines(), "```", ""]
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                lines += command_lines(child, f"{words} {name}")
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "daemon": lambda: metric_table((UP, *OF_DAEMON)),
    "models": lambda: metric_table(OF_MODELS),
    "requests": lambda: metric_table(OF_REQUESTS),
}
TITLES = {
    "daemon": "Metrics of the daemon",
    "models": "Metrics of models",
    "requests": "Metrics of requests",
}


def reference() -> str:
    """Return the whole reference."""
    lines = ["# Reference", "", "## Settings", ""]
    for heading, table in SECTIONS.items():
        lines += [f"### `{heading}`", "", *setting_table(table), ""]
    for name, print_table in TABLES.items():
        lines += [f"## {TITLES[name]}", "", *print_table(), ""]
    return "\n".join([*lines, "## Commands", "", *command_lines()])


def schema() -> str:
    """Return the schema of the configuration, for editors.

    For each key it says what the key does, what it takes, and its default. Rules between keys, and
    about keys that a file leaves out, are checked by `mlxsup config check` alone.
    """
    made = {"$schema": DIALECT, "title": "mlxsup", **FileTable.model_json_schema()}
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def _section(header: str, table: type[Table], title: str = "") -> list[str]:
    lines = [_commented(header, title) if title else header] if header else []
    for name, field in keys(table):
        if name == "repo":  # not in effect: it takes the place of path
            lines.append(f'# repo = "{REPO}"  # {field.title}')
            continue
        value = f'"models/{MODEL}"' if name == "path" else shown_default(name, field)
        lines.append(_commented(f"{name} = {value}", field.title))
    return lines


def _commented(text: str, comment: str | None) -> str:
    line = f"{text:<{COMMENT_COLUMN - 1}} # {comment}"
    assert len(line) <= MAX_COLUMNS, line
    return line


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _is_table(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Table)


if __name__ == "__main__":
    EXAMPLE.write_text(example())
    SCHEMA.write_text(schema())
    REFERENCE.parent.mkdir(exist_ok=True)
    REFERENCE.write_text(reference())
