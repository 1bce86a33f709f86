"""When to look for models that may load or must go: not after each event, but once anything has
changed that this depends on, and for as long as anybody waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State

from .downloads import Downloads
from .head_room import HeadRoom
from .lifecycle.triggers import Trigger
from .loading import next_steps
from .model import Model
from .requests.ledger import Ledger
from .rows_memory import longest_stream
from .settings import CoreSettings
from .warm_pool import WarmPool

MOST_PASSES = 10
"""Over all models that wait for a load, in one event; each pass leaves less to do."""


class LoadLooks:
    """Has those models load, and those go, whose turn it is.

    A look depends on the states of models, on what is reserved for each, on spare workers and on
    the budget. If one found nobody who waits or makes room, and no more reserved than there is, the
    next would find the same until one of these changes, whatever requests come and go.

    Args:
        head_room: stirred whenever a state, or what is reserved, has changed.
        spares: the spare workers.
        downloads: of what models lack.
        ledger: says which accounts may have more requests running.
        trigger: puts a trigger to the life of a model.
        end_drains: ends the drains of models that have nothing left to finish.
    """

    def __init__(
        self,
        head_room: HeadRoom,
        spares: WarmPool,
        downloads: Downloads,
        ledger: Ledger,
        trigger: Callable[[Model, Trigger, float], None],
        end_drains: Callable[[float], None],
    ) -> None:
        self._head_room = head_room
        self._spares = spares
        self._downloads = downloads
        self._ledger = ledger
        self._trigger = trigger
        self._end_drains = end_drains
        self._is_due = True

    def stir(self) -> None:
        """The budget, or what spare workers hold, has changed."""
        self._is_due = True

    def settle(
        self,
        models: Mapping[ModelName, Model],
        touched: Collection[ModelName],
        settings: CoreSettings,
        now: float,
    ) -> None:
        """Looks, if that is due, and has downloaded what is lacking.

        Args:
            models: all of them.
            touched: those that anything has happened to.
            settings: the budget, and how many may load at a time.
            now: monotonic seconds.
        """
        self._is_due |= self._head_room.is_stirred
        if not (touched and self._is_due):
            return
        for name in touched:
            model = models.get(name)
            if model is not None and model.life.state is State.PENDING:
                model.life.stream_tokens = longest_stream(model)
        self._downloads.settle(models.values(), now)
        # What the head-room takes after this look counts for the next one.
        self._is_due = self._look(models, settings, now) or self._head_room.is_stirred

    def _look(self, models: Mapping[ModelName, Model], settings: CoreSettings, now: float) -> bool:
        """Returns whether the next event may lead to anything."""
        for _ in range(MOST_PASSES):  # what one gives back may be enough for one before it
            steps = next_steps(models.values(), self._spares, settings, self._ledger.may_run, now)
            if steps is None:
                return False
            for model, trigger in steps:
                self._trigger(model, trigger, now)
            self._end_drains(now)  # of models that were evicted
            if not steps:
                break
        return True
