"""Divides what is free of the memory budget among the models that serve, and takes it back.

A worker that loads has one row reserved. What nobody needs otherwise is the head-room of the models
that serve: their rows may take it until it is needed elsewhere. A higher budget is reserved before
a worker is sent it; a lower one counts once the worker keeps to it. So head-room never makes
what is reserved more than the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import SERVES, State
from mlxsup.protocol.worker_messages import Heartbeat

from .asking_back import ask_back
from .lifecycle.states import Lack, Pending
from .memory.budget import Budget
from .memory.head_room import Claim, RowBudget, divide
from .memory.planner import Urgency
from .model import Model
from .outbox import Outbox
from .rows_memory import (
    bare_bytes,
    claim_of,
    fixed_bytes,
    has_row_budget,
    is_given,
    is_tried_again,
    open_requests,
    reserve,
    rows_bytes,
    spare_bytes,
    yield_raise,
)
from .settings import CoreSettings
from .warm_pool import WarmPool

LEAST_CHANGE = 8
"""Divides a row budget: it is lowered only by at least one part, unless memory is needed."""


class HeadRoom:
    """Tells workers what their rows may take.

    Args:
        outbox: takes what workers are sent.
        spares: take their part before any row does.
    """

    def __init__(self, outbox: Outbox, spares: WarmPool) -> None:
        self._outbox = outbox
        self._spares = spares
        self._is_due = False

    def stir(self) -> None:
        """Something has changed that the division depends on: `settle` looks at it."""
        self._is_due = True

    @property
    def is_stirred(self) -> bool:
        """Whether `settle` has yet to look at what has changed."""
        return self._is_due

    def beat(self, model: Model, message: Heartbeat) -> bool:
        """A worker says which budget it keeps to; returns whether that changes what is reserved."""
        if model.row_budget is None or not model.row_budget.keeps_to(message.budget):
            return False
        if has_row_budget(model):
            reserve(model)
        self.stir()
        return True

    def sampled(self, model: Model, now: float) -> bool:
        """The process of a model was measured; returns whether that changes what it holds, or what
        it may give back."""
        self.stir()
        if model.row_budget is None or not has_row_budget(model):
            return model.life.holds(model.measured_bytes, may_shrink=model.may_shrink(now))
        before = model.life.reserved_bytes
        has_given_back = model.row_budget.was_measured(now)
        reserve(model)
        return has_given_back or model.life.reserved_bytes != before

    def others_give_back(self, short: Model, models: Mapping[ModelName, Model], now: float) -> None:
        """A worker has run out of memory with one request, which is tried again if it is still
        open: until then, every other worker gives back what it does not need for its rows."""
        if not any(request.shortages for request in open_requests(short)):
            return
        self.stir()
        others = [one for one in models.values() if one is not short]
        ask_back([one for one in others if one.life.state is State.READY], self._outbox, now)

    def settle(
        self, models: Mapping[ModelName, Model], settings: CoreSettings, now: float
    ) -> list[Model]:
        """Divides the head-room anew, if anything has changed.

        Args:
            models: all of them.
            settings: the budget.
            now: monotonic seconds.

        Returns:
            The models whose rows may take more, or could.
        """
        if not self._is_due:
            return []
        self._is_due = False
        budget, everybody = settings.budget, list(models.values())
        members = [one for one in everybody if _takes_part(one, settings)]
        claims = {one.name: claim_of(one) for one in members}
        rest_bytes, is_short = None, False
        if budget is not None:
            rest_bytes = budget.size_bytes - self._spares.claimed_bytes(everybody, settings)
            is_short = _is_short(everybody, budget)
        for model in members:
            if model.row_budget is None:
                model.row_budget = RowBudget()
            model.row_budget.could_bytes = _could(model, claims, everybody, budget)
            if budget is not None:
                yield_raise(model, claims[model.name], model.row_budget.could_bytes)
        targets = _targets(members, claims, everybody, rest_bytes, is_short=is_short)
        for model in members:
            self._lower(model, targets[model.name], is_short=is_short, now=now)
        for model in members:
            self._raise(model, targets[model.name], claims[model.name], everybody, rest_bytes)
        return [one for one in members if one.queue]

    def _lower(self, model: Model, target_bytes: int, *, is_short: bool, now: float) -> None:
        """Takes head-room back; a little only if it is needed elsewhere."""
        budget = model.row_budget
        assert budget is not None
        if not budget.number:
            return
        target_bytes = min(target_bytes, budget.size_bytes)
        if is_short:
            has_more = spare_bytes(model, now) > 0 and not budget.is_asked
            if target_bytes < budget.size_bytes or has_more:
                self._outbox.tell(model.life, budget.tell(target_bytes, gives_back=True))
        elif target_bytes < budget.size_bytes - budget.size_bytes // LEAST_CHANGE:
            self._outbox.tell(model.life, budget.tell(target_bytes))

    def _raise(
        self,
        model: Model,
        target_bytes: int,
        claim: Claim,
        models: Iterable[Model],
        rest_bytes: int | None,
    ) -> None:
        """Grants head-room as far as it is free now; the first row needs none."""
        budget = model.row_budget
        assert budget is not None
        if rest_bytes is not None:
            free_bytes = rest_bytes - _reserved(models)
            held_bytes = model.life.reserved_bytes - fixed_bytes(model)
            target_bytes = min(target_bytes, held_bytes + max(0, free_bytes))
        if not budget.number:
            target_bytes = max(target_bytes, claim.least_bytes)
        elif target_bytes <= budget.size_bytes:
            return
        message = budget.tell(target_bytes)
        reserve(model)
        self._outbox.tell(model.life, message)


def _takes_part(model: Model, settings: CoreSettings) -> bool:
    if model.life.state not in SERVES or not has_row_budget(model):
        return False
    return settings.budget is not None or is_given(model) or model.row_budget is not None


def _is_short(everybody: list[Model], budget: Budget) -> bool:
    """Whether every model must give back what it does not need now."""
    if _reserved(everybody) > budget.kept_bytes:
        return True
    lacks = [lack for model in everybody if (lack := _lack(model)) is not None]
    return any(lack.takes_spare for lack in lacks)


def _targets(
    members: list[Model],
    claims: Mapping[ModelName, Claim],
    everybody: list[Model],
    rest_bytes: int | None,
    *,
    is_short: bool,
) -> dict[ModelName, int]:
    """What the rows of each model should be allowed to take: what they hold if memory is short or a
    request of another model has run out of memory alone, no more than now while a model waits for
    memory, or else also an equal share of what is free."""
    held = {one.name: rows_bytes(one, claims[one.name]) for one in members}
    if is_short:
        return held
    shares = _shares(members, claims, everybody, held, rest_bytes)
    tried = {one.name for one in everybody if is_tried_again(one)}
    if not tried:
        return shares
    return {n: shares[n] if tried <= {n} else min(shares[n], held[n]) for n in shares}


def _shares(
    members: list[Model],
    claims: Mapping[ModelName, Claim],
    everybody: list[Model],
    held: Mapping[ModelName, int],
    rest_bytes: int | None,
) -> dict[ModelName, int]:
    """What the rows of each model should be allowed to take while memory is not short."""
    if rest_bytes is None:
        return {name: claim.wanted_bytes for name, claim in claims.items()}
    if any(_lack(one) and one.urgency is not Urgency.NOBODY for one in everybody):
        return {one.name: one.row_budget.size_bytes if one.row_budget else 0 for one in members}
    least_bytes = sum(fixed_bytes(one) + claims[one.name].least_bytes for one in members)
    others_bytes = _reserved(everybody) - _reserved(members)
    shares = divide(rest_bytes - others_bytes - least_bytes, claims)
    return {name: max(claims[name].least_bytes + shares[name], held[name]) for name in held}


def _could(
    model: Model, claims: Mapping[ModelName, Claim], models: Iterable[Model], budget: Budget | None
) -> int:
    """What the rows of a model could take if all others gave back what they may."""
    claim = claims[model.name]
    if budget is None or is_given(model):
        return claim.wanted_bytes
    others = [one for one in models if one is not model]
    taken_bytes = sum(
        fixed_bytes(one) + claims[one.name].least_bytes
        if one.name in claims
        else one.life.reserved_bytes
        for one in others
    )
    return budget.whole_bytes - taken_bytes - bare_bytes(model)


def _reserved(models: Iterable[Model]) -> int:
    return sum(model.life.reserved_bytes for model in models)


def _lack(model: Model) -> Lack | None:
    """The memory that a model waits for; None if it does not."""
    phase = model.life.phase
    return phase.lack if isinstance(phase, Pending) else None
