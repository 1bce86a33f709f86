"""Which waiting request a worker gets next: suspects of a crash take turns, everybody else passes.

A suspect on probation runs only while no other suspect does, and no other suspect runs beside it.
Requests that no crash accuses never wait for a suspect (F10, P25).
"""

from __future__ import annotations

from mlxsup.protocol.ids import RequestKey

from .model import Model
from .requests import Ledger, Request, Stage


def next_in_line(model: Model, ledger: Ledger) -> Request | None:
    """The waiting request that may run now beside what runs already; None if none may.

    A suspect on probation is taken first, whenever no suspect is in the worker's hands: its turn is
    short, and the other suspects wait for it.
    """
    if not model.recovery.suspects:
        return _request(ledger, model.line.first()) if model.line else None
    waiting = [_request(ledger, key) for key in model.line]
    recovery, held = model.recovery, model.held_suspects
    if not held:
        first = next((r for r in waiting if recovery.is_on_probation(r.digest)), None)
        if first is not None:
            return first
    is_turn_taken = any(recovery.is_on_probation(one.digest) for one in held)
    is_turn_taken |= any(request.stage is Stage.YIELDING for request in model.running.values())
    for request in waiting:
        if not recovery.is_suspect(request.digest):
            return request
        if not is_turn_taken and not recovery.is_on_probation(request.digest):
            return request
    return None


def must_yield(model: Model, request: Request, ledger: Ledger) -> bool:
    """Whether a suspect that has just ended its probation has to let another one have its turn.

    One whose client wants no continuation after an interruption stays; the others wait for its end.
    """
    if not request.may_resume:
        return False
    waiting = (_request(ledger, key) for key in model.line)
    return any(model.recovery.is_on_probation(other.digest) for other in waiting)


def _request(ledger: Ledger, key: RequestKey) -> Request:
    request = ledger.get(key)
    assert request is not None
    return request
