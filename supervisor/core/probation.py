"""Which requests may run together after crashes that accuse some: suspects take turns (F10, P25).

A suspect whose turn is due runs while the worker holds no other request, so a crash is then its
own, whoever waits. Turns follow each other until none is due. Before each turn, new requests start
and gain their first token; then their rows leave, and they wait until the turns are over.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model import Model
from .requests.ledger import Ledger, Request, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The state of a model's turns.

    Attributes:
        waiting: the waiting requests whose accounts may run more, in order.
        due: those of them whose turn is due.
        is_taken: whether the worker holds a request whose turn is due.
        is_held_up: whether a row that no crash accuses cannot be asked to leave, because its
            client wants no continuation.
    """

    waiting: list[Request]
    due: list[Request]
    is_taken: bool
    is_held_up: bool

    @classmethod
    def of(cls, model: Model, ledger: Ledger) -> Turns:
        """The current state; only worth computing while a request is on probation."""
        is_due = model.blame.is_due
        waiting = [request for request in model.queue if ledger.may_run(request.account)]
        return cls(
            waiting=waiting,
            due=[request for request in waiting if is_due(request.held)],
            is_taken=any(is_due(one) for one in model.batch.held),
            is_held_up=any(
                not _may_leave(model, request) for request in model.batch.running.values()
            ),
        )

    @property
    def are_on(self) -> bool:
        """True if any turn is due and can begin."""
        return self.is_taken or (bool(self.due) and not self.is_held_up)


def are_turns_due(model: Model, ledger: Ledger) -> bool:
    """True if the turn of any request that waits or runs is due."""
    if not model.blame.is_anyone_on_probation:
        return False
    turns = Turns.of(model, ledger)
    return turns.is_taken or bool(turns.due)


def next_in_line(model: Model, ledger: Ledger) -> Request | None:
    """The waiting request that may start now, next to what runs already; None if none may."""
    if not model.queue:
        return None
    if not model.blame.is_anyone_on_probation:
        return model.queue.first(ledger.may_run)
    turns = Turns.of(model, ledger)
    if turns.is_taken:
        return None
    if not turns.are_on:
        others = (request for request in turns.waiting if request not in turns.due)
        return next((r for r in others if not turns.due or _may_leave(model, r)), None)
    if model.batch.lets_newcomers_in:
        newcomer = next((r for r in turns.waiting if _is_newcomer(model, r)), None)
        if newcomer is not None:
            return newcomer
    return None if model.batch.held else turns.due[0]


def end_intake(model: Model, ledger: Ledger, *, had_room: bool) -> list[Request]:
    """Begin the next turn: newcomers have had their chance if there was room for them, and get
    another one after it.

    Args:
        model: whose turns these are.
        ledger: knows who may run.
        had_room: whether a row was free before any was given away.

    Returns:
        The running requests whose rows must leave the batch for the turn to begin.
    """
    if not model.blame.is_anyone_on_probation:
        return []
    turns = Turns.of(model, ledger)
    model.batch.lets_newcomers_in = turns.is_taken or (
        model.batch.lets_newcomers_in and not had_room
    )
    if not turns.are_on:
        return []
    is_alone = len(model.batch.held) == 1

    def is_to_leave(request: Request) -> bool:
        if model.blame.is_due(request.held):
            return not is_alone
        return not turns.is_held_up and request.tokens_sent > 0

    running = [r for r in model.batch.running.values() if r.stage is Stage.RUNNING]
    return [request for request in running if _may_leave(model, request) and is_to_leave(request)]


def _may_leave(model: Model, request: Request) -> bool:
    return request.may_resume or model.blame.is_suspect(request.digest)


def _is_newcomer(model: Model, request: Request) -> bool:
    is_new = request.acceptance is None and request.may_resume
    return is_new and not model.blame.is_suspect(request.digest)
