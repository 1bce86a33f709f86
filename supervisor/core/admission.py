"""Decides whether a request may wait; the one gate that every request passes (H2).

What can start at once is never refused for a queue, and beyond `max_queue` each model has an equal
share of it, so that one model that loads for a minute does not shut all the others.
"""

from __future__ import annotations

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Priority, State, Wanted, Why

from .errors import cut_off, model_failed, overloaded, priority_too_high, quarantined
from .health.poison import Blame, Digest
from .lifecycle.life import Life
from .model import Model
from .requests.ledger import Ledger
from .settings import CoreSettings
from .sharing.accounts import Account, Terms


def refuse_for_state(life: Life) -> RemoteError | None:
    """Why the model's state does not let a request wait; None if it does."""
    if life.state is State.FAILED:
        return model_failed(life.name, life.failure)
    is_going = life.state in (State.DRAINING, State.STOPPING)
    if is_going and life.wanted is Wanted.DOWN and life.why is Why.USER:
        return cut_off(life.name, life.why)
    return None


def refuse_for_quarantine(
    name: ModelName, blame: Blame, digest: Digest, now: float
) -> RemoteError | None:
    """Why this particular request may not run again yet; None if it may (F10)."""
    lifted_in_s = blame.quarantined_for_s(digest, now)
    return None if lifted_in_s is None else quarantined(name, 0, lifted_in_s)


def refuse_for_priority(terms: Terms, account: Account, priority: Priority) -> RemoteError | None:
    """Why an account must not have a request of this class; None if it may."""
    highest = terms.of(account).max_priority
    if not priority.is_above(highest):
        return None
    return priority_too_high(priority, highest, terms.table_of(account))


def refuse_for_room(
    model: Model,
    *,
    account: Account,
    body_bytes: int,
    ledger: Ledger,
    models: int,
    settings: CoreSettings,
) -> RemoteError | None:
    """Why the queues have no room for one more request; None if they have (H3, H5).

    A request that can start at once does not wait, so no queue refuses it; its bytes still count.
    """
    reason = _refuse_for_bytes(body_bytes, ledger, settings)
    if reason is None and not model.can_start(account, ledger.may_run):
        reason = _refuse_for_place(model, ledger, models, settings) or _refuse_for_account(
            account, ledger, settings
        )
    if reason is None:
        return None
    limit, sentence = reason
    return overloaded(
        model.name,
        limit,
        sentence,
        queue_depth=ledger.waiting,
        running=[request.id for request in model.batch.running.values()],
        retry_after_s=model.next_free_s(),
    )


Reason = tuple[str, str]
"""The setting that is the limit, and how near it is."""


def _refuse_for_bytes(body_bytes: int, ledger: Ledger, settings: CoreSettings) -> Reason | None:
    if ledger.held_bytes + body_bytes <= settings.max_queue_bytes:
        return None
    return "max_queue_bytes", f"open requests hold {ledger.held_bytes} bytes, close to the limit"


def _refuse_for_place(
    model: Model, ledger: Ledger, models: int, settings: CoreSettings
) -> Reason | None:
    """Beyond `max_queue` overall, each model still has an equal share of it, so that the queue of a
    loading or slow model does not block the others. At most twice `max_queue` wait."""
    share = max(1, settings.max_queue // models)
    if ledger.waiting < settings.max_queue or len(model.queue) < share:
        return None
    sentence = (
        f"{ledger.waiting} requests are waiting, {len(model.queue)} of them for this model, "
        "which is the limit"
    )
    return "max_queue", sentence


def _refuse_for_account(account: Account, ledger: Ledger, settings: CoreSettings) -> Reason | None:
    terms = ledger.terms
    own = terms.of(account).max_queue
    waiting = ledger.waiting_of(account)
    if waiting < terms.most_waiting(account, settings):
        return None
    limit = f"{terms.table_of(account)} max_queue" if own else "max_queue_per_client"
    return limit, f"{waiting} requests of this client are waiting, which is the limit"
