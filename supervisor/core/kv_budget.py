"""What the rows of a model take, and what is reserved for them.

The core plans with what a worker computes. `memory/row_budget.py` divides what is free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes, joining_bytes
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.states import SERVES, PauseReason, Wanted
from mlxsup.protocol.worker_messages import SetBudget

from .errors import row_does_not_fit
from .lifecycle.states import Ready, Stopping
from .memory.row_budget import Claim, Member, Part, RowBudget, rows_need
from .model import Model
from .requests.ledger import Request, Stage

SPARE_SHARE = 10
"""While others run, a row that had to leave returns only if a tenth of the budget stays free."""


def has_row_budget(model: Model) -> bool:
    """True if anything is known of what the rows of this model's live process take."""
    return (
        model.process.ready is not None
        and bool(model.process.ready.cache_layers)
        and model.life.need is not None
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
    if model.batch.budget is None or not has_row_budget(model):
        return model.life.granted_bytes
    return fixed_bytes(model) + model.batch.budget.most_bytes


def bare_bytes(model: Model) -> int:
    """Return what the live process takes without any row."""
    assert model.process.ready is not None
    assert model.life.need is not None
    own_bytes = model.process.ready.own_bytes
    if own_bytes is None:
        own_bytes = model.life.need.own.size_bytes
    return model.process.ready.active_bytes + own_bytes


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
    """Return what its rows hold, and need to grow by one step. Rows that leave for want of memory
    need none."""
    assert model.process.ready is not None
    lengths = [length(one) for one in model.batch.running.values() if not is_leaving_short(one)]
    return rows_need(tuple(model.process.ready.cache_layers), claim, lengths)


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
    budget = model.batch.budget
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
    life, budget = model.life, model.batch.budget
    if not isinstance(life.phase, Ready):
        return life.pinned_bytes
    held_bytes = life.reserved_bytes - spare_bytes(model, now)
    if not has_row_budget(model) or is_given(model):
        return held_bytes
    has_given_back = budget is not None and budget.has_just_given_back(model.idle_since, now)
    return held_bytes if model.is_idle and has_given_back else life.pinned_bytes


def reserve(model: Model) -> None:
    """Derive what is reserved for a process from what its rows may take, and what it holds."""
    assert model.batch.budget is not None
    need = model.life.need
    given_bytes = 0 if need is None or need.given_bytes is None else need.given_bytes
    model.life.reserved_bytes = max(
        fixed_bytes(model) + model.batch.budget.most_bytes,
        model.measured_bytes,
        model.life.pinned_bytes,
        given_bytes,
    )


# ---------------------------------------------------------------- one request


def is_held_back(model: Model, request: Request) -> bool:
    """True if a request that has left for want of memory must wait on: until there is room for its
    row and some to spare, or a row has ended, or nothing runs."""
    if request.run.left_short_at is None or model.batch.budget is None or not has_row_budget(model):
        return False
    if not has_memory_beside(model, request, ()):
        return True
    if model.batch.ended > request.run.left_short_at:
        return False
    return not has_memory_beside(model, request, model.batch.running.values())


def has_memory_beside(model: Model, request: Request, others: Collection[Request]) -> bool:
    """True if there is room for the row of a request next to these, and some to spare; without
    others, whether it fits alone. Its rows have a budget."""
    assert model.process.ready is not None
    assert model.batch.budget is not None
    lengths = [length(request), *(length(one) for one in others)]
    room_bytes = model.batch.budget.size_bytes
    if others:
        room_bytes -= room_bytes // SPARE_SHARE
    return joining_bytes(model.process.ready.cache_layers, lengths) <= room_bytes


def is_leaving_short(request: Request) -> bool:
    """True if its row was asked to leave for want of memory, and has not left yet."""
    return request.stage is Stage.YIELDING and request.pauses.reason is PauseReason.MEMORY


def why_never(model: Model, request: Request) -> RemoteError | None:
    """The error of a request that had to leave and cannot return: it needs more than there is for
    it alone, or it must run through once it has begun."""
    budget = model.batch.budget
    if request.run.left_short_at is None or budget is None or not has_row_budget(model):
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
    return any(one.crashes.shortages for one in (*model.batch.running.values(), *model.queue.again))


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
    return [*model.batch.running.values(), *model.queue.again, *model.paused.values()]


def _bytes_of(model: Model, *, rows: int, longest: int) -> int:
    assert model.process.ready is not None
    return cache_bytes(model.process.ready.cache_layers, rows=rows, longest=longest)


# ---------------------------------------------------------------- the division


def keeps_to(model: Model, number: int) -> bool:
    """A worker keeps to this budget; return whether that changes what is reserved."""
    if model.batch.budget is None or not model.batch.budget.keeps_to(number):
        return False
    if has_row_budget(model):
        reserve(model)
    return True


def was_measured(model: Model, now: float) -> bool:
    """The process of a model was measured; return whether that changes what it holds, or what it
    may give back."""
    if model.batch.budget is None or not has_row_budget(model):
        return model.life.holds(model.measured_bytes, may_shrink=model.may_shrink(now))
    before = model.life.reserved_bytes
    has_given_back = model.batch.budget.was_measured(now)
    reserve(model)
    return has_given_back or model.life.reserved_bytes != before


def takes_part(model: Model, *, has_budget: bool) -> bool:
    """True if what is free is divided among this model, too.

    Args:
        model: which.
        has_budget: whether there is a memory budget.
    """
    if model.life.state not in SERVES or not has_row_budget(model):
        return False
    return has_budget or is_given(model) or model.batch.budget is not None


def member_of(model: Model, now: float) -> Member:
    """Return what the division must know of a model that takes part in it."""
    need, budget, claim = model.life.need, model.batch.budget, claim_of(model)
    assert need is not None
    is_told = budget is not None and budget.number > 0
    return Member(
        name=model.name,
        claim=claim,
        bare_bytes=bare_bytes(model),
        raise_bytes=model.life.raise_bytes,
        rows_bytes=rows_bytes(model, claim),
        reserved_bytes=model.life.reserved_bytes,
        measured_bytes=model.measured_bytes,
        kept_bytes=max(model.life.pinned_bytes, need.given_bytes or 0),
        size_bytes=budget.size_bytes if budget and is_told else None,
        most_bytes=budget.most_bytes if budget else 0,
        has_spare=spare_bytes(model, now) > 0 and not (budget is not None and budget.is_asked),
        is_given=is_given(model),
    )


def adopt(model: Model, part: Part) -> SetBudget | None:
    """Give a model its part of the division; return what its worker must be told."""
    if model.batch.budget is None:
        model.batch.budget = RowBudget()
    model.batch.budget.could_bytes = part.could_bytes
    model.life.raise_bytes = part.raise_bytes
    if part.size_bytes is None:
        return None
    is_more = part.size_bytes > model.batch.budget.size_bytes or not model.batch.budget.number
    message = model.batch.budget.tell(part.size_bytes, gives_back=part.gives_back)
    if is_more:
        reserve(model)
    return message
