"""What must hold of loads: the same error twice in a row ends them, and what READY said is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.messages import Ready
from mlxsup.protocol.states import State, Wanted
from mlxsup.supervisor.core.phases import Loading

if TYPE_CHECKING:
    from .workers import PlayedWorker
    from .world import World


class Loads:
    """What the loads of a run have shown so far.

    Args:
        world: around the core.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: dict[ModelName, dict[str, str]] = {}
        self._last_error: dict[ModelName, str] = {}

    def asked_for(self) -> None:
        """A person asks for a start: nothing is held against any model."""
        self._last_error.clear()

    def forgotten(self, model: ModelName) -> None:
        """The model was removed, and the core has forgotten it."""
        self._found.pop(model, None)
        self._last_error.pop(model, None)

    def begins(self, model: ModelName, known_batching: dict[str, str] | None) -> None:
        """A process is to be started: it is handed what the latest READY said."""
        assert known_batching == self._found.get(model), "a worker was given what nobody found out"

    def found(self, worker: PlayedWorker, ready: Ready) -> None:
        """A worker is about to say READY."""
        if worker.max_rows > 1 and self._is_loading(worker.model):
            self._found[worker.model] = {
                "fingerprint": ready.fingerprint,
                "batching": ready.batching.value,
                "reason": ready.batching_reason,
            }

    def ended(self, worker: PlayedWorker, error: str) -> Callable[[], None]:
        """A process is about to be seen to end; `error` is what it said of that.

        Returns:
            What to call once the core has seen it.
        """
        model = worker.model
        life = self._world.core._models.by_name[model].life
        kind = error.rstrip("0123456789 bytes") if self._is_loading(model) else ""
        is_alike = kind != "" and self._last_error.get(model) == kind
        self._last_error[model] = kind
        is_wanted = life.wanted is Wanted.UP
        memory_matters = "memory" in kind

        def check() -> None:
            if is_alike and is_wanted and not memory_matters:
                assert life.state is State.FAILED, "the same error is tried a third time (P11)"
            if memory_matters and life.state is State.FAILED:
                assert "crashed" in life.failure, "a load that lacked memory is given up (P9)"

        return check

    def _is_loading(self, model: ModelName) -> bool:
        return isinstance(self._world.core._models.by_name[model].life.phase, Loading)
