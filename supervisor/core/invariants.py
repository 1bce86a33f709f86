"""What must be true of all models together; for tests, after each event."""

from __future__ import annotations

from collections.abc import Iterable

from mlxsup.protocol.states import State, Wanted

from .model import Model
from .requests.ledger import Ledger


def check_fleet(models: Iterable[Model], ledger: Ledger, *, is_shutting_down: bool) -> None:
    """Raises AssertionError if the models contradict themselves or each other."""
    everybody = list(models)
    for model in everybody:
        model.check_invariants()
        _check_waiting(model, ledger)
    placed = [
        one.key
        for model in everybody
        for one in (*model.queue, *model.paused.values(), *model.running.values())
    ]
    assert sorted(placed) == sorted(request.key for request in ledger)
    if is_shutting_down:
        assert all(model.life.wanted is not Wanted.UP for model in everybody)
        assert ledger.waiting == 0


def _check_waiting(model: Model, ledger: Ledger) -> None:
    """Nobody waits without need."""
    waiting = [one for one in model.queue if ledger.may_run(one.account)]
    if model.life.state is not State.READY or not waiting or not model.has_room:
        return
    if model.held_back is not None:
        assert model.held_back in model.queue, f"{model.name} waits for one that is gone"
        assert model.row_budget is not None, f"{model.name} has no budget and holds back"
        return
    assert model.held, f"{model.name} has room and lets requests wait"
    held = [*model.held, *(request.held for request in waiting)]
    assert any(model.blame.is_due(one) for one in held), "nobody's turn is due"
