"""The tables of docs/gateway.md, out of the tables of the gateway.

`python tools/gateway_document.py` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxsup.client import RequestError
from mlxsup.gateway import limits
from mlxsup.gateway.anthropic.errors import kind_of, status_of
from mlxsup.gateway.anthropic.fields import MESSAGES_FIELDS
from mlxsup.gateway.fields import Field, Use
from mlxsup.gateway.openai.errors import NAMES, ROWS, failure_of
from mlxsup.gateway.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MESSAGE_FIELDS,
)
from mlxsup.gateway.responses.fields import RESPONSE_FIELDS

PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"
END = "<!-- end -->"


def field_table(fields: Sequence[Field]) -> list[str]:
    """The fields of a request, those with the same fate and nothing to say in one row."""
    lines = ["| field | what becomes of it | |", "|---|---|---|"]
    for field in fields:
        if field.use in (Use.USED, Use.NEUTRAL):
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
        theirs = f"{status_of(failure)} `{kind_of(failure)}`"
        lines.append(f"| {shown} | {row.status} | `{row.kind}` | {theirs} | {retry}{after} |")
    return lines


def limit_table() -> list[str]:
    """What it puts up with."""
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


TABLES = {
    "chat": lambda: field_table(CHAT_FIELDS),
    "messages": lambda: field_table(MESSAGE_FIELDS),
    "completions": lambda: field_table(COMPLETION_FIELDS),
    "anthropic": lambda: field_table(MESSAGES_FIELDS),
    "responses": lambda: field_table(RESPONSE_FIELDS),
    "errors": error_table,
    "limits": limit_table,
}


def with_tables(page: str) -> str:
    """The page with the tables as the code has them now."""
    for name, table in TABLES.items():
        mark = f"<!-- {name}: tools/gateway_document.py -->"
        head, rest = page.split(mark, 1)
        _, after = rest.split(END, 1)
        printed = "\n".join(table())
        page = f"{head}{mark}\n\n{printed}\n\n{END}{after}"
    return page


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace("'", '"') if not isinstance(value, str) else f'"{value}"'


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
