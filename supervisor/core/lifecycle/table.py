"""The transition table: which rule meets which trigger in which state.

`apply` is the only way to change a life. docs/architecture.md says where each state leads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from . import on_command, on_download, on_exit, on_files, on_memory, on_process, on_swap
from .effects import Outcome
from .life import Life
from .states import (
    Abandoned,
    Backoff,
    Draining,
    Failed,
    Loading,
    Pending,
    Phase,
    Ready,
    Stopped,
    Stopping,
    Swapping,
)
from .triggers import (
    BecameReady,
    Broke,
    Died,
    Drained,
    Due,
    Evicted,
    FilesCompared,
    FilesDoubted,
    GivenUp,
    Greeted,
    GreetedByOtherVersion,
    HasFiles,
    HasMemory,
    HasPid,
    HitBug,
    Hurry,
    LacksFiles,
    LacksMemory,
    LoadedTooLarge,
    NoFiles,
    NoMemory,
    Progressed,
    Reconfigured,
    Removed,
    RowsGiveWay,
    Stalled,
    Suspended,
    SwapCalledOff,
    SwappedOut,
    Trigger,
    Turn,
    WantDown,
    WantRestart,
    WantUp,
)

P = TypeVar("P")
T = TypeVar("T")
Rule = Callable[[Life, P, T, float], None]
"""A rule: changes a life that is in phase P because of trigger T, at a time."""


class ImpossibleTransitionError(Exception):
    """The table has no rule for this trigger in this state: a bug."""


_REST: tuple[type[Stopped | Backoff | Failed], ...] = (Stopped, Backoff, Failed)
_WITHOUT_PROCESS: tuple[type[Stopped | Pending | Backoff | Failed], ...] = (
    Stopped,
    Pending,
    Backoff,
    Failed,
)
_AFTER_READY: tuple[type[Ready | Draining | Swapping], ...] = (Ready, Draining, Swapping)
_WITH_PROCESS: tuple[type[Loading | Ready | Draining | Swapping | Stopping], ...] = (
    Loading,
    Ready,
    Draining,
    Swapping,
    Stopping,
)


def _rule(
    phases: type[P] | tuple[type[P], ...], trigger: type[T], rule: Rule[P, T]
) -> dict[tuple[type[Phase], type[Trigger]], Rule[Any, Any]]:
    """One row for each phase; mypy checks that a rule fits its row."""
    one_or_more: tuple[Any, ...] = phases if isinstance(phases, tuple) else (phases,)
    column: Any = trigger
    return {(phase, column): rule for phase in one_or_more}


TABLE: dict[tuple[type[Phase], type[Trigger]], Rule[Any, Any]] = {
    **_rule(_REST, WantUp, on_command.up_from_rest),
    **_rule(Pending, WantUp, on_command.up_joins),
    **_rule(Loading, WantUp, on_command.up_joins),
    **_rule(Ready, WantUp, on_command.up_when_ready),
    **_rule(Draining, WantUp, on_command.up_ends_drain),
    **_rule(Stopping, WantUp, on_command.up_joins),
    **_rule(Stopped, WantDown, on_command.down_when_stopped),
    **_rule(Pending, WantDown, on_command.down_without_process),
    **_rule(Backoff, WantDown, on_command.down_without_process),
    **_rule(Failed, WantDown, on_command.down_without_process),
    **_rule(Loading, WantDown, on_command.down_while_loading),
    **_rule(Ready, WantDown, on_command.down_when_ready),
    **_rule(Draining, WantDown, on_command.down_while_draining),
    **_rule(Stopping, WantDown, on_command.down_while_stopping),
    **_rule(_REST, WantRestart, on_command.restart_from_rest),
    **_rule(Pending, WantRestart, on_command.restart_joins),
    **_rule(Loading, WantRestart, on_command.restart_while_loading),
    **_rule(Ready, WantRestart, on_command.restart_when_ready),
    **_rule(Draining, WantRestart, on_command.restart_while_draining),
    **_rule(Stopping, WantRestart, on_command.restart_while_stopping),
    **_rule(_WITHOUT_PROCESS, Removed, on_command.removed_without_process),
    **_rule(Loading, Removed, on_command.removed_while_loading),
    **_rule(Ready, Removed, on_command.removed_when_ready),
    **_rule(Draining, Removed, on_command.removed_while_ending),
    **_rule(Stopping, Removed, on_command.removed_while_ending),
    **_rule(Stopped, Reconfigured, on_command.reconfigured_at_rest),
    **_rule(Pending, Reconfigured, on_command.reconfigured_at_rest),
    **_rule(Backoff, Reconfigured, on_command.reconfigured_after_crash),
    **_rule(Failed, Reconfigured, on_command.reconfigured_after_crash),
    **_rule(Loading, Reconfigured, on_command.reconfigured_while_loading),
    **_rule(Ready, Reconfigured, on_command.reconfigured_when_ready),
    **_rule(Draining, Reconfigured, on_command.reconfigured_while_draining),
    **_rule(Stopping, Reconfigured, on_command.reconfigured_while_stopping),
    **_rule(Pending, Turn, on_process.spawn),
    **_rule(Pending, LacksMemory, on_memory.lacks),
    **_rule(Pending, HasMemory, on_memory.lacks_no_longer),
    **_rule(Pending, NoMemory, on_memory.refused),
    **_rule(Pending, LacksFiles, on_download.lacks),
    **_rule(Pending, HasFiles, on_download.has),
    **_rule(Pending, NoFiles, on_download.failed),
    **_rule(Ready, Evicted, on_memory.evicted),
    **_rule(Ready, RowsGiveWay, on_memory.rows_give_way),
    **_rule(Ready, SwappedOut, on_swap.swapped_out),
    **_rule(Swapping, SwapCalledOff, on_swap.called_off),
    **_rule(Swapping, Drained, on_swap.rows_have_left),
    **_rule(Swapping, Due, on_swap.rows_have_left),
    **_rule(Swapping, WantUp, on_command.up_joins),
    **_rule(Swapping, WantDown, on_swap.down),
    **_rule(Swapping, WantRestart, on_swap.restart),
    **_rule(Swapping, Removed, on_swap.removed),
    **_rule(Swapping, Reconfigured, on_swap.reconfigured),
    **_rule(Ready, FilesDoubted, on_files.doubted),
    **_rule(Ready, FilesCompared, on_files.compared),
    **_rule(Draining, FilesCompared, on_files.noted),
    **_rule(Swapping, FilesCompared, on_files.noted),
    **_rule(Stopping, FilesCompared, on_process.nothing),
    **_rule(Loading, HasPid, on_process.pid_while_loading),
    **_rule(Stopping, HasPid, on_process.pid_while_stopping),
    **_rule(Loading, Greeted, on_process.greeted),
    **_rule(Stopping, Greeted, on_process.nothing),
    **_rule(Loading, GreetedByOtherVersion, on_process.other_version),
    **_rule(_AFTER_READY, GreetedByOtherVersion, on_process.other_version),
    **_rule(Stopping, GreetedByOtherVersion, on_process.nothing),
    **_rule(Loading, Progressed, on_process.progressed),
    **_rule(Stopping, Progressed, on_process.nothing),
    **_rule(Loading, LoadedTooLarge, on_process.too_large),
    **_rule(Stopping, LoadedTooLarge, on_process.nothing),
    **_rule(Loading, BecameReady, on_process.ready),
    **_rule(Stopping, BecameReady, on_process.nothing),
    **_rule(Draining, Drained, on_process.drained),
    **_rule(Loading, Broke, on_process.broke),
    **_rule(_AFTER_READY, Broke, on_process.broke),
    **_rule(Stopping, Broke, on_process.nothing),
    **_rule(_AFTER_READY, Stalled, on_process.stalled),
    **_rule(Loading, Suspended, on_process.suspended),
    **_rule(_AFTER_READY, Suspended, on_process.suspended),
    **_rule(Loading, HitBug, on_process.bug_with_process),
    **_rule(_AFTER_READY, HitBug, on_process.bug_with_process),
    **_rule(Stopping, HitBug, on_process.bug_while_stopping),
    **_rule(_WITHOUT_PROCESS, HitBug, on_process.nothing),
    **_rule(Pending, Due, on_process.nothing),
    **_rule(Loading, Due, on_process.load_stalled),
    **_rule(Ready, Due, on_process.idle),
    **_rule(Draining, Due, on_process.drain_limit),
    **_rule(Stopping, Due, on_process.escalate),
    **_rule(Backoff, Due, on_process.retry),
    **_rule(_WITHOUT_PROCESS, Hurry, on_process.nothing),
    **_rule(Draining, Hurry, on_process.drain_limit),
    **_rule(Stopping, Hurry, on_process.escalate),
    **_rule(_WITH_PROCESS, Died, on_exit.died),
    **_rule(Stopping, GivenUp, on_exit.given_up),
    **_rule(Abandoned, WantUp, on_command.up_beside_abandoned),
    **_rule(Abandoned, WantDown, on_command.down_beside_abandoned),
    **_rule(Abandoned, WantRestart, on_command.up_beside_abandoned),
    **_rule(Abandoned, Removed, on_command.removed_beside_abandoned),
    **_rule(Abandoned, Reconfigured, on_command.reconfigured_beside_abandoned),
    **_rule(Abandoned, HitBug, on_process.nothing),
    **_rule(Abandoned, Hurry, on_process.nothing),
    **_rule(Abandoned, Died, on_exit.ended_at_last),
}
"""Every pair of phase and trigger that can meet; HELLO and READY after READY are `Broke`."""


def apply(life: Life, trigger: Trigger, now: float) -> list[Outcome]:
    """Changes a life by the table and returns what follows from it.

    Raises:
        ImpossibleTransitionError: the table has no rule; nothing was changed.
    """
    phase = life.phase
    rule = TABLE.get((type(phase), type(trigger)))
    if rule is None:
        raise ImpossibleTransitionError(
            f"{life.name}: no rule for {type(trigger).__name__} in {life.state}"
        )
    rule(life, phase, trigger, now)
    return life.take_outcomes()
