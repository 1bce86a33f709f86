"""Who pays for one engine step, in engine seconds (docs/decisions/0005-fairness.md).

What is computed again after a crash or a pause is recognised by its place in the prompt and not by
its cause: tokens before the mark up to which any process has read are repeated, and free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.worker_messages import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """Who pays for one step; all parts together are what the step cost.

    Attributes:
        requests: engine seconds by request, also of those that have ended while their row was
            still in the batch.
        repeated_s: engine seconds for tokens that had been computed before and were lost.
        nobody_s: engine seconds of a step that computed no token.
    """

    requests: dict[RequestKey, float]
    repeated_s: float = 0.0
    nobody_s: float = 0.0


def charge(step: Step, engine_s: float, read_before: Callable[[RequestKey], float]) -> Charges:
    """Divides the cost of a step among the requests that it computed something for.

    Rows that decoded share the decode part equally; rows that read their prompt share the rest by
    the tokens that were computed for them, so tokens from a cache are free. If nobody decoded, or
    nobody read, the others pay for everything.

    Args:
        step: what the worker said about it.
        engine_s: what it cost, in engine seconds, not negative: its duration, or less if several
            engines shared the device.
        read_before: how many tokens of a request's prompt and answer had been computed before
            this step, in this process or an earlier one; infinity for all of them.
    """
    rows = step.rows[step.between_steps :] if step.between_steps > 0 else step.rows
    decoded = {row.key for row in rows}
    read = [row for row in step.prefill if row.computed > 0] if step.prefill else ()
    if not read:
        if not decoded:
            return Charges(requests={}, nobody_s=engine_s)
        return Charges(requests=dict.fromkeys(decoded, engine_s / len(decoded)))
    decode_s = engine_s * _decode_share(step) if decoded else 0.0
    requests = dict.fromkeys(decoded, decode_s / len(decoded)) if decoded else {}
    token_s = (engine_s - decode_s) / sum(row.computed for row in read)
    repeated = 0.0
    for row in read:
        begin = row.done - row.computed
        again = max(0.0, min(row.computed, read_before(row.key) - begin))
        repeated += again
        if again < row.computed:
            paid_s = requests.get(row.key, 0.0)
            requests[row.key] = paid_s + (row.computed - again) * token_s
    return Charges(requests=requests, repeated_s=repeated * token_s)


def _decode_share(step: Step) -> float:
    """The decode part of a step that also read prompts, from 0 to 1."""
    if step.took_s <= 0:
        return 0.0
    return min(max(step.decode_s / step.took_s, 0.0), 1.0)
