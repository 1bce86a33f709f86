"""`reload --dry-run` names who would be evicted or could not be loaded, as the reload then does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Reply
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.actions import LogFault
from mlxsup.supervisor.core.events import Caller, Reloaded
from mlxsup.supervisor.core.settings import ModelSettings

from support.core_looks import ALICE
from support.core_memory import GIB, MemoryDriver, limited, pair_and_more, sized

CALLER = Caller(connection=ALICE, id=RequestId("reload"))
AS_BEFORE = tuple(sized(name, 4 * GIB) for name in "abc")


def reload(
    driver: MemoryDriver, gib: float | None, models: tuple[ModelSettings, ...], *, is_dry: bool
) -> dict[str, Any]:
    settings = limited(0, budget=None) if gib is None else limited(int(gib * GIB))
    event = Reloaded(now=driver.now, settings=settings, models=models, caller=CALLER, is_dry=is_dry)
    driver.do(event)
    [reply] = driver.sent(Reply)
    assert not [one for one in driver.actions if isinstance(one, LogFault)]
    return dict(reply.value)


def both(driver: MemoryDriver, gib: float, *models: ModelSettings) -> dict[str, Any]:
    """What a dry run says; the reload that follows has to do it, and nothing else."""
    before = {model.name: model.life.state for model in driver.core.fleet}
    said = reload(driver, gib, models or AS_BEFORE, is_dry=True)
    assert {model.name: model.life.state for model in driver.core.fleet} == before, (
        "a dry run changes nothing"
    )
    done = reload(driver, gib, models or AS_BEFORE, is_dry=False)
    assert said["over_budget_bytes"] == done["over_budget_bytes"]
    names = {one.name for one in models or AS_BEFORE}
    after = [model for model in driver.core.fleet if model.name in names]
    gone = [one.name for one in after if one.life.state is not before.get(one.name, State.STOPPED)]
    assert said["evicts"] == gone
    return said


def test_a_budget_that_is_large_enough_evicts_nobody() -> None:
    said = both(pair_and_more(), 8)
    assert (said["over_budget_bytes"], said["evicts"], said["still_over_bytes"]) == (0, [], 0)
    assert said["refuses"] == []


def test_without_a_budget_nothing_is_over_it_and_nobody_is_refused() -> None:
    said = reload(pair_and_more(), None, AS_BEFORE, is_dry=True)
    assert (said["over_budget_bytes"], said["evicts"], said["still_over_bytes"]) == (0, [], 0)
    assert said["refuses"] == []


def test_the_least_recently_used_goes_first_and_only_as_many_as_must() -> None:
    driver = pair_and_more()
    said = both(driver, 6)
    assert said["over_budget_bytes"] == 2 * GIB
    assert len(said["evicts"]) == 1
    assert said["still_over_bytes"] == 0


def test_what_busy_models_hold_is_said_apart() -> None:
    driver = pair_and_more()
    driver.serve("r1", model="a")
    driver.serve("r2", model="b")
    said = both(driver, 5)
    assert (said["over_budget_bytes"], said["evicts"]) == (3 * GIB, [])
    assert said["still_over_bytes"] == 3 * GIB


def test_what_a_reload_removes_is_not_too_much() -> None:
    said = both(pair_and_more(), 4, *AS_BEFORE[1:])
    assert (said["over_budget_bytes"], said["evicts"], said["still_over_bytes"]) == (0, [], 0)


def test_who_does_not_fit_at_all_is_named_with_the_reason_whether_it_is_new_or_not() -> None:
    large = sized("new", 7 * GIB)
    said = both(pair_and_more(), 6, *AS_BEFORE, replace(large, preload=False))
    assert said["refuses"] == [
        {"model": "new", "reason": "needs 7.00 GiB, and the memory budget is 6.00 GiB"}
    ]
    assert len(said["evicts"]) == 1
    said = reload(pair_and_more(), 3, AS_BEFORE, is_dry=True)
    assert [one["model"] for one in said["refuses"]] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["c", "new"])
def test_who_does_not_fit_next_to_what_is_pinned_is_named(name: str) -> None:
    pinned = sized(name, 4 * GIB, pinned=True)
    models = (*AS_BEFORE[:2], pinned)
    said = reload(pair_and_more(), 7, models, is_dry=True)
    assert [one["model"] for one in said["refuses"]] == ["a", "b"]
    assert f"{name} is pinned and holds 4.00 GiB" in said["refuses"][0]["reason"]
    assert said["over_budget_bytes"] == 5 * GIB
