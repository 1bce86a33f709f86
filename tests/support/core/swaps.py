"""Models that do not fit together, and a core that lets them take turns."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import Dispatch
from mlxsup.supervisor.core.settings import ModelSettings

from support.core.memory import GIB, MemoryDriver, limited, sized


class SwapDriver(MemoryDriver):
    """Plays workers whose rows leave when the test says so."""

    def stream(self, model: str, id: str, **more: Any) -> RequestKey:
        """A request that runs, and has a token."""
        [key] = self.serve(id, model=model, **more)
        self.accept(key, model)
        self.token(key, model=model)
        return key

    def rows_leave(self, model: str) -> list[RequestKey]:
        """The worker confirms every pause that it was told of; returns whose."""
        keys = [key for key in self.pausing if key in self.model(model).batch.running]
        for key in keys:
            self.row_left(key, model)
        return keys

    def gone(self, model: str) -> None:
        """Its rows leave, and its process ends as it was asked to."""
        self.rows_leave(model)
        assert self.state(model) is State.STOPPING
        self.exit(model, code=0)

    def turn(self, model: str) -> list[RequestKey]:
        """It comes up, and all that it is given gain a token; returns their keys."""
        self.come_up(model)
        keys = self.dispatched()
        for key in keys:
            self.accept(key, model)
        if keys:
            self.token(*keys, model=model)
        return keys

    def swap(self, out: str) -> None:
        """Time passes until a model has to make room, and it does."""
        self.passes_until(out)
        self.gone(out)

    def passes_until(self, out: str, most_s: int = 300) -> int:
        """Seconds pass until a model has to make room; returns how many."""
        for second in range(most_s):
            if self.why(out) == "swap":
                return second
            self.pass_time(1.0)
        raise AssertionError(f"{out} stays: {self.row(out)}")

    def stays(self, model: str, seconds: float = 300.0) -> bool:
        """Whether a model that is READY stays so, whatever time passes."""
        self.pass_time(seconds)
        return self.state(model) is State.READY

    def why(self, model: str) -> str:
        """Why it is wanted or not."""
        return str(self.row(model)["why"])

    def resumed(self) -> list[Dispatch]:
        """What the latest event has dispatched again."""
        return [one for one in self.told(Dispatch) if one.resume is not None]


def rivals(names: str = "ab", *more: ModelSettings, **changes: Any) -> SwapDriver:
    """Models of 4 GiB, of which the first is READY; there is memory for one of them."""
    models = [sized(name, 4 * GIB) for name in names]
    settings = limited(4 * GIB, **{"max_queue": 64, "max_queue_per_client": 64, **changes})
    driver = SwapDriver([*models, *more], settings)
    driver.bring_up(names[0])
    return driver


def finish(driver: SwapDriver, model: str, *keys: int) -> None:
    """Rows run to their end."""
    driver.token(*keys, model=model, finish=FinishReason.STOP)
