"""What a load reports, runs and decides, step by step, and what an engine answers before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import Batching, LoadPhase
from mlxsup.worker.engine import EngineFacts, NoDeviceError, Row
from mlxsup.worker.engines.mlx import batching as mlx_way
from mlxsup.worker.engines.mlx import engine as mlx_engine
from mlxsup.worker.engines.mlx import load as mlx_load
from mlxsup.worker.engines.mlx import memory_need
from mlxsup.worker.engines.mlx import passes as mlx_passes
from mlxsup.worker.engines.mlx import prefix_size as mlx_prefix_size
from mlxsup.worker.engines.mlx import text as mlx_text
from mlxsup.worker.engines.mlx.batch import WARMUP_KEY, MlxBatch
from mlxsup.worker.engines.mlx.batching import ONLY_ROW, PROBE_VERSION, Finding, WayFinder
from mlxsup.worker.engines.mlx.draws import SAMPLER_VERSIONS, choose_draw
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.folder import ModelFolder
from mlxsup.worker.engines.mlx.load_steps import HALF
from mlxsup.worker.engines.mlx.prefill import LARGEST_CHUNK, LARGEST_CPU_CHUNK, PrefillPacer
from mlxsup.worker.engines.mlx.text import MlxText, load_text

from support.mlx_rows import loaded_engine, make_row, make_spec, solo
from support.model_types.build import make_model
from support.model_types.listed import model_types
from support.tiny_model import CONTEXT_LENGTH, VOCABULARY_SIZE, make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(path: Path, report: Callable[..., None] = lambda *_: None, **changes: Any) -> EngineFacts:
    """Loads it; by this clock, no step takes any time."""
    engine = MlxEngine(make_spec(path, **({"max_concurrency": 1} | changes)), lambda: 0.0)
    still = SimpleNamespace(perf_counter=lambda: 0.0)
    try:
        with mock.patch.object(mlx_passes, "time", still):
            return engine.load(report)
    finally:
        engine.close()


def test_each_step_of_a_load_reports_its_phase_and_its_share_B1(tiny: Path) -> None:
    """A tiny model has one file and one group of arrays; the warm-up takes three steps for each of
    its three prompts."""
    seen: list[tuple[LoadPhase, float]] = []
    load(tiny, lambda phase, share: seen.append((phase, round(share, 6))))
    weights, warm_up = LoadPhase.WEIGHTS, LoadPhase.WARMUP
    assert seen == [
        (LoadPhase.IMPORT, 0.0),
        (LoadPhase.IMPORT, 0.02),
        (LoadPhase.IMPORT, 0.05),
        (weights, 0.05),
        (weights, 0.15),
        (LoadPhase.MATERIALISE, 0.9),
        *[(warm_up, round(0.9 + 0.1 * taken / (taken + HALF), 6)) for taken in range(10)],
        (warm_up, 1.0),
    ]


def test_each_step_of_the_probe_and_of_the_warm_up_is_progress_B1(tiny: Path) -> None:
    """A report that repeats the one before does not renew the limit of a load that stalls."""
    seen: list[tuple[LoadPhase, float]] = []
    load(tiny, lambda *step: seen.append(step), max_concurrency=2)
    place = seen.index((LoadPhase.MATERIALISE, 0.9))
    phases, shares = zip(*seen[place + 1 :], strict=True)
    assert set(phases) == {LoadPhase.WARMUP}
    assert all(before < after for before, after in pairwise(shares))
    assert (shares[0], shares[-1]) == (0.9, 1.0)
    assert len(seen) > 20


@pytest.mark.parametrize(
    ("context_length", "prompts"),
    [
        (0, [9, 129, 1025]),
        (1027, [9, 129, 1025]),
        (1026, [9, 129]),
        (131, [9, 129]),
        (130, [9]),
        (11, [9]),
        (10, [8]),
        (4, [2]),
        (3, [1]),
        (2, [1]),
    ],
)
def test_the_warm_up_reads_three_sizes_or_what_fits_B5(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, context_length: int, prompts: list[int]
) -> None:
    rows: list[Row] = []
    insert = MlxBatch.insert

    def watch(batch: MlxBatch, row: Row) -> int:
        rows.append(row)
        return insert(batch, row)

    monkeypatch.setattr(MlxBatch, "insert", watch)
    load(tiny, context_length=context_length)
    for row, length in zip(rows, prompts, strict=True):
        tokens = [number % VOCABULARY_SIZE for number in range(length)]
        assert (row.key, row.tokens, row.max_tokens) == (WARMUP_KEY, tokens, 2)
        assert (row.sampling, row.seed) == (Sampling(), 0)


def test_ids_of_the_warm_up_are_in_the_smallest_vocabulary(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Row] = []

    def watch(batch: MlxBatch, row: Row) -> int:
        rows.append(row)
        raise ValueError("seen enough")

    monkeypatch.setattr(MlxBatch, "insert", watch)
    engine = MlxEngine(make_spec(tiny, max_concurrency=1))

    def of_four_ids(folder: Path, *, eos_token_ids: Any, vocabulary_size: int | None) -> MlxText:
        return load_text(folder, eos_token_ids=eos_token_ids, vocabulary_size=4)

    monkeypatch.setattr(mlx_text, "load_text", of_four_ids)
    with pytest.raises(Exception, match="seen enough"):
        engine.load(lambda *_: None)
    engine.close()
    assert rows[0].tokens == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_an_engine_that_is_not_loaded_says_so_and_has_no_rows(tiny: Path) -> None:
    engine = MlxEngine(make_spec(tiny))
    assert (engine.has_rows(), engine.row_count()) == (False, 0)
    calls: list[Callable[[], object]] = [
        lambda: engine.text,
        lambda: engine.insert(make_row(1, [1])),
        lambda: engine.remove(RequestKey(1)),
        engine.predict_step_s,
        engine.prefill_chunk,
        engine.step,
        engine.give_back,
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == "the engine is not loaded"


def test_a_machine_without_mlx_is_said_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxsup.worker.engines.mlx.limits", None)
    with pytest.raises(NoDeviceError, match=r"^MLX cannot be imported here: .*mlx\.limits halted"):
        load(tiny)


def test_the_room_for_known_prompts_is_told_and_makes_the_text_look_for_them(tiny: Path) -> None:
    for room, wants in ((0, False), (1 << 24, False)):
        with loaded_engine(tiny, prefix_cache_bytes=room, max_concurrency=1) as engine:
            assert engine.facts.prefix_cache_bytes == room
            assert (engine.facts.prefix_cache_tokens > 0) == (room > 0)
            text: Any = engine.text
            assert text.wants_checkpoints is wants, "a plain cache can be cut back anywhere"


def test_the_text_of_a_model_with_states_is_looked_through_for_places_to_keep(
    tmp_path: Path,
) -> None:
    """Its caches cannot be cut back, so they are kept where other prompts may leave this one."""
    [mamba] = model_types(["mamba"])
    folder = make_model(tmp_path, mamba)
    with loaded_engine(folder, prefix_cache_bytes=1 << 24, max_concurrency=1) as engine:
        text: Any = engine.text
        assert text.wants_checkpoints


def test_a_model_that_fills_its_memory_keeps_its_other_warnings(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_need, "COMFORTABLE_SHARE", 1e-9)
    warnings = load(tiny, memory_limit_bytes=1 << 33, context_length=9000).warnings
    assert [text.split(" ")[0] for text in warnings][:1] == ["context_length"]
    assert "of the 8.00 GiB that memory allows are in use" in warnings[1]
    assert len(warnings) == 2


def test_a_closed_engine_is_as_before_its_load(tiny: Path) -> None:
    engine = MlxEngine(make_spec(tiny, max_concurrency=1))
    before = mx.get_active_memory()
    engine.load(lambda *_: None)
    engine.insert(make_row(1, [1, 2, 3]))
    assert (engine.has_rows(), engine.row_count()) == (True, 1)
    engine.close()
    assert (engine.has_rows(), engine.row_count()) == (False, 0)
    assert engine.model is None
    assert mx.get_cache_memory() == 0
    with pytest.raises(RuntimeError, match="not loaded"):
        engine.step()
    assert mx.get_active_memory() <= before + (1 << 20)


def test_what_is_given_back_is_computed_again(tiny: Path) -> None:
    """Answers stay what they were, and nothing is left for reuse."""
    prompt = list(range(300, 340))
    with loaded_engine(tiny, prefix_cache_bytes=1 << 24, max_concurrency=1) as engine:
        first = solo(engine, make_row(1, prompt))
        assert engine.insert(make_row(2, prompt)) == 39
        engine.remove(RequestKey(2))
        engine.give_back()
        assert engine.bytes_held().cache == 0
        assert engine.insert(make_row(3, prompt)) == 0
        engine.remove(RequestKey(3))
        engine.give_back()
        assert solo(engine, make_row(4, prompt)) == first


def test_memory_for_reuse_is_freed_and_known_prompts_stay(tiny: Path) -> None:
    """As while it is idle: another process can use the one, and a second turn the other."""
    prompt = list(range(300, 340))
    with loaded_engine(tiny, prefix_cache_bytes=1 << 24, max_concurrency=1) as engine:
        solo(engine, make_row(1, prompt))
        known = engine.bytes_held().prefix
        assert known > 0
        engine.give_back(keeps_prefixes=True)
        assert (engine.bytes_held().cache, engine.bytes_held().prefix) == (0, known)
        assert engine.insert(make_row(2, prompt)) == 39


def test_a_fingerprint_depends_on_all_that_answers_depend_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same words in every release: a resume asks for the same fingerprint."""
    given: list[dict[str, str]] = []

    def noted(folder: ModelFolder, on: dict[str, str]) -> str:
        given.append(on)
        return "f"

    monkeypatch.setattr(mlx_engine, "fingerprint", noted)
    facts = load(tiny)
    assert facts.fingerprint == "f"
    sampler = SAMPLER_VERSIONS[choose_draw(facts.backend)]
    ours = {"kv_cache": "plain", "probe": PROBE_VERSION, "sampler": sampler}
    assert given == [{**facts.versions, **ours}]


def test_prompts_are_paced_as_the_launch_says(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def noted(**of: Any) -> PrefillPacer:
        asked.append(of)
        return PrefillPacer(**of)

    monkeypatch.setattr(mlx_engine, "PrefillPacer", noted)
    for deterministic in (False, True):
        load(tiny, decode_stall_target_ms=125, step_timeout_s=7.0, deterministic=deterministic)
    given = {
        "decode_stall_target_s": 0.125, "step_timeout_s": 7.0, "largest_chunk": LARGEST_CPU_CHUNK,
    }  # fmt: skip
    assert asked == [given | {"is_fixed": is_fixed} for is_fixed in (False, True)]


@pytest.mark.parametrize(
    ("finding", "level", "said"),
    [
        (Finding(way=Batching.TOGETHER), "INFO", "rows run as configured model=m way=together"),
        (
            Finding(way=Batching.ONE_ROW, reason=ONLY_ROW),
            "INFO",
            "rows run as configured model=m way=one_row",
        ),
        (
            Finding(way=Batching.SERIAL_PREFILL, reason="it mixes rows"),
            "WARNING",
            'rows may not share all passes model=m way=serial_prefill reason="it mixes rows"',
        ),
    ],
)
def test_the_log_says_how_rows_run_and_warns_if_that_is_not_as_configured(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    finding: Finding,
    level: str,
    said: str,
) -> None:
    now = iter([10.0, 10.256])
    monkeypatch.setattr(mlx_engine, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(MlxEngine, "_find_way", lambda self, report: finding)
    with caplog.at_level("INFO", logger="mlxsup"):
        facts = load(tiny, max_concurrency=2)
    assert (facts.batching, facts.batching_reason) == (finding.way, finding.reason)
    lines = [(one.levelname, one.getMessage()) for one in caplog.records]
    assert lines[0] == (level, f"{said} seconds=0.260")
    assert [line.split(" model=")[0] for _, line in lines[1:]] == ["model warmed up"]


@pytest.mark.parametrize(
    ("backend", "is_exact"), [("cpu", True), ("metal", False), ("cuda", False)]
)
def test_only_the_cpu_is_probed_as_exact(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, backend: str, is_exact: bool
) -> None:
    asked: list[dict[str, Any]] = []

    def watch(model: Any, **options: Any) -> WayFinder:
        asked.append(options)
        return WayFinder(model, **options)

    monkeypatch.setattr(mlx_way, "WayFinder", watch)
    monkeypatch.setattr(mlx_load, "open_stream", lambda: (backend, mx.new_stream(mx.cpu)))
    monkeypatch.setattr(mlx_prefix_size, "free_memory_bytes", lambda *_: 0)
    load(tiny)
    (options,) = asked
    assert (options["is_exact"], options["model_type"]) == (is_exact, "llama")
    assert (options["max_concurrency"], options["context_length"]) == (1, CONTEXT_LENGTH)
    assert options["vocabulary_size"] == VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("backend", "largest"),
    [("cpu", LARGEST_CPU_CHUNK), ("metal", LARGEST_CHUNK), ("cuda", LARGEST_CHUNK)],
)
def test_only_a_cpu_reads_its_prompts_in_smaller_chunks(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, backend: str, largest: int
) -> None:
    asked: list[dict[str, Any]] = []

    def noted(**of: Any) -> PrefillPacer:
        asked.append(of)
        return PrefillPacer(**of)

    monkeypatch.setattr(mlx_engine, "PrefillPacer", noted)
    monkeypatch.setattr(mlx_load, "open_stream", lambda: (backend, mx.new_stream(mx.cpu)))
    monkeypatch.setattr(mlx_prefix_size, "free_memory_bytes", lambda *_: 0)
    load(tiny)
    assert [of["largest_chunk"] for of in asked] == [largest]


def test_weights_are_read_ahead_from_before_the_imports_until_they_are_loaded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[object] = []

    @contextmanager
    def noted(files: list[Path]) -> Iterator[None]:
        story.append([file.name for file in files])
        yield
        story.append("over")

    def report(phase: LoadPhase, progress: float) -> None:
        if story[-1:] != [phase]:
            story.append(phase)

    monkeypatch.setattr(mlx_engine, "reading_ahead", noted)
    load(tiny, report)
    before, *reading, over, after = story
    assert (before, over, after) == (LoadPhase.IMPORT, "over", LoadPhase.WARMUP)
    assert reading == [
        ["model.safetensors"], LoadPhase.IMPORT, LoadPhase.WEIGHTS, LoadPhase.MATERIALISE
    ]  # fmt: skip
