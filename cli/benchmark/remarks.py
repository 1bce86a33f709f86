"""What somebody who reads figures must know about them. Pure."""

from __future__ import annotations

from .run import Run


def remarks_of(run: Run) -> list[str]:
    """One sentence for each thing that has touched the figures."""
    found = []
    if not run.is_complete:
        found.append(f"not complete: {run.done} of {run.bursts} bursts were measured")
    if run.others is not None and run.others.requests:
        count = run.others.requests
        what = "another request was" if count == 1 else f"{count} other requests were"
        where = f", some for {', '.join(run.others.models)}" if run.others.models else ""
        found.append(f"{what} sent to the daemon meanwhile{where}: measure again when it is idle")
    if run.others is not None and run.others.has_new_process:
        found.append(f"{run.model} got a new process meanwhile: see `mlxsup events`")
    if run.interrupted:
        found.append(f"{_answers(run.interrupted)} interrupted, and resumed")
    if run.waited:
        found.append(
            f"{_answers(run.waited)} held up in the queue: the limits of this client, memory, or"
            " others"
        )
    if run.cached_tokens:
        found.append(f"{run.cached_tokens} tokens of prompts were known, and not read again")
    return found


def _answers(count: int) -> str:
    return "1 answer was" if count == 1 else f"{count} answers were"
