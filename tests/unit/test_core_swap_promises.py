"""What a swap frees is kept for the model that it was for, also while another one loads first."""

from __future__ import annotations

from mlxsup.protocol.states import Priority, State
from mlxsup.supervisor.core.settings import ModelSettings

from support.core_memory import GIB, limited, sized, states
from support.core_swaps import SwapDriver


def crowded(*more: ModelSettings) -> SwapDriver:
    """`a` makes room for `b`, which somebody types to; `d` has waited for longer, and neither of
    the two fits beside `a`. Before `a` has left, `c` loads again after a crash."""
    models = [sized("a", 4 * GIB), sized("c", 2 * GIB), sized("b", 7 * GIB), sized("d", 7 * GIB)]
    more_bytes = sum(one.launch.memory_limit_bytes or 0 for one in more)
    driver = SwapDriver([*models, *more], limited(10 * GIB + more_bytes))
    for name in ("a", "c", *(one.name for one in more)):
        driver.bring_up(name)
        driver.stream(name, f"r-{name}")
    driver.ask("r1", "d", priority=Priority.BATCH)
    driver.pass_time(1.0)
    driver.ask("r2", "b", priority=Priority.INTERACTIVE)
    driver.passes_until("a")
    driver.exit("c", code=70)
    assert states(driver, "abcd") == [
        State.DRAINING,
        State.PENDING,
        State.LOADING,
        State.PENDING,
    ]
    return driver


def test_it_is_kept_for_the_model_whose_turn_to_load_has_not_come() -> None:
    driver = crowded()
    driver.gone("a")
    assert driver.row("b")["memory_wait"] == {
        "waits_s": 20.0,
        "reason": "needs 7.00 GiB, which is kept for it: other models load first",
    }
    driver.come_up("c")
    assert driver.spawns() == ["b"], "though the other one has waited for longer"


def test_nothing_is_kept_once_nobody_waits_for_that_model() -> None:
    driver = crowded()
    driver.gone("a")
    driver.cancel("r2")
    assert driver.row("b")["memory_wait"] is None
    driver.come_up("c")
    assert driver.spawns() == ["d"]


def test_a_swap_is_called_off_if_there_is_room_without_it_while_another_one_loads() -> None:
    driver = crowded(sized("e", 7 * GIB))
    driver.unload("e")
    driver.exit("e", code=0)
    assert states(driver, "abc") == [State.READY, State.PENDING, State.LOADING]
    driver.come_up("c")
    assert driver.spawns() == ["b"]
