"""A daemon's status as people read it: the table of models, notes on each, and the lines below."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxsup.protocol.tasks import NOUNS, Task
from mlxsup.protocol.text import rank_name
from mlxsup.protocol.version import VERSION

from .output import Line, width_of
from .tables import GAP, Column, fitting, table, text_lines
from .text import INDENT, bar, cell_len, counted, cut, format_bytes, format_duration, in_a_line
from .writer import for_terminal

COLUMNS = (
    Column("MODEL", least=8),
    Column("STATE"),
    Column("UPTIME", is_right=True, given_up=4),
    Column("PID", is_right=True, given_up=2),
    Column("RESTARTS", is_right=True, given_up=3),
    Column("RUN/WAIT", is_right=True, given_up=7),
    Column("TOK/S", is_right=True, given_up=6),
    Column("MEMORY", is_right=True, given_up=5),
    Column("CONTEXT", is_right=True, given_up=1),
)
NOTE = Column("NOTE")

STATE_STYLES = {
    "READY": "green",
    "LOADING": "yellow",
    "PENDING": "yellow",
    "DRAINING": "yellow",
    "STOPPING": "yellow",
    "BACKOFF": "red",
    "FAILED": "bold red",
    "STOPPED": "dim",
}


def models_lines(models: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Yield the lines of `models_table` for standard output."""
    for group in models_table(models, width_of(sys.stdout)):
        yield from group


def models_table(models: Sequence[Mapping[str, Any]], width: int | None) -> list[list[Line]]:
    """Return the line of the headers, then for each model its row and what belongs below it.

    A note that has no room in its row follows it, because a cause is too important to be cut, and
    so do the last words of the process of a model that has FAILED.

    Args:
        models: entries of `models` in the daemon's status.
        width: columns of the terminal; None to cut nothing.
    """
    now = time.time()
    rows = [_cells(model) for model in models]
    notes = [in_a_line(note_of(model, now)) for model in models]
    plain = [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in rows]
    longest = max((cell_len(note) for note in notes), default=0)
    whole = sum(fitting(COLUMNS, plain, None).values()) + longest
    # Columns move closer together if not every note has room.
    gap = GAP if width is None or whole + GAP * len(COLUMNS) <= width else 1
    widths = fitting(COLUMNS, plain, width, gap)
    room = None if width is None else width - sum(widths.values()) - gap * len(widths)
    if room is not None and room < len(NOTE.title):
        lines = table(COLUMNS, rows, width, gap)
        inline = [False] * len(rows)
    else:
        inline = [room is None or cell_len(note) <= room for note in notes]
        shown = [note if fits else "" for note, fits in zip(notes, inline, strict=True)]
        noted = [[*row, note] for row, note in zip(rows, shown, strict=True)]
        lines = table((*COLUMNS, NOTE), noted, width, gap)
    groups = [[line] for line in lines]
    for group, model, note, fits in zip(groups[1:], models, notes, inline, strict=True):
        group += [] if fits else text_lines(note, width, indent=INDENT)
        if last := _last_words(model):
            group.append([(for_terminal(cut(in_a_line(f"  {last}"), width)), "dim")])
    return groups


def _cells(model: Mapping[str, Any]) -> list[str | tuple[str, str]]:
    rate, pid, state = model.get("tokens_per_s"), model.get("pid"), str(model["state"])
    return [
        str(model["name"]),
        (state, STATE_STYLES.get(state, "")),
        format_duration(model.get("loaded_for_s")),
        str(pid) if pid else "-",
        str(model.get("restarts", 0)),
        f"{len(model.get('running') or [])}/{model.get('queued', 0)}",
        f"{rate:.1f}" if rate else "-",
        format_bytes(model.get("footprint_bytes") or None),
        str(model.get("context_length") or "-"),
    ]


def _last_words(model: Mapping[str, Any]) -> str:
    last_exit = model.get("last_exit")
    if model["state"] != "FAILED" or last_exit is None:
        return ""
    return str(last_exit.get("last_words", ""))


def lines_below(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said about memory, who shares it, the warm pool and the HTTP gateway.

    Args:
        value: the daemon's status.
    """
    if line := _memory_line(value):
        yield line
    yield from remarks(value)


def stopping_words(running: int, limit_s: float, hurry: str) -> str:
    """Return what a daemon that was asked to end still waits for.

    Args:
        running: requests that have not finished.
        limit_s: how long they may take; 0 if they are cut off.
        hurry: how to cut them off.
    """
    requests = counted(running, "running request")
    if not running:
        return "ending every process"
    if not limit_s:
        return f"cutting off {requests}"
    them = "it" if running == 1 else "them"
    limit = format_duration(limit_s)
    return f"{requests} may take up to {limit} to finish; {hurry} to cut {them} off"


STOP_NOW = "run `mlxsup stop --now`"


def amounts(value: Mapping[str, Any]) -> str:
    """Return `3.10 GiB used, may grow to 5.00 GiB of 10.00 GiB`: what the processes of models take,
    what is set aside for them, and the budget; without a budget, the memory of the machine."""
    memory = value.get("memory") or {}
    used, grown = memory.get("used_bytes") or 0, memory.get("may_grow_to_bytes") or 0
    parts = [f"{format_bytes(used)} used" if grown else "none used"]
    if memory.get("budget_bytes") is not None and grown:
        parts.append(f"may grow to {format_bytes(grown)}")
    whole = memory.get("budget_bytes") or memory.get("machine_bytes") or 0
    return f"{', '.join(parts)} of {format_bytes(whole)}"


def _memory_line(value: Mapping[str, Any]) -> str:
    """Return the amounts, and what others leave of the budget if that is less; empty without a
    budget."""
    memory = value.get("memory") or {}
    if memory.get("budget_bytes") is None:
        return ""
    line = f"memory: {amounts(value)}"
    if memory.get("shortage"):
        line += f"; other programs leave {format_bytes(memory['effective_budget_bytes'])}"
    return line


def remarks(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below the table but the first one about memory."""
    if value.get("version", VERSION) != VERSION:
        yield (
            f"the daemon is mlxsup {value['version']}, this command {VERSION}: stop the daemon, and"
            " start it again"
        )
    if stopping := value.get("stopping"):
        running, limit_s = stopping["running"], stopping["limit_s"]
        yield f"the daemon is stopping: {stopping_words(running, limit_s, STOP_NOW)}"
    if (value.get("memory") or {}).get("budget_bytes") is not None:
        yield from _memory_lines(value)
    yield from _sharing_lines(value)
    yield from _warm_pool_lines(value)
    yield from _gateway_lines(value)


def _memory_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield that a model loses something by the lack of memory, and which ones ran out of it."""
    memory = value["memory"]
    if memory.get("is_short"):
        yield f"memory is short: {memory['shortage']}"
    if memory.get("over_bytes"):
        over = format_bytes(memory["over_bytes"])
        yield f"models may grow to {over} more than that: some are unloaded once they can be"
    for model in value["models"]:
        if wait := model.get("memory_wait"):
            waits = format_duration(wait["waits_s"])
            yield f"{model['name']} has waited for memory for {waits}: it {wait['reason']}"
        if model.get("raised_bytes"):
            more, needed = (format_bytes(model[key]) for key in ("raised_bytes", "needed_bytes"))
            yield (
                f"{model['name']} needs at least {needed}, which includes {more} because it ran "
                "out of memory before"
            )


def _sharing_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield which clients wait, if any, and the shares of several models that have computed."""
    clients = (value.get("queue") or {}).get("clients") or {}
    waiting = []
    for name, client in clients.items():
        running = f" ({client['running']} running)" if client["running"] else ""
        waiting += [f"{name} {client['waiting']}{running}"] if client["waiting"] else []
    if waiting:
        yield f"waiting: {', '.join(waiting)}"
    shares = {model["name"]: model.get("share") for model in value["models"]}
    parts = [f"{name} {share:.0%}" for name, share in shares.items() if share]
    if len(parts) > 1:
        yield f"engine time: {', '.join(parts)}"


def _warm_pool_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield `warm pool: 1 waiting of 1 prewarmed worker, 210.0 MiB`, if one is there or wanted."""
    pool = value.get("warm_pool") or {}
    workers, wanted = pool.get("workers") or [], pool.get("wanted") or 0
    if not workers and not wanted:
        return
    counts = Counter(worker["state"] for worker in workers)
    states = ", ".join(f"{count} {state}" for state, count in counts.items()) or "none yet"
    held = format_bytes(sum(worker["reserved_bytes"] for worker in workers))
    line = f"warm pool: {states} of {counted(wanted, 'prewarmed worker')}, {held}"
    if pool.get("retry_in_s") is not None:
        line += f"; one crashed, and the next starts in {format_duration(pool['retry_in_s'])}"
    yield line


def _gateway_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield `http: http://127.0.0.1:8484 (pid 4711)`, or why the gateway is not there."""
    gateway = value.get("gateway")
    if not gateway:
        return
    if gateway["state"] == "listening":
        line = f"http: {gateway['url']} (pid {gateway['pid']})"
        if gateway["restarts"]:
            line += (
                f", started {gateway['restarts'] + 1} times, the last because {gateway['cause']}"
            )
        yield line
        return
    line = f"http: {gateway['state']}"
    if gateway["ends_in_a_row"] > 1:
        line += f", {gateway['ends_in_a_row']} times in a row"
    if gateway["cause"]:
        line += f": {gateway['cause']}"
    if gateway["retry_in_s"] is not None:
        line += f"; next attempt in {format_duration(gateway['retry_in_s'])}"
    yield line


EXIT_WORDS = {
    "asked": "",
    "crash": "crashed",
    "stall": "stalled",
    "load_error": "load failed",
    "spawn_error": "could not be started",
    "version": "another version",
    "internal": "internal error",
}

SILENT_S = 2.0
"""A rank sends a beat each second; after five without one its group ends."""

BATCHING_WORDS = {
    "serial_prefill": "reads prompts one by one",
    "one_row": "runs one request at a time",
}


def note_of(model: Mapping[str, Any], now: float) -> str:
    """Return load progress, retry time or the last cause, as one phrase.

    If there is none of them, it says who waits in which class, how rows are batched and how many
    warnings there are. How far a long prompt has been read comes first; what a pinned model keeps
    though it is STOPPED, how many requests are paused, how many gave way to others and when an idle
    model is unloaded come last.
    """
    parts = []
    progress = progress_text(model.get("progress"))
    if progress and model["state"] in ("LOADING", "PENDING"):
        parts.append(progress)
    retry_in_s = model.get("retry_in_s")
    if model["state"] == "BACKOFF" and retry_in_s is not None:
        parts.append(f"retry in {format_duration(retry_in_s)}")
    cause, given = cause_of(model.get("last_exit"), now), str(model.get("cause") or "")
    is_waiting = model["state"] in ("PENDING", "BACKOFF") and bool(given)
    if is_waiting or (model["state"] == "FAILED" and not cause):
        cause = given
    if cause and (not parts or is_waiting or model["state"] == "BACKOFF"):
        parts.append(cause)
    parts = [*_reading_words(model), *(parts or _quiet_words(model)), *_rank_words(model)]
    if model.get("pinned") and model["state"] == "STOPPED" and model.get("reserved_bytes"):
        parts.append(f"pinned: {format_bytes(model['reserved_bytes'])} remain reserved")
    if model.get("paused"):
        parts.append(f"{len(model['paused'])} paused")
    if model.get("yielded"):
        parts.append(f"{len(model['yielded'])} made room for others")
    is_busy = any(model.get(key) for key in ("running", "queued", "paused"))
    if model.get("unloads_in_s") is not None and not is_busy:
        parts.append(f"unloads in {format_duration(model['unloads_in_s'])}")
    return ", ".join(parts)


def _quiet_words(model: Mapping[str, Any]) -> list[str]:
    """Return who waits, if classes differ, and what its load found out."""
    per_class = {name: n for name, n in (model.get("queued_per_class") or {}).items() if n}
    waiting = ", ".join(f"{count} {name}" for name, count in per_class.items())
    warnings, task = model.get("warnings"), model.get("task")
    batching = model.get("batching") or {"mode": ""}
    remarks = [
        f"waiting: {waiting}" if per_class.keys() - {"normal"} else None,
        NOUNS[Task(task)] if task in (Task.EMBED, Task.RERANK) else None,
        "takes pictures" if "images" in model.get("capabilities", ()) else None,
        BATCHING_WORDS.get(batching["mode"]),
        counted(len(warnings), "warning") if warnings else None,
    ]
    return [remark for remark in remarks if remark]


def _rank_words(model: Mapping[str, Any]) -> list[str]:
    """Return how many hosts serve the model together, and which of them is late."""
    ranks = model.get("ranks") or []
    names = [rank_name(one["rank"], one["host"], one["address"]) for one in ranks]
    parts = [
        f"{name} is starting"
        for name, one in zip(names, ranks, strict=True)
        if one["state"] == "starting"
    ]
    if ranks and model["state"] == "READY":
        parts.append(counted(sum(one["state"] != "left out" for one in ranks), "host"))
        parts += [
            f"{name} silent for {one['silent_s']:.0f}s"
            for name, one in zip(names, ranks, strict=True)
            if one["silent_s"] >= SILENT_S
        ]
    return parts


def _reading_words(model: Mapping[str, Any]) -> list[str]:
    """Return `prefill 41%` of the prompt with most left to read, if one has been read in part."""
    parts = [
        row["read_tokens"] / row["prompt_tokens"]
        for row in model.get("rows") or []
        if 0 < row["read_tokens"] < (row["prompt_tokens"] or 0) and not row["tokens_sent"]
    ]
    if not parts:
        return []
    count = f" of {len(parts)} prompts" if len(parts) > 1 else ""
    return [f"reading prompt, {int(min(parts) * 100)}%{count}"]


def warning_lines(name: str, warnings: Sequence[str] | None) -> list[str]:
    """Return the warnings of a model, one line each."""
    return [in_a_line(f"warning: {name}: {text}") for text in warnings or ()]


def cause_of(last_exit: Mapping[str, Any] | None, now: float) -> str:
    """Return `SIGKILL, out of memory, 2m ago`; empty if its last process was asked to end."""
    if last_exit is None or last_exit["reason"] == "asked":
        return ""
    reason, code, signal = last_exit["reason"], last_exit["code"], last_exit["signal"]
    parts = [] if signal and reason == "crash" else [EXIT_WORDS.get(reason, reason)]
    if code is not None and not signal and reason == "crash":
        parts.append(f"exit {code}")
    ago = f"{format_duration(now - last_exit['at'])} ago" if last_exit["at"] else ""
    return ", ".join(filter(None, [*parts, signal, last_exit["detail"], ago]))


PHASE_WORDS = {
    "spawn": "starting",
    "import": "starting",
    "weights": "reading weights",
    "materialise": "reading weights",
    "warmup": "warming up",
    "download": "downloading",
}


def progress_text(progress: object, *, has_bar: bool = False) -> str:
    """Return `40%, reading weights` of a load, or what a model waits for; with a bar for a line
    that is drawn again."""
    if not isinstance(progress, Mapping):
        return ""
    fraction, phase = progress.get("fraction"), str(progress.get("phase", ""))
    whole = f" of {format_bytes(total)}" if (total := progress.get("total_bytes")) else ""
    share = f"{fraction:.0%}{whole}" if isinstance(fraction, int | float) and fraction else ""
    if has_bar and share:
        share = f"{bar(float(fraction or 0))} {share}"
    return ", ".join(filter(None, [share, PHASE_WORDS.get(phase, phase)]))


BROKEN_MODELS = {"FAILED": "has FAILED", "BACKOFF": "is in BACKOFF"}
BROKEN_GATEWAYS = ("frozen", "backoff", "crash loop")


def broken_parts(status: Mapping[str, Any]) -> list[str]:
    """Return `qwen has FAILED`, one for each part; loading is no fault."""
    parts = [
        f"{row['name']} {BROKEN_MODELS[row['state']]}"
        for row in status["models"]
        if row["state"] in BROKEN_MODELS
    ]
    gateway = status.get("gateway")
    if gateway and gateway["state"] in BROKEN_GATEWAYS:
        parts.append("the HTTP gateway is down")
    return parts
