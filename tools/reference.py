"""What people look up, printed from the code: settings, commands, fields, errors, limits, metrics.

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
from mlxsup.client import RequestError
from mlxsup.gateway import limits
from mlxsup.gateway.anthropic.fields import MESSAGES_FIELDS
from mlxsup.gateway.errors import (
    NAMES,
    ROWS,
    anthropic_status,
    anthropic_type,
    failure_of,
    openai_body,
)
from mlxsup.gateway.fields import Field, Use
from mlxsup.gateway.metrics import OF_DAEMON, OF_MODELS, OF_REQUESTS, UP, Metric
from mlxsup.gateway.ollama import requests as ollama
from mlxsup.gateway.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, MESSAGE_FIELDS
from mlxsup.gateway.responses.fields import RESPONSE_FIELDS
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


def field_table(fields: Sequence[Field]) -> list[str]:
    """Return the fields of a request; those with the same fate and nothing to say share a row."""
    lines = ["| field | what becomes of it | |", "|---|---|---|"]
    for field in fields:
        if field.use in (Use.USED, Use.NEUTRAL, Use.HINT):
            says = field.says
            if field.neutral:
                says += f"; null or `{_shown(field.neutral[0])}`"
            lines.append(f"| `{field.name}` | {field.use} | {says} |")
    for use in (Use.PASSED, Use.IGNORED):
        together: dict[str, list[str]] = {}
        for field in fields:
            if field.use is use:
                together.setdefault(field.says, []).append(f"`{field.name}`")
        lines += [f"| {', '.join(names)} | {use} | {says} |" for says, names in together.items()]
    return lines


def error_table() -> list[str]:
    """Every error code of a daemon."""
    lines = [
        "| code | status | `type` | with Anthropic | `x-should-retry` |",
        "|---|---|---|---|---|",
    ]
    for code, row in ROWS.items():
        retry = "" if row.is_retryable is None else str(row.is_retryable).lower()
        after = ", with `Retry-After`" if row.retry_after_s is not None else ""
        name = NAMES.get(code, code.value)
        shown = f"`{code.value}`" if name == code.value else f"`{code.value}`, here `{name}`"
        failure = failure_of(RequestError(code, ""))
        kind = openai_body(failure)["error"]["type"]
        theirs = f"{anthropic_status(failure)} `{anthropic_type(failure)}`"
        lines.append(f"| {shown} | {row.status} | `{kind}` | {theirs} | {retry}{after} |")
    return lines


def limit_table() -> list[str]:
    """Return the limits of the gateway, and how it answers beyond them."""
    rows = (
        ("the body of a request", f"{limits.MAX_BODY_BYTES // 2**20} MiB, within "
         f"{limits.BODY_LIMIT_S:g} s", "413, 408"),
        ("messages, items of an input, parts of a message", f"{limits.MAX_ITEMS}", "400"),
        ("tools", f"{limits.MAX_TOOLS}", "400"),
        ("`chat_template_kwargs`", f"{limits.MAX_TEMPLATE_BYTES // 2**10} KiB", "400"),
        ("a body times its `n`", f"{limits.MAX_ASKED_BYTES // 2**20} MiB", "400"),
        (f"bodies of more than {limits.MAX_SMALL_BODY_BYTES // 2**10} KiB at once",
         f"{limits.MAX_HELD_BYTES // 2**20} MiB; {limits.MAX_WAITING_BODIES} that wait for a "
         "converter", "429 (Anthropic: 529), to be tried again"),
        ("to read one of these", f"{limits.CONVERT_LIMIT_S} s, "
         f"{limits.CONVERTER_MEMORY_BYTES // 2**30} GiB of memory (on Linux)", "503, 413"),
        ("the rest of a refused body", f"{limits.MAX_DISCARD_BYTES // 2**20} MiB, for "
         f"{limits.DISCARD_LIMIT_S:g} s", "the connection ends"),
        ("the head of a request", f"{limits.MAX_HEAD_BYTES // 2**10} KiB, within "
         f"{limits.HEAD_LIMIT_S:g} s", "431, or the connection is cut"),
        ("a connection without a request", f"{limits.HEAD_LIMIT_S:g} s before the first, "
         f"{limits.IDLE_LIMIT_S:g} s after one", "the connection is closed"),
        ("requests of one connection that wait", f"{limits.MAX_PIPELINED}",
         "the connection is cut"),
        ("what a reader leaves unread", f"64 KiB, for {limits.UNREAD_LIMIT_S:g} s",
         "the connection is cut, and its request cancelled"),
        ("followers of `/models/sse`", f"{limits.MAX_FOLLOWERS}, each up to "
         f"{limits.MAX_CHANGES_BEHIND} changes behind", "429, or the connection is cut"),
        ("answers to one request", f"{limits.MAX_CHOICES}: `n` for each prompt", "400"),
    )  # fmt: skip
    lines = ["| what | limit | beyond it |", "|---|---|---|"]
    return lines + [f"| {what} | {limit} | {beyond} |" for what, limit, beyond in rows]


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
    "chat": lambda: field_table(CHAT_FIELDS),
    "messages": lambda: field_table(MESSAGE_FIELDS),
    "completions": lambda: field_table(COMPLETION_FIELDS),
    "anthropic": lambda: field_table(MESSAGES_FIELDS),
    "ollama": lambda: field_table(ollama.CHAT_FIELDS),
    "ollama generate": lambda: field_table(ollama.GENERATE_FIELDS),
    "ollama options": lambda: field_table(ollama.OPTION_FIELDS),
    "responses": lambda: field_table(RESPONSE_FIELDS),
    "errors": error_table,
    "limits": limit_table,
    "daemon": lambda: metric_table((UP, *OF_DAEMON)),
    "models": lambda: metric_table(OF_MODELS),
    "requests": lambda: metric_table(OF_REQUESTS),
}
TITLES = {
    "chat": "Fields of `/v1/chat/completions`",
    "messages": "Fields of a message",
    "completions": "Fields of `/v1/completions`",
    "anthropic": "Fields of `/v1/messages`",
    "ollama": "Fields of `/api/chat`",
    "ollama generate": "Fields of `/api/generate`",
    "ollama options": "Options of both",
    "responses": "Fields of `/v1/responses`",
    "errors": "Errors over HTTP",
    "limits": "Limits of the gateway",
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


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace("'", '"') if not isinstance(value, str) else f'"{value}"'


if __name__ == "__main__":
    EXAMPLE.write_text(example())
    SCHEMA.write_text(schema())
    REFERENCE.parent.mkdir(exist_ok=True)
    REFERENCE.write_text(reference())
