"""Every scenario on one model type."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.models.cache import make_prompt_cache

from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx.load import shorten

from .build import make_model
from .model_type import ModelType
from .scenarios import CHUNK, SCENARIOS, Trial, chunks_of
from .verdict import Kind, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a row of the table shows.

    Attributes:
        name: of the model type.
        caches: kinds of cache of its layers, those within lists too.
        load: `ok`, or why it does not load.
        batching: how its rows run; None if it does not load.
        batching_reason: why they do not share passes.
        verdicts: by scenario; empty if it does not load.
    """

    name: str
    caches: str
    load: str
    batching: Batching | None
    batching_reason: str
    verdicts: dict[str, Verdict]

    @property
    def is_right(self) -> bool:
        """Whether it loads, and every answer is right."""
        return self.load == "ok" and all(v.is_right for v in self.verdicts.values())


def try_model_type(model_type: ModelType, scenarios: list[str] | None = None) -> Result:
    """Builds a model, loads it, and runs scenarios, all of them unless some are named."""
    with tempfile.TemporaryDirectory() as parent:
        try:
            folder = make_model(Path(parent) / model_type.name, model_type)
        except RuntimeError as error:
            return _not_loaded(model_type, error)
        return try_folder(model_type, folder, scenarios)


def try_folder(model_type: ModelType, folder: Path, scenarios: list[str] | None = None) -> Result:
    """As `try_model_type`, for a model that is there already."""
    trial = Trial(folder)
    try:
        caches = kinds_of_cache(trial.model())
        try:
            facts = trial.load()
        except Exception as error:  # noqa: BLE001  (whatever a load raises is its row's result)
            return _not_loaded(model_type, error, caches)
        verdicts: dict[str, Verdict] = {}
        with chunks_of(CHUNK):
            for name in scenarios or SCENARIOS:
                verdicts[name] = _run(trial, name)
    finally:
        trial.close()
    return Result(
        name=model_type.name,
        caches=caches,
        load="ok",
        batching=facts.batching,
        batching_reason=facts.batching_reason,
        verdicts=verdicts,
    )


def _run(trial: Trial, name: str) -> Verdict:
    try:
        return SCENARIOS[name](trial)
    except Exception as error:  # noqa: BLE001  (whatever a step raises is its cell's result)
        trial.abandon()
        return Verdict(kind=Kind.RAISED, detail=f"{type(error).__name__}: {shorten(error)}")


def _not_loaded(model_type: ModelType, error: Exception, caches: str = "") -> Result:
    load = f"{type(error).__name__}: {shorten(error)}"
    return Result(
        name=model_type.name,
        caches=caches,
        load=load,
        batching=None,
        batching_reason="",
        verdicts={},
    )


def kinds_of_cache(model: object) -> str:
    """The kinds of cache that a model makes for itself, without the word `Cache`."""
    waiting = list(make_prompt_cache(model))
    kinds: set[str] = set()
    while waiting:
        cache = waiting.pop()
        inner = getattr(cache, "caches", None)
        kinds.add(type(cache).__name__.removesuffix("Cache") or "plain")
        waiting.extend(inner or ())
    return ", ".join(sorted(kinds))
