"""Open requests as people read them: what each waits for, a sentence, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .output import Line
from .status import progress_text
from .tables import Column, table
from .text import bar, counted, format_duration, in_a_line

if TYPE_CHECKING:
    from mlxsup.client import Notice


QUEUED_WORDS = {
    "turn": "another request runs alone first",
    "limit": "this client already runs as many requests as it may",
    "load": "the model is loading",
    "memory": "the model waits for memory",
    "swap": "the model waits for its next turn",
    "restart": "the model is restarting",
    "backoff": "the model restarts after a crash",
    "download": "the download of the model failed and will be tried again",
}
"""The words for each reason to wait, other than for a row."""

PAUSED_WORDS = {
    "user": "`mlxsup resume` continues it",
    "turn": "another request runs alone first",
    "class": "a request of a higher priority runs first",
    "swap": "another model has its turn",
    "memory": "there is not enough memory right now",
}


def notice_text(
    notice: Notice, *, is_interrupted: bool = False, has_text: bool = False, has_bar: bool = False
) -> str:
    """Return `waiting: position 3, about 12s`, `loading the model, 40%` and the like.

    Args:
        notice: the latest one.
        is_interrupted: whether the model's process has ended since the latest text.
        has_text: whether some of the answer has come.
        has_bar: whether to draw a progress, in a line that is drawn again.
    """
    detail = notice.detail
    if is_interrupted and notice.kind != "paused":
        goal = "continues" if has_text else "answers"
        if notice.kind == "prefilling":
            done, total = _tokens(detail)
            return f"Reading the conversation again ({done * 100 // total}%), then it {goal}."
        share = f" ({detail['fraction']:.0%})" if detail.get("fraction") else ""
        return f"The model stopped. Reloading{share}, then it {goal}."
    if notice.kind == "queued":
        why = QUEUED_WORDS.get(str(detail.get("reason")), "")
        return f"waiting: position {detail.get('position')}{_and(why)}{_expected(detail)}"
    if notice.kind == "loading":
        progress = progress_text(detail, has_bar=has_bar)
        return f"loading the model{_and(progress)}"
    if notice.kind == "paused":
        words = PAUSED_WORDS.get(str(detail.get("reason")), "it will continue by itself")
        return f"paused: {words}{_expected(detail)}"
    if notice.kind == "prefilling":
        done, total = _tokens(detail)
        share = f"{bar(done / total)} " if has_bar else ""
        tokens = f"{done:,} of {counted(total, 'token')}"
        return f"reading the prompt: {share}{tokens} ({done * 100 // total}%)"
    return str(notice.kind)


def _and(text: str) -> str:
    return f", {text}" if text else ""


PARTS = 4
"""A progress is worth this many lines where lines stay."""


def notice_step(notice: Notice) -> tuple[object, ...]:
    """Return what makes a notice worth a line: a quarter of a progress, but not an estimate."""
    detail = notice.detail
    if notice.kind == "prefilling":
        done, total = _tokens(detail)
        return (notice.kind, done * PARTS // total)
    if notice.kind == "loading":
        fraction = detail.get("fraction")
        part = int(fraction * PARTS) if isinstance(fraction, int | float) else 0
        return (notice.kind, detail.get("phase") == "download", part)
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
    parts = [str(one["state"]), doing(one), tokens, str(one["client"])]
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
        doing(one),
    )


def doing(one: Mapping[str, Any]) -> str:
    """Return `place 3, about 12s`, `prompt 41%, about 5s` or how a pause ends."""
    parts = []
    if one["state"] == "waiting":
        parts.append(f"place {one['place']}")
        parts += filter(None, [QUEUED_WORDS.get(str(one["reason"]))])
    elif one["state"] == "paused":
        parts.append(PAUSED_WORDS["user"])
    elif one["prefill"] is not None:
        parts.append(f"prompt {one['prefill']:.0%}")
    expected_s = one["expected_s"]
    if expected_s is not None and expected_s >= LEAST_SHOWN_S:
        parts.append(f"about {format_duration(expected_s)}")
    return ", ".join(parts)
