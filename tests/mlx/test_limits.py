"""Memory of an engine: limits that a load sets, memory that runs out, what is given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching, LoadPhase
from mlxsup.worker.engine import BadLaunchError, EngineFacts, GpuFaultElsewhereError
from mlxsup.worker.engines.mlx.batch_modes import SerialMode, TogetherMode, make_mode
from mlxsup.worker.engines.mlx.caches import layers_of, measure_layers, row_bytes
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.estimate import estimate
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.limits import CACHE_SHARE, MemoryLimits, clear_cache
from mlxsup.worker.engines.mlx.loader import iterate_arrays, load_lazily
from mlxsup.worker.engines.mlx.logits import FloatLogits
from mlxsup.worker.engines.mlx.logprobs import LogprobReader
from mlxsup.worker.engines.mlx.prompt_batch import NewRow
from mlxsup.worker.engines.mlx.sampler import PLAIN

from support.model_types.build import make_model
from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import known_as, loaded_engine, make_row, make_spec, run_rows, solo

pytestmark = pytest.mark.mlx

GIB = 2**30


def facts_of(path: Path, **changes: Any) -> EngineFacts:
    engine = MlxEngine(make_spec(path, **changes))
    try:
        return engine.load(lambda phase, progress: None)
    finally:
        engine.close()


def test_memory_that_runs_out_in_a_load_is_not_the_models_fault(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*args: object, **named: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 99 bytes.")

    monkeypatch.setattr(mlx_lm.utils, "load_model", load_model)
    with pytest.raises(MemoryError, match="99 bytes"):
        facts_of(tiny)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All limits set on a simulated device that can wire 1000 bytes; it began with 7."""
    limits = [7]

    def set_wired_limit(value: int) -> int:
        limits.append(value)
        return limits[-2]

    info = dict(mx.device_info()) | {"max_recommended_working_set_size": 1000}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return limits


def test_an_engine_wires_nothing_unless_told_and_the_limit_comes_back_E3_I3(
    tiny: Path, limit: list[int]
) -> None:
    """Several workers must not wire all of it each."""
    with loaded_engine(tiny):
        assert limit == [7], "mlx-lm's generator would wire what the machine recommends"
    assert limit == [7]


@pytest.mark.parametrize(("asked", "wired"), [(300, 300), (5000, 1000), (None, 1000)])
def test_wiring_takes_what_the_spec_says_within_the_machine_I3(
    limit: list[int], asked: int | None, wired: int
) -> None:
    """None is as much as was loaded, here above what the simulated machine recommends."""
    weights = mx.zeros(1000)
    mx.eval(weights)
    limits = MemoryLimits(make_spec(Path("m"), wired_limit_bytes=asked), "metal")
    limits.set()
    limits.set_wired()
    assert limit[-1] == wired
    limits.restore()
    assert limit[-1] == 7


@pytest.fixture
def mlx_limits() -> Iterator[Callable[[], tuple[int, int]]]:
    """What MLX may hold, and what it may keep for reuse; 20 and 10 GiB and a byte at first."""
    before = mx.set_memory_limit(20 * GIB + 1), mx.set_cache_limit(10 * GIB + 1)

    def look() -> tuple[int, int]:
        now = int(mx.set_memory_limit(before[0])), int(mx.set_cache_limit(before[1]))
        mx.set_memory_limit(now[0])
        mx.set_cache_limit(now[1])
        return now

    yield look
    mx.set_memory_limit(before[0])
    mx.set_cache_limit(before[1])


def test_memory_and_cache_limits_hold_for_a_life_and_come_back_E3(
    tiny: Path, mlx_limits: Callable[[], tuple[int, int]]
) -> None:
    with loaded_engine(tiny, memory_limit_bytes=2 * 10**9, cache_limit_bytes=0) as engine:
        assert mlx_limits() == (2 * 10**9, 0)
        run_rows(engine, [make_row(1, list(range(100)))])
        held = engine.bytes_held()
        assert held.cache == 0
        assert 0 < held.active <= held.peak
    assert mlx_limits() == (20 * GIB + 1, 10 * GIB + 1)


def test_a_limit_below_the_weights_ends_the_load_before_they_are_read_E3_I4(
    tiny: Path, mlx_limits: Callable[[], tuple[int, int]]
) -> None:
    """And comes back: held to a limit below what it uses, MLX takes three times as long."""
    seen: list[LoadPhase] = []
    engine = MlxEngine(make_spec(tiny, memory_limit_bytes=1_000_000, cache_limit_bytes=0))
    with pytest.raises(BadLaunchError, match=r", but memory is limited to 1.0 MiB"):
        engine.load(lambda phase, progress: seen.append(phase))
    assert LoadPhase.MATERIALISE not in seen
    engine.close()
    engine.close()
    assert mlx_limits() == (20 * GIB + 1, 10 * GIB + 1)


def test_a_load_lowers_the_declared_context_and_warns_of_a_limit_that_weights_nearly_fill(
    tiny: Path,
) -> None:
    weights = (tiny / "model.safetensors").stat().st_size
    facts = facts_of(tiny, context_length=100, memory_limit_bytes=int(weights * 1.1))
    assert facts.context_length == 100
    [warning] = facts.warnings
    assert "set memory to at least" in warning


@pytest.mark.parametrize(
    ("backend", "info", "expected"),
    [
        ("cuda", {"total_memory": 140 * GIB}, 8 * GIB),
        ("cuda", {"total_memory": 24 * GIB, "free_memory": GIB}, 3 * GIB),
        ("metal", {"memory_size": 16 * GIB}, 2 * GIB),
        ("cuda", {}, 8 * GIB),
        ("cpu", {"memory_size": 16 * GIB}, 10 * GIB + 1),
    ],
)
def test_a_gpu_keeps_a_bounded_part_for_reuse_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    mlx_limits: Callable[[], tuple[int, int]],
    backend: str,
    info: dict[str, int],
    expected: int,
) -> None:
    """MLX's own limit there is nearly the whole device, in every process."""
    monkeypatch.setattr(mx, "device_info", lambda: info)
    for told, held in ((None, expected), (0, 0), (9 * GIB, 9 * GIB)):
        limits = MemoryLimits(make_spec(Path("m"), cache_limit_bytes=told), backend)
        limits.set()
        assert mlx_limits()[1] == held
        limits.restore()
        assert mlx_limits()[1] == 10 * GIB + 1


@pytest.mark.parametrize(
    ("backend", "told", "expected"),
    [
        ("cuda", None, 7 * GIB),
        ("cuda", 6 * GIB, 6 * GIB),
        ("cuda", 9 * GIB, 7 * GIB),
        ("metal", None, None),
        ("cpu", 6 * GIB, 6 * GIB),
    ],
)
def test_with_cuda_mlx_holds_the_weights_and_most_of_what_rows_may_take(
    mlx_limits: Callable[[], tuple[int, int]],
    backend: str,
    told: int | None,
    expected: int | None,
) -> None:
    """Two engines on one GPU that read long prompts held 81 GiB each without this, 58 together
    were needed."""
    limits = MemoryLimits(make_spec(Path("m"), memory_limit_bytes=told), backend)
    limits.set()
    weights = mx.zeros(1000)
    mx.eval(weights)
    limits.set_wired()
    held = mx.get_active_memory() if backend == "cuda" and expected == 7 * GIB else 0
    limits.bound_rows(4 * GIB)
    limits.bound_rows(8 * GIB)
    assert mlx_limits()[0] == (20 * GIB + 1 if expected is None else expected + held)
    assert not limits.is_exceeded()
    limits.restore()
    assert mlx_limits()[0] == 20 * GIB + 1


@pytest.mark.usefixtures("mlx_limits")
def test_more_than_that_is_noticed() -> None:
    limits = MemoryLimits(make_spec(Path("m")), "cuda")
    limits.set()
    assert not limits.is_exceeded(), "nothing was bounded"
    limits.set_wired()
    limits.bound_rows(8 * 4000)
    rows = mx.zeros(7 * 1000)
    mx.eval(rows)
    assert not limits.is_exceeded()
    more = mx.zeros(10_000)
    mx.eval(more)
    assert limits.is_exceeded()
    limits.restore()


def test_known_prompts_go_when_rows_need_their_memory(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a long prompt waits for a lease, and the others only decode."""
    with loaded_engine(tiny, prefix_cache_bytes=10**7, max_concurrency=1) as engine:
        for key, call in enumerate((engine.step, engine.decode)):
            run_rows(engine, [make_row(1, list(range(2 + key, 60)), max_tokens=4)])
            engine.insert(make_row(2, list(range(70, 90)), max_tokens=9))
            call()
            assert engine.bytes_held().prefix > 0, "there is memory for it"
            with monkeypatch.context() as patch:
                patch.setattr(MemoryLimits, "is_exceeded", lambda limits: True)
                call()
            assert engine.bytes_held().prefix == 0
            engine.remove(RequestKey(2))


RUNNING, ENDED, NEW = (RequestKey(number) for number in (1, 2, 3))
PROMPTS = {key: [int(key), *range(4, 40)] for key in (RUNNING, ENDED, NEW)}

PASSES = (TogetherMode, SerialMode)
BREAKS: dict[str, tuple[object, ...]] = {
    "step": PASSES, "ahead": PASSES, "read": (LogprobReader,), "async_eval": (mx,),
    "synchronize": (mx,),
}  # fmt: skip
"""What evaluates arrays, and where it is found."""

Call = Callable[[MlxEngine], object]
CALLS: list[tuple[str, Call, tuple[str, ...]]] = [
    ("insert", lambda engine: engine.insert(make_row(NEW, PROMPTS[NEW])), ("async_eval",)),
    ("remove", lambda engine: engine.remove(RUNNING), ("async_eval",)),
    (
        "set_aside",
        lambda engine: engine.set_aside(RUNNING, keep=True),
        ("async_eval", "ahead", "read"),
    ),
    ("drop", lambda engine: engine.set_aside(RUNNING, keep=False), ("async_eval",)),
    ("step", lambda engine: engine.step(), ("async_eval", "step", "read")),
    ("decode", lambda engine: engine.decode(), ("step", "read")),
    ("settle", lambda engine: engine.settle(), ("async_eval",)),
    ("give_back", lambda engine: engine.give_back(), ("async_eval",)),
    ("wait", lambda engine: engine.give_back(keeps_prefixes=True), ("synchronize",)),
    ("close", lambda engine: engine.close(), ("async_eval", "synchronize")),
]
"""Each method that may evaluate arrays, and what in it does."""


@pytest.fixture
def engine(tiny: Path) -> Iterator[MlxEngine]:
    """One row decodes, and one has ended in the last step, of which nothing is kept yet."""
    known = known_as(tiny, Batching.TOGETHER)
    with loaded_engine(tiny, prefix_cache_bytes=10**7, known_batching=known) as engine:
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
    ("call", "what"),
    [
        pytest.param(call, what, id=f"{what} in {method}")
        for method, call, found in CALLS
        for what in found
    ],
)
def test_no_row_is_accused_if_there_is_no_memory_anywhere_in_a_call(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch, call: Call, what: str
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
def test_the_error_of_mlx_decides_the_exit(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    """Exit 75 and exit 72 accuse nobody; exit 70 makes suspects of the rows."""
    with monkeypatch.context() as patch:
        break_it(patch, "async_eval", text)
        with pytest.raises(Exception, match=r"allocate|Innocent|Stream") as raised:
            engine.settle()
    assert type(raised.value) is kind


def test_a_closed_engine_is_as_before_its_load(tiny: Path) -> None:
    engine = MlxEngine(make_spec(tiny, max_concurrency=1))
    before = mx.get_active_memory()
    engine.load(lambda *_: None)
    engine.insert(make_row(1, [1, 2, 3]))
    assert engine.row_count() == 1
    engine.close()
    assert engine.row_count() == 0
    assert engine.model is None
    assert mx.get_cache_memory() == 0
    with pytest.raises(RuntimeError, match="not loaded"):
        engine.step()
    assert mx.get_active_memory() <= before + (1 << 20)


def test_memory_is_given_back_with_known_prompts_or_without(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is idle another process can use the memory for reuse, and a second turn the rest."""
    prompt = list(range(300, 340))
    order: list[str] = []
    with loaded_engine(tiny, prefix_cache_bytes=1 << 24, max_concurrency=1) as engine:
        first = solo(engine, make_row(1, prompt))
        known = engine.bytes_held().prefix
        assert known > 0
        engine.give_back(keeps_prefixes=True)
        assert (engine.bytes_held().cache, engine.bytes_held().prefix) == (0, known)
        assert engine.insert(make_row(2, prompt)) == 39
        engine.remove(RequestKey(2))
        engine.give_back()
        assert (engine.bytes_held().cache, engine.bytes_held().prefix) == (0, 0)
        assert solo(engine, make_row(4, prompt)) == first
        # A pass under way would give its memory back too late, and CUDA's pool only at a wait.
        with monkeypatch.context() as patch:
            patch.setattr(mx, "synchronize", lambda *streams: order.extend("wait" for _ in streams))
            patch.setattr(mx, "clear_cache", lambda: order.append("clear"))
            engine.give_back()
    assert order == ["wait", "clear", "wait"]


# ---------------------------------------------------------------- what mlx-lm allocates
@pytest.mark.parametrize("name", ["falcon_h1", "gemma3_text", "llama"])
def test_a_batch_takes_no_more_than_estimated_and_not_much_less(tmp_path: Path, name: str) -> None:
    folder = check_folder(make_model(tmp_path / name, name), lambda share: None)
    model = load_lazily(folder)[0]
    layers = measure_layers(model)
    for lengths in ([5], [40, 7], [300, 20, 100]):
        rows = [read(model, length) for length in lengths]
        batch = [kept[0].merge(list(kept)) for kept in zip(*rows, strict=True)]
        for held in (sum(map(bytes_of, rows)), bytes_of(batch)):
            assert held <= cache_bytes(layers, rows=len(lengths), longest=max(lengths))
        assert bytes_of(batch) >= row_bytes(layers, min(lengths)) * len(lengths)


def read(model: Any, length: int) -> list[Any]:
    """The caches of a row that has read a prompt of so many tokens in pieces, and decoded one."""
    caches: list[Any] = make_prompt_cache(model)
    tokens = [number % 50 + 1 for number in range(length)]
    *head, last = tokens
    pieces = [head[begin : begin + 64] for begin in range(0, len(head), 64)]
    for piece in [*pieces, [last]]:
        mx.eval(model(mx.array([piece]), cache=caches))
    return caches


def bytes_of(caches: Sequence[Any]) -> int:
    return sum(int(layer.nbytes) for layer in layers_of(caches) if not layer.empty())


# ---------------------------------------------------------------- what a worker reports
def test_a_worker_reports_what_was_estimated(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    found = estimate(folder)
    with loaded_engine(folder) as engine:
        assert engine.facts.cache_layers == found.layers
        # The warm-up may leave tables of positions in the model.
        arrays = sum(int(array.nbytes) for array in iterate_arrays(engine.model))
        assert found.weight_bytes <= arrays <= found.weight_bytes + 4096


LAYERS, HEADS, HEAD = 8, 2, 64
LAYER_TOKEN_BYTES = 2 * HEADS * HEAD * 4
"""Keys and values of one token in one layer, in float32."""

TOKENS, CHUNK = 512, 128


@pytest.fixture(scope="module")
def stream() -> mx.Stream:
    return mx.new_stream(mx.default_device())


@pytest.fixture(scope="module")
def model(stream: mx.Stream) -> FloatLogits:
    """Its caches are much larger than anything else of it."""
    with mx.stream(stream):
        model = Model(
            ModelArgs(
                model_type="llama", hidden_size=64, num_hidden_layers=LAYERS, intermediate_size=64,
                num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD,
                rms_norm_eps=1e-5, vocab_size=256,
            )
        )  # fmt: skip
        mx.eval(model.parameters())
    return FloatLogits(model)


def row_of(count: int, answer: int = 4, seed: int = 0) -> NewRow:
    return NewRow(
        tokens=[(seed + 7 * place) % 256 for place in range(count)], known=[], cache=None,
        max_tokens=answer, draws=PLAIN, stops=StopSequences([]),
    )  # fmt: skip


def read_prompt(passes: TogetherMode | SerialMode, uid: int, count: int) -> None:
    for done in range(0, count - 1, CHUNK):
        passes.step({uid: min(CHUNK, count - 1 - done)})


class Watched:
    """A model that notes where the caches are that each pass begins with."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.caches: list[Any] = []
        self.began: list[list[int]] = []

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.caches = cache
        self.began.append(self.places())
        logits: mx.array = self._model(tokens, cache=cache)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def places(self) -> list[int]:
        """Where the keys of each layer are in memory; a copy that is still to be made is made."""
        keys = [layer.keys for layer in self.caches if layer.keys is not None]
        return [np.array(one, copy=False).__array_interface__["data"][0] for one in keys]


def test_an_answer_writes_where_its_prompt_did(model: FloatLogits, stream: mx.Stream) -> None:
    watched = Watched(model)
    passes = make_mode(Batching.TOGETHER, watched, stream=stream)
    uid = passes.insert(row_of(TOKENS))
    read_prompt(passes, uid, TOKENS)
    written = watched.places()
    assert len(written) == LAYERS
    passes.step({uid: 0})
    assert watched.began[-1] == written
    assert watched.places() == written, "nor does the first token move them"
    passes.close()


def test_outgrown_caches_do_not_pile_up_on_a_gpu(
    model: FloatLogits, stream: mx.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row that comes or goes makes all arrays anew in another size, and MLX keeps the old ones
    to use them again, which it never can: with its own limit more than the caches take."""
    caches_bytes = LAYERS * LAYER_TOKEN_BYTES * (TOKENS + 256)
    limit_bytes = caches_bytes // 4
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": CACHE_SHARE * limit_bytes})
    before = mx.set_cache_limit(2**40)  # as much as it likes, as on a GPU
    limits = MemoryLimits(make_spec(Path("m")), "cuda")
    limits.set()
    mx.clear_cache()
    passes = make_mode(Batching.TOGETHER, model, stream=stream)
    try:
        base = mx.get_active_memory()
        held = []
        uid = passes.insert(row_of(TOKENS, answer=40))
        read_prompt(passes, uid, TOKENS)
        passes.step({uid: 0})
        for seed in range(1, 4):
            short = passes.insert(row_of(3, answer=2, seed=seed))
            for size in (2, 0, 0, 0, 0):
                passes.step({short: size} if size else {})
                mx.synchronize(stream)
                held.append(mx.get_active_memory() - base + mx.get_cache_memory())
    finally:
        passes.close()
        limits.restore()
        mx.set_cache_limit(before)
    # Two rows, both of the same length in a batch, and what is kept.
    assert max(held) < 2 * caches_bytes + 2 * limit_bytes, [one / caches_bytes for one in held]


def test_other_threads_run_while_the_cache_waits_for_a_pass() -> None:
    go, ran = threading.Event(), threading.Event()

    def run() -> None:
        go.wait()
        ran.set()

    other = threading.Thread(target=run)
    other.start()
    array = mx.full((512, 512), 2.0**-9)
    for _ in range(20):
        array = array @ array
    mx.async_eval(array)  # type: ignore[no-untyped-call]
    go.set()
    clear_cache()
    assert ran.is_set()
    other.join()
