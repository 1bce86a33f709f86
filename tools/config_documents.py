"""config.example.toml and the tables of docs/operations.md, out of the tables of the configuration.

`python tools/config_documents.py` writes both, and cli/mlxsup.schema.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from mlxsup.supervisor.config.client_table import ClientTable
from mlxsup.supervisor.config.file_table import FileTable
from mlxsup.supervisor.config.gateway_table import GatewayTable
from mlxsup.supervisor.config.kinds import Table
from mlxsup.supervisor.config.preset_table import PresetTable
from mlxsup.supervisor.config.sampling_table import SamplingTable
from mlxsup.supervisor.config.schema import config_schema
from mlxsup.supervisor.config.tables import (
    ModelTable,
    RestartTable,
    SupervisorTable,
)

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "config.example.toml"
OPERATIONS = ROOT / "docs" / "operations.md"
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

SECTIONS: tuple[tuple[str, type[Table]], ...] = (
    ("[supervisor]", SupervisorTable),
    ("[gateway]", GatewayTable),
    ("[clients.NAME]", ClientTable),
    ("[models.NAME]", ModelTable),
    ("[models.NAME.restart]", RestartTable),
    ("[models.NAME.sampling]", SamplingTable),
    ("[models.NAME.presets.NAME]", PresetTable),
)
ENDINGS = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_dir": "folder"}
KINDS: dict[Any, str] = {bool: "yes or no", dict: "table"}
SIZE_WORDS = ("auto", "off")


def keys(table: type[Table]) -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a table that hold values; each inner table is its own section."""
    for name, field in table.model_fields.items():
        if not _is_table(field):
            yield name, field


def shown_default(name: str, field: FieldInfo) -> str:
    """The default as it stands in a file."""
    value = field.get_default(call_default_factory=True)
    if name.endswith("_bytes"):
        return f'"{value // 2**20}MiB"'
    if value is True or value is False:
        return str(value).lower()
    if name.endswith("_s"):
        return f"{value:.1f}" if value else "0"
    return "{}" if value == {} else json.dumps(value)


def unit(name: str, field: FieldInfo) -> str:
    """What its values are counted in."""
    given = _extra(field).get("unit")
    if given:
        return str(given)
    for ending, word in ENDINGS.items():
        if name.endswith(ending):
            return word
    if name == "path":
        return "folder"
    default = field.get_default(call_default_factory=True)
    if default in SIZE_WORDS:
        return "size"
    return KINDS.get(get_origin(field.annotation) or field.annotation, "word")


def example() -> str:
    """The whole example file."""
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


def operations_table(table: type[Table]) -> list[str]:
    """A table of the page: key, default, unit, and what it does."""
    lines = ["| key | default | unit | what it does |", "|---|---|---|---|"]
    for name, field in keys(table):
        has_none = field.get_default(call_default_factory=True) is None
        default = "none" if has_none else f"`{shown_default(name, field)}`"
        what = f"{field.title}{_extra(field).get('more', '')}"
        what = re.sub(r"\b(window_s|max_queue_per_client)\b", r"`\1`", what)
        lines.append(f"| `{name}` | {default} | {unit(name, field)} | {what} |")
    return lines


def with_tables(page: str) -> str:
    """The page with the tables as the code has them now."""
    for heading, table in SECTIONS:
        head, rest = page.split(f"### `{heading}`\n", 1)
        before, _, after = re.split(r"((?:^\|.*\n)+)", rest, maxsplit=1, flags=re.MULTILINE)
        printed = "\n".join(operations_table(table)) + "\n"
        page = f"{head}### `{heading}`\n{before}{printed}{after}"
    return page


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
    OPERATIONS.write_text(with_tables(OPERATIONS.read_text()))
    text = json.dumps(config_schema(), indent=2, ensure_ascii=False)
    SCHEMA.write_text(text + "\n")
