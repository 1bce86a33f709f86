"""Open requests as people read them: what each waits for, a sentence, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .output import Line
from .status import progress_text
from .tables import Column, table
from .text import counted, format_duration, in_a_line

if TYPE_CHECKING:
    from mlxsup.client import Notice


QUEUED_WORDS = {
    "turn": ", another has its turn",
    "limit": ", its client runs as many as it may",
    "memory": ", the model waits for memory",
    "swap": ", the model waits for its next turn",
    "restart": ", the model restarts",
    "backoff": ", the model restarts after a crash",
    "download": ", the model's download failed and is tried again",
}
"""What a request waits for besides a row or a load, which has a notice of another kind."""

PAUSED_WORDS = {
    "user": "until `mlxsup resume`",
    "turn": "another has its turn",
    "class": "an interactive request has its row",
    "swap": "its model makes room for another one until its next turn",
    "memory": "there is too little memory for it now",
}

INTERRUPTED = "the worker ended; the answer continues when it is back"


def notice_text(notice: Notice) -> str:
    """Return `queued, position 3, about 12s`, `loading, weights 40%` and the like."""
    detail = notice.detail
    if notice.kind == "queued":
        why = QUEUED_WORDS.get(str(detail.get("reason")), "")
        return f"queued, position {detail.get('position')}{why}{_expected(detail)}"
    if notice.kind == "loading":
        progress = progress_text(detail) or str(detail.get("state", "")).lower()
        return f"loading, {progress}" if progress else "loading"
    if notice.kind == "paused":
        words = PAUSED_WORDS.get(str(detail.get("reason")), "it continues by itself")
        return f"paused, {words}{_expected(detail)}"
    if notice.kind == "prefilling":
        done, total = _tokens(detail)
        return f"reading the prompt, {done} of {total} tokens ({done * 100 // total}%)"
    return str(notice.kind)


def notice_step(notice: Notice) -> tuple[object, ...]:
    """Return what makes a notice worth a line: a tenth of a progress, but not an estimate."""
    detail = notice.detail
    if notice.kind == "prefilling":
        done, total = _tokens(detail)
        return (notice.kind, done * 10 // total)
    if notice.kind == "loading":
        fraction = detail.get("fraction")
        tenth = int(fraction * 10) if isinstance(fraction, int | float) else 0
        return (notice.kind, detail.get("state"), detail.get("phase"), tenth)
    return (notice.kind, detail.get("position"), detail.get("reason"))


def _tokens(detail: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many tokens of a prompt have been read, and of how many."""
    done, total = detail.get("done"), detail.get("total")
    return (done if type(done) is int else 0), max(total if type(total) is int else 0, 1)


def _expected(detail: Mapping[str, Any]) -> str:
    """Return `, about 12s`, if that is known and worth saying."""
    expected_s = detail.get("expected_s")
    if not isinstance(expected_s, int | float) or expected_s < 1:
        return ""
    return f", about {format_duration(expected_s)}"


COLUMNS = (
    Column("#", is_right=True),
    Column("ID", given_up=6),
    Column("MODEL", given_up=5),
    Column("CLIENT", least=8, given_up=3),
    Column("STATE"),
    Column("TOKENS", is_right=True, given_up=2),
    Column("TOK/S", is_right=True, given_up=4),
    Column("ENGINE", is_right=True, given_up=1),
    Column("DOING", least=22),
)

LEAST_SHOWN_S = 1.0
"""A shorter wait is not worth saying."""


def request_lines(requests: Sequence[Mapping[str, Any]], width: int | None) -> list[Line]:
    """Return the line of the headers, then one for each request.

    Args:
        requests: entries of `requests`.
        width: columns of the terminal; None to cut nothing.
    """
    return table(COLUMNS, [_cells(one) for one in requests], width)


def request_line(one: Mapping[str, Any]) -> str:
    """Return one request as a sentence: `5f0c12ab-1 (#12) of smollm2: answering, 12 tokens`."""
    sent = one["tokens_sent"]
    tokens = counted(sent, "token") if sent else ""
    parts = [str(one["state"]), _doing(one), tokens, str(one["client"])]
    said = ", ".join(part for part in parts if part)
    return in_a_line(f"{one['id']} ({one['number']}) of {one['model']}: {said}")


def stage_line(value: Mapping[str, Any]) -> str:
    """Return `5f0c12ab-1 (#12) of smollm2: paused after 12 tokens`."""
    tokens = counted(value["tokens_sent"], "token")
    named = f"{value['request']} ({value['number']}) of {value['model']}"
    return in_a_line(f"{named}: {value['stage']} after {tokens}")


def _cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    rate = one["tokens_per_s"]
    return (
        str(one["number"]).removeprefix("#"),
        str(one["id"]),
        str(one["model"]),
        str(one["client"]),
        str(one["state"]),
        str(one["tokens_sent"]),
        f"{rate:.1f}" if rate else "-",
        f"{one['engine_s']:.1f}s",
        _doing(one),
    )


def _doing(one: Mapping[str, Any]) -> str:
    """Return `place 3, about 12s`, `prompt 41%, about 5s` or `until mlxsup resume`."""
    parts = []
    if one["state"] == "waiting":
        parts.append(f"place {one['place']}{QUEUED_WORDS.get(str(one['reason']), '')}")
    elif one["state"] == "paused":
        parts.append(PAUSED_WORDS["user"])
    elif one["prefill"] is not None:
        parts.append(f"prompt {one['prefill']:.0%}")
    expected_s = one["expected_s"]
    if expected_s is not None and expected_s >= LEAST_SHOWN_S:
        parts.append(f"about {format_duration(expected_s)}")
    return ", ".join(parts)
