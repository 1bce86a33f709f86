"""The KV budget: what the rows of a model take, and what they may take of the memory that is free.

The core plans with what a worker computes. A worker that loads has one row reserved. What no model
needs otherwise is divided among those that serve: their rows may take it until it is needed
elsewhere. A higher budget is reserved before a worker is sent it; a lower one counts once the
worker keeps to it. So what is reserved never exceeds the memory budget through rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes, joining_bytes
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import SERVES, PauseReason, State, Wanted
from mlxsup.protocol.worker_messages import GiveBack, Heartbeat

from .errors import row_does_not_fit
from .lifecycle.states import Ready, Stopping, Urgency
from .memory.budget import Budget
from .memory.row_budget import Claim, RowBudget, divide
from .model import Model
from .outbox import Outbox
from .requests.ledger import Request, Stage
from .settings import CoreSettings

if TYPE_CHECKING:
    from .warm_pool import WarmPool


def ask_back(models: Iterable[Model], outbox: Outbox, now: float) -> None:
    """Ask the workers of these models, which are READY; the models remember when that was."""
    for model in models:
        model.asked_back_at = now
        outbox.tell(model.life, GiveBack())


SPARE_SHARE = 10
"""While others run, a row that had to leave returns only if a tenth of the budget stays free."""


def has_row_budget(model: Model) -> bool:
    """True if anything is known of what the rows of this model's live process take."""
    return (
        model.ready is not None and bool(model.ready.cache_layers) and model.life.need is not None
    )


def is_given(model: Model) -> bool:
    """True if the `memory` of its entry limits it."""
    return model.life.need is not None and model.life.need.given_bytes is not None


def fixed_bytes(model: Model) -> int:
    """Return what the live process takes without any row, and what is reserved for it besides
    because others before it ran out of memory."""
    return bare_bytes(model) + model.life.raise_bytes


def planned_bytes(model: Model) -> int:
    """Return what the live process was to hold at most, by what it was told; while it loads, or if
    its rows have no budget, what it was started with."""
    if model.row_budget is None or not has_row_budget(model):
        return model.life.granted_bytes
    return fixed_bytes(model) + model.row_budget.most_bytes


def yield_raise(model: Model, claim: Claim, could_bytes: int) -> None:
    """Let what is reserved because processes before this one ran out of memory give way to a row
    that could not run otherwise; it does not grow again before the next load.

    Args:
        model: it serves.
        claim: what its rows need.
        could_bytes: what they could take at most, without what gives way.
    """
    room_bytes = max(0, could_bytes - claim.least_bytes)
    model.life.raise_bytes = min(model.life.raise_bytes, room_bytes)


def bare_bytes(model: Model) -> int:
    """Return what the live process takes without any row."""
    assert model.ready is not None
    assert model.life.need is not None
    own_bytes = model.ready.own_bytes
    if own_bytes is None:
        own_bytes = model.life.need.own.size_bytes
    return model.ready.active_bytes + own_bytes


def claim_of(model: Model) -> Claim:
    """Return what its rows need: one row, as long as its longest open answer. With `memory` in its
    entry that is what there is; it is enough for a short row, or the load would have failed."""
    need = model.life.need
    assert need is not None
    if need.given_bytes is not None:
        limit_bytes = max(0, need.given_bytes - fixed_bytes(model))
        return Claim(least_bytes=limit_bytes, wanted_bytes=limit_bytes)
    longest = min(max(need.least_tokens, longest_stream(model)), need.context_tokens)
    least_bytes = _bytes_of(model, rows=1, longest=longest)
    wanted_bytes = _bytes_of(model, rows=need.max_rows, longest=need.context_tokens)
    return Claim(least_bytes=least_bytes, wanted_bytes=max(least_bytes, wanted_bytes))


def rows_bytes(model: Model, claim: Claim) -> int:
    """Return what its rows hold, and need to grow by one step; no less than its least, and no more
    than it can use. Rows that leave for want of memory need none."""
    lengths = [length(one) for one in model.running.values() if not is_leaving_short(one)]
    longest = max(lengths, default=0) + GROWTH_TOKENS
    held_bytes = _bytes_of(model, rows=len(lengths), longest=longest)
    return min(max(claim.least_bytes, held_bytes), claim.wanted_bytes)


def longest_stream(model: Model) -> int:
    """Tokens of its longest answer that has begun, with a step of growth; 0 if none has."""
    begun = [length(one) for one in open_requests(model) if one.acceptance is not None]
    return max(begun, default=-GROWTH_TOKENS) + GROWTH_TOKENS


def bytes_to_load(model: Model) -> int:
    """Return what must be free before it is loaded, or loaded again, with a row for its longest
    answer."""
    return model.life.needed_for(longest_stream(model))


def spare_bytes(model: Model, now: float) -> int:
    """Return how much less would be reserved for a model if it gave back what it does not need now;
    once its process is about to go, that is all but what the next one needs, if there is to be one,
    or what is kept for a pinned model."""
    if isinstance(model.life.phase, Stopping):
        next_bytes = bytes_to_load(model) if model.life.wanted is Wanted.UP else 0
        return max(0, model.life.reserved_bytes - max(next_bytes, model.life.pinned_bytes))
    budget = model.row_budget
    if budget is None or not has_row_budget(model) or is_given(model):
        return 0
    left_bytes = fixed_bytes(model) + rows_bytes(model, claim_of(model))
    if not budget.may_give_back(now):  # what it holds is what it needs
        left_bytes = max(left_bytes, model.measured_bytes)
    return max(0, model.life.reserved_bytes - max(left_bytes, model.life.pinned_bytes))


def lasting_bytes(model: Model, now: float) -> int:
    """Return what a pinned model holds whoever of its requests ends: what a load of it needs,
    because what its rows take besides comes back with them. If its process has outgrown that, it is
    all that is left once it is idle and has given back; without a budget for its rows, nothing
    comes back."""
    life, budget = model.life, model.row_budget
    if not isinstance(life.phase, Ready):
        return life.pinned_bytes
    held_bytes = life.reserved_bytes - spare_bytes(model, now)
    if not has_row_budget(model) or is_given(model):
        return held_bytes
    has_given_back = budget is not None and budget.has_just_given_back(model.idle_since, now)
    return held_bytes if model.is_idle and has_given_back else life.pinned_bytes


def reserve(model: Model) -> None:
    """Derive what is reserved for a process from what its rows may take, and what it holds."""
    assert model.row_budget is not None
    need = model.life.need
    given_bytes = 0 if need is None or need.given_bytes is None else need.given_bytes
    model.life.reserved_bytes = max(
        fixed_bytes(model) + model.row_budget.most_bytes,
        model.measured_bytes,
        model.life.pinned_bytes,
        given_bytes,
    )


# ---------------------------------------------------------------- one request


def is_held_back(model: Model, request: Request) -> bool:
    """True if a request that has left for want of memory must wait on: until there is room for its
    row and some to spare, or a row has ended, or nothing runs."""
    if request.left_short_at is None or model.row_budget is None or not has_row_budget(model):
        return False
    if not has_memory_beside(model, request, ()):
        return True
    if model.rows_ended > request.left_short_at:
        return False
    return not has_memory_beside(model, request, model.running.values())


def has_memory_beside(model: Model, request: Request, others: Collection[Request]) -> bool:
    """True if there is room for the row of a request next to these, and some to spare; without
    others, whether it fits alone. Its rows have a budget."""
    assert model.ready is not None
    assert model.row_budget is not None
    lengths = [length(request), *(length(one) for one in others)]
    room_bytes = model.row_budget.size_bytes
    if others:
        room_bytes -= room_bytes // SPARE_SHARE
    return joining_bytes(model.ready.cache_layers, lengths) <= room_bytes


def is_leaving_short(request: Request) -> bool:
    """True if its row was asked to leave for want of memory, and has not left yet."""
    return request.stage is Stage.YIELDING and request.pause_reason is PauseReason.MEMORY


def why_never(model: Model, request: Request) -> RemoteError | None:
    """The error of a request that had to leave and cannot return: it needs more than there is for
    it alone, or it must run through once it has begun."""
    budget = model.row_budget
    if request.left_short_at is None or budget is None or not has_row_budget(model):
        return None
    needed_bytes = _bytes_of(model, rows=1, longest=length(request))
    must_run_through = request.tokens_sent > 0 and not may_leave(model, request)
    if needed_bytes <= budget.could_bytes and not must_run_through:
        return None
    return row_does_not_fit(
        model.name,
        needed_bytes=needed_bytes,
        available_bytes=budget.could_bytes,
        tokens_sent=request.tokens_sent,
    )


def is_tried_again(model: Model) -> bool:
    """True if a request runs, or is about to, that has run out of memory alone."""
    return any(one.shortages for one in (*model.running.values(), *model.queue.again))


def may_leave(model: Model, request: Request) -> bool:
    """True if the row of a request may leave the batch and continue later."""
    return request.may_resume and not model.life.launch.deterministic


def length(request: Request) -> int:
    """Tokens of its prompt and of what was sent; the prompt counts once it was accepted."""
    prompt = len(request.acceptance.prompt_tokens) // 4 if request.acceptance else 0
    return prompt + request.tokens_sent


# ---------------------------------------------------------------- inside


def open_requests(model: Model) -> Iterable[Request]:
    """Those that run, wait to continue, or are paused."""
    return [*model.running.values(), *model.queue.again, *model.paused.values()]


def _bytes_of(model: Model, *, rows: int, longest: int) -> int:
    assert model.ready is not None
    return cache_bytes(model.ready.cache_layers, rows=rows, longest=longest)


LEAST_CHANGE = 8
"""Divides a row budget: it is lowered only by at least one part, unless memory is needed."""


class KvBudget:
    """Tells workers what their rows may take.

    Args:
        outbox: takes what workers are sent.
        warm_pool: take their part before any row does.
    """

    def __init__(self, outbox: Outbox, warm_pool: WarmPool) -> None:
        self._outbox = outbox
        self._warm_pool = warm_pool
        self._is_due = False

    def mark_dirty(self) -> None:
        """Something has changed that the division depends on: `settle` looks at it."""
        self._is_due = True

    @property
    def is_dirty(self) -> bool:
        """True if `settle` has yet to look at what has changed."""
        return self._is_due

    def beat(self, model: Model, message: Heartbeat) -> bool:
        """A worker says which budget it keeps to; returns whether that changes what is reserved."""
        if model.row_budget is None or not model.row_budget.keeps_to(message.budget):
            return False
        if has_row_budget(model):
            reserve(model)
        self.mark_dirty()
        return True

    def sampled(self, model: Model, now: float) -> bool:
        """The process of a model was measured; returns whether that changes what it holds, or what
        it may give back."""
        self.mark_dirty()
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
        self.mark_dirty()
        others = [one for one in models.values() if one is not short]
        ask_back([one for one in others if one.life.state is State.READY], self._outbox, now)

    def settle(
        self, models: Mapping[ModelName, Model], settings: CoreSettings, now: float
    ) -> list[Model]:
        """Divide the head-room anew, if anything has changed.

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
            rest_bytes = budget.size_bytes - self._warm_pool.claimed_bytes(everybody, settings)
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
        """Take head-room back; a little only if it is needed elsewhere."""
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
        """Grant head-room as far as it is free now; the first row needs none."""
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
    """True if every model must give back what it does not need now."""
    if _reserved(everybody) > budget.kept_bytes:
        return True
    return any(model.lack.reclaims for model in everybody if model.lack is not None)


def _targets(
    members: list[Model],
    claims: Mapping[ModelName, Claim],
    everybody: list[Model],
    rest_bytes: int | None,
    *,
    is_short: bool,
) -> dict[ModelName, int]:
    """Return what the rows of each model should be allowed to take: what they hold if memory is
    short or a request of another model has run out of memory alone, no more than now while a model
    waits for memory, or else also an equal share of what is free."""
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
    """Return what the rows of each model should be allowed to take while memory is not short."""
    if rest_bytes is None:
        return {name: claim.wanted_bytes for name, claim in claims.items()}
    if any(one.lack and one.urgency is not Urgency.NOBODY for one in everybody):
        return {one.name: one.row_budget.size_bytes if one.row_budget else 0 for one in members}
    least_bytes = sum(fixed_bytes(one) + claims[one.name].least_bytes for one in members)
    others_bytes = _reserved(everybody) - _reserved(members)
    shares = divide(rest_bytes - others_bytes - least_bytes, claims)
    return {name: max(claims[name].least_bytes + shares[name], held[name]) for name in held}


def _could(
    model: Model, claims: Mapping[ModelName, Claim], models: Iterable[Model], budget: Budget | None
) -> int:
    """Return what the rows of a model could take if all others gave back what they may."""
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
