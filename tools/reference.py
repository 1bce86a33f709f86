"""The example of a configuration and its schema, printed from the code.

`make reference` writes config.example.toml and cli/mlxsup.schema.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from mlxsup.supervisor.config.tables import (
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


def _is_table(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Table)


if __name__ == "__main__":
    EXAMPLE.write_text(example())
    SCHEMA.write_text(schema())
