"""What an exception of MLX means for the rows that are in the batch, whichever call it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.worker.engine import Engine, GpuFaultElsewhereError
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.logprobs import LogprobReader
from mlxsup.worker.engines.mlx.passes import SerialPasses, TogetherPasses

from support.mlx_rows import loaded_engine, make_row
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

RUNNING, ENDED, NEW = (RequestKey(number) for number in (1, 2, 3))
PROMPTS = {key: [int(key), *range(4, 40)] for key in (RUNNING, ENDED, NEW)}

PASSES = (TogetherPasses, SerialPasses)
BREAKS: dict[str, tuple[object, ...]] = {
    "step": PASSES,
    "ahead": PASSES,
    "read": (LogprobReader,),
    "async_eval": (mx,),
    "synchronize": (mx,),
}
"""What evaluates arrays, and where it is found."""

CALLS: list[tuple[str, str, Callable[[MlxEngine], object]]] = [
    ("insert", "async_eval", lambda engine: engine.insert(make_row(NEW, PROMPTS[NEW]))),
    ("remove", "async_eval", lambda engine: engine.remove(RUNNING)),
    ("set_aside", "async_eval", lambda engine: engine.set_aside(RUNNING, keep=True)),
    ("set_aside", "async_eval", lambda engine: engine.set_aside(RUNNING, keep=False)),
    ("set_aside", "ahead", lambda engine: engine.set_aside(RUNNING, keep=True)),
    ("set_aside", "read", lambda engine: engine.set_aside(RUNNING, keep=True)),
    ("step", "async_eval", lambda engine: engine.step()),
    ("step", "step", lambda engine: engine.step()),
    ("step", "read", lambda engine: engine.step()),
    ("decode", "step", lambda engine: engine.decode()),
    ("decode", "read", lambda engine: engine.decode()),
    ("settle", "async_eval", lambda engine: engine.settle()),
    ("give_back", "async_eval", lambda engine: engine.give_back()),
    ("give_back", "synchronize", lambda engine: engine.give_back(keeps_prefixes=True)),
    ("close", "async_eval", lambda engine: engine.close()),
    ("close", "synchronize", lambda engine: engine.close()),
]
"""Each method that may evaluate arrays, and what in it does."""

EVALUATE_NOTHING = {
    *("text", "drop_kept", "free_kept", "bound_rows", "bytes_held", "has_rows", "row_count"),
    *("predict_step_s", "prefill_chunk", "has_long_prompt", "has_decoding", "shared_pass_s"),
}
NO_ROWS_YET = {"load"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(tiny: Path) -> Iterator[MlxEngine]:
    """One row decodes, and one has ended in the last step, of which nothing is kept yet."""
    with loaded_engine(tiny, prefix_cache_bytes=10**7) as engine:
        engine.insert(make_row(RUNNING, PROMPTS[RUNNING], top_logprobs=1))
        engine.insert(make_row(ENDED, PROMPTS[ENDED], max_tokens=2))
        while engine.row_count() == 2:
            engine.step()
        yield engine


def break_it(patch: pytest.MonkeyPatch, what: str, text: str) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(text)

    for place in BREAKS[what]:
        patch.setattr(place, what, broken)


@pytest.mark.parametrize(
    ("what", "call"),
    [(what, call) for _, what, call in CALLS],
    ids=[f"{what} in {method}" for method, what, _ in CALLS],
)
def test_no_row_is_accused_if_there_is_no_memory_anywhere_in_a_call(
    engine: MlxEngine,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    call: Callable[[MlxEngine], object],
) -> None:
    """Exit 70 would make suspects of the rows, although other processes hold the memory."""
    with monkeypatch.context() as patch:
        break_it(patch, what, "cudaMallocAsync(&data, size, stream) failed: out of memory")
        with pytest.raises(MemoryError, match="cudaMallocAsync"):
            call(engine)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[malloc] Unable to allocate 99 bytes.", MemoryError),
        ("[METAL] Command buffer execution failed: Innocent Victim", GpuFaultElsewhereError),
        ("There is no Stream(gpu, 1) in current thread.", RuntimeError),
    ],
)
def test_what_mlx_raised_decides_who_is_accused(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    """Exit 75 and exit 72 accuse nobody; exit 70 makes suspects of the rows."""
    with monkeypatch.context() as patch:
        break_it(patch, "async_eval", text)
        with pytest.raises(Exception, match=r"allocate|Innocent|Stream") as raised:
            engine.settle()
    assert type(raised.value) is kind


def test_every_method_that_may_evaluate_is_among_them() -> None:
    methods = {name for name in vars(Engine) if not name.startswith("_")}
    assert methods == {method for method, _, _ in CALLS} | EVALUATE_NOTHING | NO_ROWS_YET
