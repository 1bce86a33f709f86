"""What a worker does while its engine has nothing to do: it looks at its memory again, and gives
back: soon what nothing uses, and after a while what is known of earlier prompts.

Memory that MLX keeps for reuse goes after three seconds, because its next use is in the next step
or never. Known prompts stay for five minutes: people take longer than seconds to write the next
turn of a chat.
"""

from __future__ import annotations

from collections.abc import Callable

from .engine import Engine

LOOK_AGAIN_AFTER_S = 0.5
"""What the last step has begun is over by then: what is held now is less than at its end. From then
on the engine also prepares for later requests."""

FREE_AFTER_S = 3.0
"""After this long without a request, memory for reuse is freed: another process can use it, and a
prompt that comes later allocates its own anyway."""

GIVE_BACK_AFTER_S = 300.0
"""After this long, known prompts are freed, too: who pauses to think has not gone away."""


class IdleTime:
    """Counts how long an engine has had nothing to do; it gives back once in each such time.

    Args:
        engine: gives back.
        clock: monotonic seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._since: float | None = None
        self._ahead: list[tuple[float, Callable[[], None]]] = []

    def ends(self) -> None:
        """There is something to do."""
        self._since = None

    @property
    def has_lasted(self) -> bool:
        """True if there has been nothing to do for so long that a request is hardly on its way: the
        supervisor sends those that waited for a load, or were resumed, as soon as it is over."""
        return self._since is not None and self._clock() - self._since >= LOOK_AGAIN_AFTER_S

    def left_s(self, *, is_busy: bool) -> float | None:
        """Return the seconds until memory is to be looked at again, or the engine gives back, which
        it does now if it is time; None if all that is done, or if it is busy."""
        if is_busy:
            self.ends()
            return None
        if self._since is None:
            self._since, self._ahead = self._clock(), self._plan()
        idle_s = self._clock() - self._since
        while self._ahead:
            after_s, do = self._ahead[0]
            if idle_s < after_s:
                return after_s - idle_s
            del self._ahead[0]
            do()
        return None

    def _plan(self) -> list[tuple[float, Callable[[], None]]]:
        """Return the tasks of one idle time, each with the seconds after which it is due."""
        return [
            (LOOK_AGAIN_AFTER_S, lambda: None),  # the caller looks when it has waited
            (FREE_AFTER_S, lambda: self._engine.give_back(keeps_prefixes=True)),
            (GIVE_BACK_AFTER_S, self._engine.give_back),
        ]
