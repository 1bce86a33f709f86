"""A core with a memory budget, and workers that keep their rows to budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName, RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, PauseReason, RowState, WorkerPhase
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    Heartbeat,
    PrefillProgress,
    Ready,
    RowDelta,
    SetBudget,
    Step,
)
from mlxsup.supervisor.core.actions import Action, SendToWorker
from mlxsup.supervisor.core.budget import Need
from mlxsup.supervisor.core.events import Appraised, Sampled
from mlxsup.supervisor.core.settings import ModelSettings

from support.core.driver import LAUNCH, entry
from support.core.memory import MemoryDriver, limited
from support.core.needs import need

LAYERS = (CacheLayers(layers=1, token_bytes=1),)
"""A row takes two bytes for each token, and 512 to grow."""

FIXED = 10_000
"""What a model takes without rows: three quarters weights, one its process."""

LEAST = 1000
CONTEXT = 8000
ROWS = 4


def bytes_for(rows: int, longest: int) -> int:
    """Return the bytes that so many rows of a length take."""
    return cache_bytes(LAYERS, rows=rows, longest=longest)


ONE_ROW = bytes_for(1, LEAST)


def need_of(**changes: Any) -> Need:
    """What each model here needs."""
    given: dict[str, Any] = {"least": LEAST, "context": CONTEXT, "rows": ROWS, "layers": LAYERS}
    return need(FIXED, **(given | changes))


def served(name: str, **changes: Any) -> ModelSettings:
    """A model of four rows."""
    return entry(name, launch=replace(LAUNCH, max_concurrency=ROWS), **changes)


class RowsDriver(MemoryDriver):
    """Plays workers that measured their layers; each keeps to a budget once `confirm` says so.

    Attributes:
        budgets: the budgets that each worker was sent, in order.
        own_bytes: what each says of its process.
    """

    def __init__(
        self,
        names: str,
        budget_bytes: int,
        needs: dict[str, Need] | None = None,
        own_bytes: int | None = FIXED // 4,
        pinned: str = "",
        **changes: Any,
    ) -> None:
        self.own_bytes = own_bytes
        self.budgets: dict[str, list[SetBudget]] = {name: [] for name in names}
        models = [served(name, pinned=name in pinned) for name in names]
        super().__init__(models, limited(budget_bytes, **changes))
        self.obey = self.listen
        everybody = {name: need_of() for name in names} | (needs or {})
        self.do(
            Appraised(now=self.now, needs={ModelName(name): one for name, one in everybody.items()})
        )

    def listen(self, actions: list[Action]) -> None:
        """Notes the budgets."""
        for action in actions:
            if isinstance(action, SendToWorker) and isinstance(action.message, SetBudget):
                self.budgets[str(action.model)].append(action.message)

    def ready(self, model: str = "m") -> list[Action]:
        """READY, with what it measured."""
        weights = FIXED - FIXED // 4
        return self.worker(
            Ready(
                context_length=CONTEXT,
                fingerprint="f",
                backend="fake",
                active_bytes=weights,
                own_bytes=self.own_bytes,
                cache_layers=list(LAYERS),
            ),
            model,
        )

    def budget(self, model: str) -> int:
        """What the rows of a model were allowed last."""
        return self.budgets[model][-1].rows_bytes

    def confirm(self, model: str, number: int | None = None, held: int = 0) -> list[Action]:
        """A worker says that its rows keep to a budget: the latest, or this one."""
        latest = self.budgets[model][-1].number if number is None else number
        beat = Heartbeat(
            step=0, phase=WorkerPhase.IDLE, phase_s=0.0, budget=latest, active_bytes=held
        )
        return self.worker(beat, model)

    def measure(self, **footprints: int) -> list[Action]:
        """The monitor has measured processes."""
        by_pid = {ord(name): size for name, size in footprints.items()}
        return self.do(Sampled(now=self.now, footprint_bytes=by_pid, machine_bytes=10**12))

    def begin(self, model: str, id: str, prompt: int = 100, **more: Any) -> RequestKey:
        """A request that is dispatched and accepted, with that many tokens of prompt."""
        (key,) = self.serve(id, model=model, **more)
        self.accept_long(model, key, prompt)
        return key

    def accept_long(self, model: str, key: RequestKey, prompt: int) -> list[Action]:
        """The worker accepts a request with that many tokens of prompt."""
        acceptance = Acceptance(
            prompt_tokens=pack_tokens([1] * prompt),
            opening="",
            parameters={},
            seed=5,
            fingerprint="f",
        )
        return self.worker(Accepted(key=key, acceptance=acceptance, tokenize_s=0.1), model)

    def gain(self, model: str, key: RequestKey, tokens: int) -> list[Action]:
        """One step gives a row that many tokens."""
        row = RowDelta(key=key, text="x", tokens=pack_tokens([9] * tokens))
        return self.worker(Step(step=1, rows=[row]), model)

    def read(self, model: str, key: RequestKey, tokens: int) -> list[Action]:
        """One step reads so much of a prompt."""
        part = PrefillProgress(key=key, done=tokens, total=2 * tokens, computed=tokens)
        return self.worker(Step(step=1, prefill=[part]), model)

    def end(self, model: str, key: RequestKey) -> list[Action]:
        """A row ends."""
        return self.token(key, model=model, finish=FinishReason.STOP)

    def short(self, model: str, key: RequestKey) -> list[Action]:
        """A row leaves, because there is too little memory for it."""
        row = RowDelta(key=key, paused=RowState.DROPPED, pause_reason=PauseReason.MEMORY)
        return self.worker(Step(step=1, rows=[row]), model)
