"""The transition table: which rule meets which trigger in which state.

`apply` is the only way in which a life changes. docs/architecture.md shows the table for people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxsup.protocol.states import HAS_PROCESS, State

from . import on_command, on_exit, on_process
from .life import Life
from .states import Abandoned
from .triggers import (
    BecameReady,
    Broke,
    Died,
    Drained,
    Due,
    Effect,
    GivenUp,
    Greeted,
    GreetedByOtherVersion,
    HasPid,
    HitBug,
    Hurry,
    Progressed,
    Reconfigured,
    Removed,
    Stalled,
    Suspended,
    Trigger,
    Turn,
    WantDown,
    WantRestart,
    WantUp,
)

Rule = Callable[[Life, Any, float], None]


class ImpossibleTransitionError(Exception):
    """The table has no rule for this trigger in this state: a bug."""


_REST = (State.STOPPED, State.BACKOFF, State.FAILED)
_WITHOUT_PROCESS = (State.STOPPED, State.PENDING, State.BACKOFF, State.FAILED)
_AFTER_READY = (State.READY, State.DRAINING)

Place = State | type[Abandoned]

TABLE: dict[tuple[Place, type[Trigger]], Rule] = {
    **{(state, WantUp): on_command.up_from_rest for state in _REST},
    (State.PENDING, WantUp): on_command.up_joins,
    (State.LOADING, WantUp): on_command.up_joins,
    (State.READY, WantUp): on_command.up_when_ready,
    (State.DRAINING, WantUp): on_command.up_ends_drain,
    (State.STOPPING, WantUp): on_command.up_joins,
    (State.STOPPED, WantDown): on_command.down_when_stopped,
    (State.PENDING, WantDown): on_command.down_without_process,
    (State.BACKOFF, WantDown): on_command.down_without_process,
    (State.FAILED, WantDown): on_command.down_without_process,
    (State.LOADING, WantDown): on_command.down_while_loading,
    (State.READY, WantDown): on_command.down_when_ready,
    (State.DRAINING, WantDown): on_command.down_while_draining,
    (State.STOPPING, WantDown): on_command.down_while_stopping,
    **{(state, WantRestart): on_command.restart_from_rest for state in _REST},
    (State.PENDING, WantRestart): on_command.restart_joins,
    (State.LOADING, WantRestart): on_command.restart_while_loading,
    (State.READY, WantRestart): on_command.restart_when_ready,
    (State.DRAINING, WantRestart): on_command.restart_while_draining,
    (State.STOPPING, WantRestart): on_command.restart_while_stopping,
    **{(state, Removed): on_command.removed_without_process for state in _WITHOUT_PROCESS},
    (State.LOADING, Removed): on_command.removed_while_loading,
    (State.READY, Removed): on_command.removed_when_ready,
    (State.DRAINING, Removed): on_command.removed_while_ending,
    (State.STOPPING, Removed): on_command.removed_while_ending,
    **{(state, Reconfigured): on_command.reconfigured_at_rest for state in _WITHOUT_PROCESS},
    (State.LOADING, Reconfigured): on_command.reconfigured_while_loading,
    (State.READY, Reconfigured): on_command.reconfigured_when_ready,
    (State.DRAINING, Reconfigured): on_command.reconfigured_while_draining,
    (State.STOPPING, Reconfigured): on_command.reconfigured_while_stopping,
    (State.PENDING, Turn): on_process.spawn,
    (State.LOADING, HasPid): on_process.pid_while_loading,
    (State.STOPPING, HasPid): on_process.pid_while_stopping,
    (State.LOADING, Greeted): on_process.greeted,
    (State.STOPPING, Greeted): on_process.nothing,
    (State.LOADING, GreetedByOtherVersion): on_process.other_version,
    **{(state, GreetedByOtherVersion): on_process.other_version for state in _AFTER_READY},
    (State.STOPPING, GreetedByOtherVersion): on_process.nothing,
    (State.LOADING, Progressed): on_process.progressed,
    (State.STOPPING, Progressed): on_process.nothing,
    (State.LOADING, BecameReady): on_process.ready,
    (State.STOPPING, BecameReady): on_process.nothing,
    (State.DRAINING, Drained): on_process.drained,
    (State.LOADING, Broke): on_process.broke,
    **{(state, Broke): on_process.broke for state in _AFTER_READY},
    (State.STOPPING, Broke): on_process.nothing,
    **{(state, Stalled): on_process.stalled for state in _AFTER_READY},
    (State.LOADING, Suspended): on_process.suspended,
    **{(state, Suspended): on_process.suspended for state in _AFTER_READY},
    (State.LOADING, HitBug): on_process.bug_with_process,
    **{(state, HitBug): on_process.bug_with_process for state in _AFTER_READY},
    (State.STOPPING, HitBug): on_process.bug_while_stopping,
    **{(state, HitBug): on_process.bug_without_process for state in _WITHOUT_PROCESS},
    (State.LOADING, Due): on_process.load_stalled,
    (State.DRAINING, Due): on_process.drain_limit,
    (State.STOPPING, Due): on_process.escalate,
    (State.BACKOFF, Due): on_process.retry,
    **{(state, Hurry): on_process.nothing for state in _WITHOUT_PROCESS},
    (State.DRAINING, Hurry): on_process.drain_limit,
    (State.STOPPING, Hurry): on_process.escalate,
    **{(state, Died): on_exit.died for state in HAS_PROCESS},
    (State.STOPPING, GivenUp): on_exit.given_up,
    (Abandoned, WantUp): on_command.up_beside_abandoned,
    (Abandoned, WantDown): on_command.down_beside_abandoned,
    (Abandoned, WantRestart): on_command.up_beside_abandoned,
    (Abandoned, Removed): on_command.removed_beside_abandoned,
    (Abandoned, Reconfigured): on_command.reconfigured_beside_abandoned,
    (Abandoned, HitBug): on_process.bug_without_process,
    (Abandoned, Hurry): on_process.nothing,
    (Abandoned, Died): on_exit.ended_at_last,
}
"""Every pair of state and trigger that can meet; HELLO and READY after READY are `Broke`. FAILED
with a process that could not be ended has its own rows."""


def apply(life: Life, trigger: Trigger, now: float) -> list[Effect]:
    """Changes a life as the table says and returns what follows from it.

    Raises:
        ImpossibleTransitionError: the table has no rule; nothing was changed.
    """
    place: Place = Abandoned if isinstance(life.phase, Abandoned) else life.state
    rule = TABLE.get((place, type(trigger)))
    if rule is None:
        raise ImpossibleTransitionError(
            f"{life.name}: no rule for {type(trigger).__name__} in {life.state}"
        )
    rule(life, trigger, now)
    return life.take_effects()
