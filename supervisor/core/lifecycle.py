"""The transition table: which rule meets which trigger in which state.

`apply` is the only way in which a life changes. docs/architecture.md shows the table for people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxsup.protocol.states import HAS_PROCESS, State

from . import exits, rules_process, rules_wanted
from .life import Life
from .phases import Abandoned
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
    **{(state, WantUp): rules_wanted.up_from_rest for state in _REST},
    (State.PENDING, WantUp): rules_wanted.up_joins,
    (State.LOADING, WantUp): rules_wanted.up_joins,
    (State.READY, WantUp): rules_wanted.up_when_ready,
    (State.DRAINING, WantUp): rules_wanted.up_ends_drain,
    (State.STOPPING, WantUp): rules_wanted.up_joins,
    (State.STOPPED, WantDown): rules_wanted.down_when_stopped,
    (State.PENDING, WantDown): rules_wanted.down_without_process,
    (State.BACKOFF, WantDown): rules_wanted.down_without_process,
    (State.FAILED, WantDown): rules_wanted.down_without_process,
    (State.LOADING, WantDown): rules_wanted.down_while_loading,
    (State.READY, WantDown): rules_wanted.down_when_ready,
    (State.DRAINING, WantDown): rules_wanted.down_while_draining,
    (State.STOPPING, WantDown): rules_wanted.down_while_stopping,
    **{(state, WantRestart): rules_wanted.restart_from_rest for state in _REST},
    (State.PENDING, WantRestart): rules_wanted.restart_joins,
    (State.LOADING, WantRestart): rules_wanted.restart_while_loading,
    (State.READY, WantRestart): rules_wanted.restart_when_ready,
    (State.DRAINING, WantRestart): rules_wanted.restart_while_draining,
    (State.STOPPING, WantRestart): rules_wanted.restart_while_stopping,
    **{(state, Removed): rules_wanted.removed_without_process for state in _WITHOUT_PROCESS},
    (State.LOADING, Removed): rules_wanted.removed_while_loading,
    (State.READY, Removed): rules_wanted.removed_when_ready,
    (State.DRAINING, Removed): rules_wanted.removed_while_ending,
    (State.STOPPING, Removed): rules_wanted.removed_while_ending,
    **{(state, Reconfigured): rules_wanted.reconfigured_at_rest for state in _WITHOUT_PROCESS},
    (State.LOADING, Reconfigured): rules_wanted.reconfigured_while_loading,
    (State.READY, Reconfigured): rules_wanted.reconfigured_when_ready,
    (State.DRAINING, Reconfigured): rules_wanted.reconfigured_while_draining,
    (State.STOPPING, Reconfigured): rules_wanted.reconfigured_while_stopping,
    (State.PENDING, Turn): rules_process.spawn,
    (State.LOADING, HasPid): rules_process.pid_while_loading,
    (State.STOPPING, HasPid): rules_process.pid_while_stopping,
    (State.LOADING, Greeted): rules_process.greeted,
    (State.STOPPING, Greeted): rules_process.nothing,
    (State.LOADING, GreetedByOtherVersion): rules_process.other_version,
    **{(state, GreetedByOtherVersion): rules_process.other_version for state in _AFTER_READY},
    (State.STOPPING, GreetedByOtherVersion): rules_process.nothing,
    (State.LOADING, Progressed): rules_process.progressed,
    (State.STOPPING, Progressed): rules_process.nothing,
    (State.LOADING, BecameReady): rules_process.ready,
    (State.STOPPING, BecameReady): rules_process.nothing,
    (State.DRAINING, Drained): rules_process.drained,
    (State.LOADING, Broke): rules_process.broke,
    **{(state, Broke): rules_process.broke for state in _AFTER_READY},
    (State.STOPPING, Broke): rules_process.nothing,
    **{(state, Stalled): rules_process.stalled for state in _AFTER_READY},
    (State.LOADING, Suspended): rules_process.suspended,
    **{(state, Suspended): rules_process.suspended for state in _AFTER_READY},
    (State.LOADING, HitBug): rules_process.bug_with_process,
    **{(state, HitBug): rules_process.bug_with_process for state in _AFTER_READY},
    (State.STOPPING, HitBug): rules_process.bug_while_stopping,
    **{(state, HitBug): rules_process.bug_without_process for state in _WITHOUT_PROCESS},
    (State.LOADING, Due): rules_process.load_stalled,
    (State.DRAINING, Due): rules_process.drain_limit,
    (State.STOPPING, Due): rules_process.escalate,
    (State.BACKOFF, Due): rules_process.retry,
    **{(state, Hurry): rules_process.nothing for state in _WITHOUT_PROCESS},
    (State.DRAINING, Hurry): rules_process.drain_limit,
    (State.STOPPING, Hurry): rules_process.escalate,
    **{(state, Died): exits.died for state in HAS_PROCESS},
    (State.STOPPING, GivenUp): exits.given_up,
    (Abandoned, WantUp): rules_wanted.up_beside_abandoned,
    (Abandoned, WantDown): rules_wanted.down_beside_abandoned,
    (Abandoned, WantRestart): rules_wanted.up_beside_abandoned,
    (Abandoned, Removed): rules_wanted.removed_beside_abandoned,
    (Abandoned, Reconfigured): rules_wanted.reconfigured_beside_abandoned,
    (Abandoned, HitBug): rules_process.bug_without_process,
    (Abandoned, Hurry): rules_process.nothing,
    (Abandoned, Died): exits.ended_at_last,
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
