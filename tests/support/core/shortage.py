"""A core whose rows take memory, on a machine on which other programs need some, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlxsup.protocol.cache_cost import GROWTH_TOKENS
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Priority
from mlxsup.protocol.worker_messages import PauseRow
from mlxsup.supervisor.core.actions import SendToWorker
from mlxsup.supervisor.core.budget import STEPS, Need, Reading
from mlxsup.supervisor.core.events import Sampled

from support.core.rows import FIXED, LEAST, RowsDriver, bytes_for

STEP = 2000
WHOLE = STEPS * STEP
KEPT_FREE = 10**6


class ShortageDriver(RowsDriver):
    """Plays models that are READY, and what their processes are measured at.

    Attributes:
        lengths: tokens of each row that is in a batch, by model.
    """

    def __init__(
        self, names: str = "a", needs: dict[str, Need] | None = None, **changes: Any
    ) -> None:
        self.lengths: dict[str, dict[RequestKey, int]] = {name: {} for name in names}
        settings = {"max_queue": 64, "max_queue_per_client": 64, "min_residency_s": 0.0}
        super().__init__(names, WHOLE, needs, **(settings | changes))
        for name in names:
            self.load(name)
            self.measure()
            for other in names:
                self.confirm_latest(other)
            self.come_up(name)
        for name in names * 2:
            self.confirm_latest(name)

    def confirm_latest(self, model: str) -> None:
        """A worker that was sent a budget keeps to it."""
        if self.budgets[model] and self.model(model).life.has_process:
            self.confirm(model)

    def start(self, model: str, id: str, prompt: int = 2000, **more: Any) -> RequestKey:
        """A row that has a token, a second after the one before it."""
        key = self.begin(model, id, prompt, **more)
        self.now += 1.0
        self.gain(model, key, 1)
        self.lengths[model][key] = prompt + 1
        return key

    def grow(self, model: str, key: RequestKey, tokens: int) -> None:
        """A row gains that many tokens."""
        self.gain(model, key, tokens)
        self.lengths[model][key] += tokens

    def batch(self, model: str, id: str, prompt: int = 2000, **more: Any) -> RequestKey:
        """Such a row of the lowest class."""
        return self.start(model, id, prompt, priority=Priority.BATCH, **more)

    def rows_leave(self, model: str, *keys: RequestKey) -> None:
        """These rows leave as they were asked to."""
        for key in keys:
            del self.lengths[model][key]
            self.row_left(key, model)

    def has_room(self, room_bytes: int) -> list[RequestKey]:
        """A second later models can have so much in all; returns the rows that must leave now."""
        self.now += 1.0
        held = {ord(name): holds(rows.values()) for name, rows in self.lengths.items()}
        free_bytes = room_bytes - sum(held.values())
        reading = Reading(
            available_bytes=KEPT_FREE + free_bytes,
            kept_free_bytes=KEPT_FREE,
        )
        sampled = Sampled(now=self.now, footprint_bytes=held, machine_bytes=10**12, reading=reading)
        self.do(sampled)
        return self.asked()

    def asked(self) -> list[RequestKey]:
        """The rows that the latest event asked to leave."""
        sent = [one.message for one in self.actions if isinstance(one, SendToWorker)]
        pauses = [one for one in sent if isinstance(one, PauseRow)]
        assert not any(one.keep for one in pauses), "what is kept frees nothing"
        return [one.key for one in pauses]


def holds(lengths: Iterable[int]) -> int:
    """What a process with such rows is measured at."""
    rows = list(lengths)
    return FIXED + bytes_for(len(rows), max(rows, default=0))


def needs(staying: Iterable[int], begun: Iterable[int] = ()) -> int:
    """What a model needs for its rows to grow by one step; `begun`: those that must return."""
    rows = list(staying)
    longest = max((*rows, *begun), default=0) + GROWTH_TOKENS
    grown = bytes_for(len(rows), max(rows, default=0) + GROWTH_TOKENS)
    return FIXED + max(bytes_for(1, max(LEAST, longest)), grown)
