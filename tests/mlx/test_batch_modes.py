"""The way in which rows run: what the probe of a load sees, and what engines make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import BadModelError, GpuFaultElsewhereError
from mlxsup.worker.engines.mlx import capability_probe as mlx_way
from mlxsup.worker.engines.mlx.batch_modes import BatchDecode
from mlxsup.worker.engines.mlx.capability_probe import (
    ONLY_ROW,
    PROBE_VERSION,
    SEQUENCE_LENGTH,
    STARTS,
    TOO_SHORT,
    CapabilityProbe,
    Finding,
    distance,
    largest_distance,
    make_sequence,
    run_side_by_side,
)
from mlxsup.worker.engines.mlx.drafts import DraftingBatch
from mlxsup.worker.engines.mlx.engine import NO_NUMBERS, MlxEngine
from mlxsup.worker.engines.mlx.loader import MODEL_FAULTS
from mlxsup.worker.engines.mlx.logits import FloatLogits
from mlxsup.worker.engines.mlx.prompt_batch import PromptBatch

from support.models.tiny_model import make_tiny_model
from support.worker.loop_driver import LoopDriver
from support.worker.mlx_rows import (
    known_as,
    loaded_engine,
    make_row,
    make_spec,
    random_state,
    run_rows,
    solo,
)

pytestmark = pytest.mark.mlx


TOGETHER, SERIAL, ONE_ROW = Batching.TOGETHER, Batching.SERIAL_PREFILL, Batching.ONE_ROW


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_model(tiny)[0]


Fault = Callable[[int, int, Any, mx.array], mx.array]
"""Gets the rows and tokens of a pass, the cache and the logits; gives the logits."""


class Broken:
    """A model that is right by itself, and does something wrong with several rows."""

    def __init__(self, model: Any, fault: Fault) -> None:
        self._model = model
        self._fault = fault

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        rows, length = tokens.shape
        return self._fault(rows, length, cache, self._model(tokens, cache=cache))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def find(model: Any, **changes: Any) -> Finding:
    stream = mx.new_stream(mx.default_device())
    values: dict[str, Any] = {
        "model_type": "tiny",
        "stream": stream,
        "is_exact": True,
        "max_concurrency": 4,
        "context_length": 4096,
        "vocabulary_size": 2048,
        "report": lambda: None,
    }
    return CapabilityProbe(FloatLogits(model), **(values | changes)).find()


def mixed(logits: mx.array) -> mx.array:
    """Each row gets some of another one's logits."""
    return logits + 0.3 * logits[::-1]


def reads_wrongly(rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
    """Padding goes into what is kept of the prompts."""
    for layer in cache:
        if getattr(layer, "_right_padding", None) is not None:
            layer.values = layer.values * 1.5
    return logits


def decodes_wrongly(rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
    return mixed(logits) if rows > 1 and length == 1 else logits


def joins_wrongly(rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
    """What is kept of the others is damaged when the third row is there."""
    for layer in cache if rows == 3 else ():
        layer.values = layer.values * 1.3
    return logits


class LeavesWrongly:
    """As soon as a row has left, each of the others gets some of another one's logits."""

    most = 0

    def __call__(self, rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
        self.most = rows if rows == 1 else max(rows, self.most)
        return mixed(logits) if 1 < rows < self.most else logits


class JoinsLateWrongly:
    """As soon as a row joins others that decode, each gets some of another one's logits."""

    most = 0
    is_joined = False

    def __call__(self, rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
        if length == 1:
            self.is_joined = self.is_joined or 1 < self.most < rows
            self.most = max(rows, self.most)
        return mixed(logits) if self.is_joined and rows > 1 else logits


def forgets_wrongly(rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
    """The first tokens of a row in company are those of the other; what follows is right."""
    return mixed(logits) if rows > 1 and cache[0].size() < 7 else logits


def becomes_nan(rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
    return logits * float("nan") if rows > 1 else logits


def never_drawn(rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
    return mx.concatenate([logits[..., :-1], mx.full((rows, length, 1), -mx.inf)], axis=-1)


def no_numbers(rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
    return logits * float("nan")


def raises(error: Exception, most: int = 1) -> Fault:
    """Fail in company, or only in larger company."""

    def fail(rows: int, length: int, cache: Any, logits: mx.array) -> mx.array:
        if rows > most:
            raise error
        return logits

    return fail


def test_a_right_model_runs_its_rows_together(model: Any) -> None:
    mx.random.seed(11)
    before = random_state()
    assert find(model) == Finding(way=TOGETHER)
    assert random_state() == before


CHANGE = "rows of different length change each other when decoded together (tiny)"
READ = "rows of different length change each other when read together (tiny)"
CANNOT = "rows cannot be decoded together (tiny): "
FAULTS: list[tuple[Any, Batching, str]] = [
    (reads_wrongly, SERIAL, READ),
    (decodes_wrongly, ONE_ROW, CHANGE),
    (joins_wrongly, ONE_ROW, CHANGE),
    (LeavesWrongly, ONE_ROW, CHANGE),
    (JoinsLateWrongly, ONE_ROW, CHANGE),
    (forgets_wrongly, ONE_ROW, CHANGE),
    (becomes_nan, ONE_ROW, CHANGE),
    (raises(ValueError("only size-1 arrays")), ONE_ROW, CANNOT + "only size-1 arrays"),
    (raises(IndexError("no third row"), 2), ONE_ROW, CANNOT + "no third row"),
    (never_drawn, TOGETHER, ""),
    (no_numbers, TOGETHER, ""),
]


@pytest.mark.parametrize(
    ("fault", "way", "reason"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS]
)
def test_the_probe_sees_rows_that_change_each_other(
    model: Any, fault: Any, way: Batching, reason: str
) -> None:
    broken = Broken(model, fault() if isinstance(fault, type) else fault)
    assert find(broken) == Finding(way=way, reason=reason)


@pytest.mark.parametrize("fault", [reads_wrongly, decodes_wrongly, forgets_wrongly])
def test_a_fault_also_shows_where_only_a_coarse_difference_counts(model: Any, fault: Any) -> None:
    assert find(Broken(model, fault), is_exact=False).way is not TOGETHER


def test_a_model_with_a_state_reads_its_prompts_one_by_one(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: right in these few tokens is not right."""
    monkeypatch.setattr(mlx_way, "has_state", lambda cache: True)
    assert find(model) == Finding(
        way=SERIAL, reason="its layers keep a state, which padding may change (tiny)"
    )


def test_one_row_at_most_needs_no_probe(model: Any) -> None:
    fail = raises(AssertionError("the probe ran"), 0)
    assert find(Broken(model, fail), max_concurrency=1) == Finding(way=ONE_ROW, reason=ONLY_ROW)


def test_a_context_that_is_too_short_is_not_exceeded(model: Any) -> None:
    for context_length in (5, SEQUENCE_LENGTH - 1):
        finding = find(model, context_length=context_length)
        assert finding == Finding(way=ONE_ROW, reason=TOO_SHORT)
    assert find(model, context_length=SEQUENCE_LENGTH).way is TOGETHER


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[METAL] Command buffer execution failed: Caused GPU Timeout Error", RuntimeError),
        ("[METAL] Command buffer execution failed: Innocent Victim", GpuFaultElsewhereError),
        ("[malloc] Unable to allocate 99 bytes.", MemoryError),
    ],
)
def test_errors_of_the_machine_leave_the_probe(
    model: Any, text: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        find(Broken(model, raises(RuntimeError(text))))
    assert caught.type is error


def test_faults_of_models_are_neither_memory_nor_the_end_of_the_process() -> None:
    for error in (MemoryError, GpuFaultElsewhereError, KeyboardInterrupt, SystemExit):
        assert not issubclass(error, MODEL_FAULTS)


def test_a_distance_is_that_of_probabilities_not_of_a_constant() -> None:
    alone = mx.array([1.0, 2.0, -mx.inf, 4.0])
    assert distance(alone + 5.0, alone) == pytest.approx(0.0, abs=1e-6)
    assert distance(mx.array([1.0, 2.0, 3.0, 4.0]), alone) == pytest.approx(0.0, abs=1e-6)
    assert distance(mx.array([1.0, mx.nan, 0.0, 4.0]), alone) == float("inf")
    assert distance(mx.array([4.0, 2.0, 0.0, 1.0]), alone) > 1.0
    assert largest_distance({}, {}) == 0.0


VOCABULARY = 1000


class Model:
    """Gives logits of one type of number for ids below the vocabulary."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return mx.zeros((*tokens.shape, VOCABULARY), dtype=self._dtype)

    def make_cache(self) -> list[Any]:
        return [KVCache()]


class Probe:
    """The decision alone: no row runs, and the distances are given.

    Attributes:
        scripts: of all runs, with what ran them, in order.

    Args:
        together: the distance of rows that are read together, for each start in turn.
        apart: the same of rows that only decode together.
        noise: of rows of equal length.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        together: Sequence[float],
        apart: Sequence[float] = (0.0, 0.0, 0.0),
        noise: float = 0.0,
    ) -> None:
        self.scripts: list[tuple[Batching, str, Any]] = []
        self._found = {TOGETHER: together, SERIAL: apart}
        self._noise = noise
        firsts = [make_sequence(VOCABULARY, start)[0] for start in STARTS]

        def run(finder: CapabilityProbe, way: Batching, scenario: Any, script: Any) -> Any:
            self.scripts.append((way, scenario.__name__, script))
            return way, scenario, firsts.index(script.prompts[0][0])

        def measure(company: Any, alone: Any) -> float:
            way, scenario, start = company
            assert (alone[0], alone[2]) == (ONE_ROW, start)
            return self._noise if scenario is run_side_by_side else self._found[way][start]

        monkeypatch.setattr(CapabilityProbe, "run", run)
        monkeypatch.setattr(mlx_way, "largest_distance", measure)


def judge(*, model_type: str = "tiny", is_exact: bool = True, **changes: Any) -> Finding:
    """What a finder finds for a model of these numbers."""
    model = FloatLogits(Model(changes.pop("dtype", mx.float32)))
    values: dict[str, Any] = {
        "max_concurrency": 2, "context_length": 99, "vocabulary_size": 5000, "report": lambda: None,
        "stream": mx.new_stream(mx.default_device()),
    }  # fmt: skip
    return CapabilityProbe(
        model, model_type=model_type, is_exact=is_exact, **(values | changes)
    ).find()


EXACT: dict[str, Any] = {"is_exact": True, "dtype": mx.float32}
ROUNDED: dict[str, Any] = {"is_exact": True, "dtype": mx.bfloat16}
ON_GPU: dict[str, Any] = {"is_exact": False, "dtype": mx.float32}


@pytest.mark.parametrize(
    ("numbers", "found", "noise", "is_allowed"),
    [
        # A thousandth, or four times the noise up to a hundredth; one sequence of ids is enough.
        (EXACT, [0.001, 0, 0], 0.0, True),
        (EXACT, [0.00101, 0, 0], 0.0, False),
        (EXACT, [0.004, 0, 0], 0.001, True),
        (EXACT, [0.00401, 0, 0], 0.001, False),
        (EXACT, [0.01, 0, 0], 9.0, True),
        (EXACT, [0.0101, 0, 0], 9.0, False),
        # Where numbers are rounded, a fault must show in each of three: a router of experts may
        # choose otherwise once.
        (ROUNDED, [0.02, 0.02, 0.02], 0.0, True),
        (ROUNDED, [0.021, 0.021, 0.021], 0.0, False),
        (ROUNDED, [0.5, 0.5, 0.02], 0.0, True),
        (ROUNDED, [0.15, 0.15, 0.15], 9.0, True),
        (ROUNDED, [0.151, 0.151, 0.151], 9.0, False),
        (ON_GPU, [0.02, 0.02, 0.02], 0.0, True),
        (ON_GPU, [0.021, 0.021, 0.021], 0.0, False),
    ],
)
def test_how_far_rows_may_differ_follows_from_the_numbers_and_the_device(
    monkeypatch: pytest.MonkeyPatch,
    numbers: dict[str, Any],
    found: list[float],
    noise: float,
    is_allowed: bool,
) -> None:
    Probe(monkeypatch, found, noise=noise)
    expected = Finding(way=TOGETHER) if is_allowed else Finding(way=SERIAL, reason=READ)
    assert judge(**numbers) == expected


def test_the_ids_of_the_probe_change_only_with_its_version() -> None:
    """A model's answers depend on what the probe finds, and its fingerprint on the version."""
    assert PROBE_VERSION == "4"
    assert [make_sequence(1000, start) for start in STARTS] == [
        [118, 736, 354, 972, 590, 208, 826],
        [418, 36, 654, 272, 890, 508, 126],
        [818, 436, 54, 672, 290, 908, 526],
    ]
    assert make_sequence(1000) == make_sequence(1000, 0.5)
    assert set(make_sequence(2)) == {0, 1}


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("minimax_m3_vl", "its attention selects blocks of tokens and counts the padding"),
        (
            "recurrent_gemma",
            "its first token is computed differently if the batch already has a state",
        ),
    ],
)
def test_known_faults_of_types_keep_rows_apart(
    monkeypatch: pytest.MonkeyPatch, model_type: str, why: str
) -> None:
    probe = Probe(monkeypatch, [0.0] * 3)
    expected = Finding(way=ONE_ROW, reason=f"{why} ({model_type})")
    assert judge(model_type=model_type) == expected
    assert [name for _, name, _ in probe.scripts] == ["run_alone"]


def test_a_row_differs_by_the_smaller_one_of_two_steps_in_a_row() -> None:
    alone = [mx.array([-1.0, 1.0])] * 4

    def of(*sizes: float) -> list[mx.array]:
        return [mx.array([-1.0 - size, 1.0 + size]) for size in sizes]

    def largest(*rows: list[mx.array]) -> float:
        return largest_distance(dict(enumerate(rows)), dict.fromkeys(range(len(rows)), alone))

    assert largest(of(0, 3, 0, 0)) == 0.0
    assert largest(of(0, 3, 2, 0)) == pytest.approx(2.0)
    assert largest(of(1, 0, 2, 3)) == pytest.approx(2.0)
    assert largest(of(1, 1), of(0, 0), of(0.5, 0.5, 0.5)) == pytest.approx(1.0)
    assert largest(of(3)) == 0.0, "one step alone may be a router's choice"


def test_a_row_alone_that_raises_is_a_bad_model_by_name(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(self: FloatLogits, *args: Any, **named: Any) -> mx.array:
        raise RuntimeError("[GatherMM::eval] Currently only supports float32.")

    monkeypatch.setattr(FloatLogits, "__call__", call)
    for max_concurrency in (1, 4):
        engine = MlxEngine(make_spec(tiny, max_concurrency=max_concurrency))
        with pytest.raises(BadModelError, match=r"cannot run: \[GatherMM") as caught:
            engine.load(lambda phase, progress: None)
        assert str(tiny) in str(caught.value)
        engine.close()


def test_the_probe_leaves_nothing_behind(tiny: Path) -> None:
    with loaded_engine(tiny, prefix_cache_bytes=1 << 24) as engine:
        assert not engine.row_count()
        assert engine.prefixes is not None
        assert len(engine.prefixes) == 0
        assert (engine.facts.batching, engine.facts.batching_reason) == (TOGETHER, "")


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, SERIAL),
        ({"fingerprint": "another"}, TOGETHER),
        ({"batching": "sideways"}, TOGETHER),
        ({"reason": ONLY_ROW}, TOGETHER),
        ({"reason": TOO_SHORT}, TOGETHER),
    ],
    ids=["known", "another model", "an unknown way", "one row by configuration", "short context"],
)
def test_a_way_that_an_earlier_life_found_is_taken_unless_it_says_nothing_of_this_load(
    tiny: Path, changes: dict[str, str], way: Batching
) -> None:
    known = known_as(tiny, SERIAL)
    with loaded_engine(tiny, known_batching=known | changes, max_concurrency=2) as engine:
        assert engine.facts.batching is way
        assert engine.facts.batching_reason == ("" if changes else known["reason"])


@pytest.mark.parametrize(
    ("drafts", "guess", "order"),
    [
        ("off", [], ["prompts", "decode", "wait"]),
        ("ngram", [], ["prompts", "decode", "wait"]),
        ("ngram", [5], ["decode", "prompts", "wait"]),
    ],
)
def test_the_host_builds_the_pass_of_rows_that_decode_while_the_device_reads_prompts(
    tiny: Path, drafts: str, guess: list[int], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with guesses wait for their own pass, so nothing is sent before it."""
    did: list[str] = []
    monkeypatch.setattr(DraftingBatch, "_guess", lambda self: (self.drafts.pacer, [guess], 0.0))

    def note(owner: Any, method: str, name: str) -> None:
        real = getattr(owner, method)

        def noted(self: Any, *values: Any) -> Any:
            did.append(name)
            return real(self, *values)

        monkeypatch.setattr(owner, method, noted)

    note(PromptBatch, "prompt", "prompts")
    note(PromptBatch, "wait", "wait")
    note(BatchDecode, "next", "decode")
    with loaded_engine(
        tiny, known_batching=known_as(tiny, TOGETHER), drafts=drafts, decode_share=0.0
    ) as engine:
        engine.insert(make_row(1, [20, 21, 22], max_tokens=40, ignore_eos=True))
        while not engine.step().tokens:
            pass
        engine.insert(make_row(2, list(range(30, 90)), max_tokens=2, ignore_eos=True))
        did.clear()
        result = engine.step()
    assert did == order
    assert bool(result.guessed) == bool(guess)


def test_one_row_at_a_time_gives_each_row_a_token_in_each_step(tiny: Path) -> None:
    """Twice as many rows as fit come one after the other; none that decodes is passed over."""
    with loaded_engine(tiny, known_batching=known_as(tiny, ONE_ROW)) as engine:
        alone = [solo(engine, make_row(key, [key + 1, 7, 9], max_tokens=9)) for key in range(12)]
        waiting = list(range(12))
        decoding: set[int] = set()
        got: dict[int, list[int]] = {key: [] for key in waiting}
        while waiting or engine.row_count():
            while waiting and engine.row_count() < 6:
                key = waiting.pop(0)
                engine.insert(make_row(key, [key + 1, 7, 9], max_tokens=9))
            result = engine.step()
            keys = {int(token.key) for token in result.tokens}
            assert decoding <= keys, "a row that decodes got no token"
            decoding |= {int(read.key) for read in result.prefill if read.done == read.total}
            for token in result.tokens:
                assert token.token is not None
                got[int(token.key)].append(token.token)
                if token.finish is not None:
                    decoding.discard(int(token.key))
        assert [got[key] for key in range(12)] == alone
        assert run_rows(engine) == {}
        assert engine.batch is not None
        passes: Any = engine.batch.mode
        assert (passes.waiting, passes.decode.new, passes.decode.rows) == ({}, {}, {})


def test_a_model_without_numbers_warns_in_every_life_and_answer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    weights["model.norm.weight"] *= float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for known in (None, known_as(folder, TOGETHER)):
        with loaded_engine(folder, known_batching=known) as engine:
            assert engine.facts.warnings == (NO_NUMBERS,)
            driver = LoopDriver(engine, engine.facts)
            try:
                answer = driver.answer(prompt_tokens=[1, 2], max_tokens=1)
            finally:
                driver.close()
            assert answer.warnings == [NO_NUMBERS]


@pytest.mark.parametrize(
    ("finding", "level", "said"),
    [
        (Finding(way=TOGETHER), "INFO", "rows run as configured model=m way=together"),
        (
            Finding(way=ONE_ROW, reason=ONLY_ROW),
            "INFO",
            "rows run as configured model=m way=one_row",
        ),
        (
            Finding(way=SERIAL, reason="it mixes rows"),
            "WARNING",
            'rows may not share all passes model=m way=serial_prefill reason="it mixes rows"',
        ),
    ],
)
def test_log_finding_warns_of_ways_that_were_not_configured(
    caplog: pytest.LogCaptureFixture, finding: Finding, level: str, said: str
) -> None:
    with caplog.at_level("INFO", logger="mlxsup"):
        mlx_way.log_finding(finding, "m", 0.256)
    [line] = caplog.records
    assert (line.levelname, line.getMessage()) == (level, f"{said} seconds=0.256")
