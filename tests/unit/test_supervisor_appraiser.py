"""What models need where nothing was measured, and what of a worker's words is remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.worker_messages import Ready
from mlxsup.supervisor.core.memory.need import Figure, Need, Source
from mlxsup.supervisor.memory.appraiser import Appraiser, measured_by
from mlxsup.supervisor.memory.estimator import estimate_launch
from mlxsup.supervisor.memory.folder import fingerprint, stamp
from mlxsup.supervisor.memory.measurements import Measured, Measurements

from support.safetensors_files import llama_arrays, llama_config, write_folder

MIB = 2**20
LAYERS = (CacheLayers(layers=3, token_bytes=64), CacheLayers(layers=1, row_bytes=16, window=9))


@pytest.fixture
def launch(tmp_path: Path) -> LaunchSettings:
    """A llama with a context of 8192 tokens."""
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    return LaunchSettings(path=str(tmp_path / "m"))


# ---------------------------------------------------------------- nothing was measured


@pytest.mark.parametrize(("backend", "mib"), [("cpu", 256), ("metal", 256), ("cuda", 768)])
def test_a_process_is_guessed_by_the_backend(
    tmp_path: Path, launch: LaunchSettings, backend: str, mib: int
) -> None:
    need = Appraiser(backend, Measurements(tmp_path)).appraise(launch, estimate_launch(launch))
    assert need.own == Figure(size_bytes=mib * MIB, source=Source.ESTIMATED)


@pytest.mark.parametrize(("declared", "least"), [(4095, 4095), (4096, 4096), (4097, 4096)])
def test_memory_is_reserved_for_4096_tokens_or_a_shorter_context(
    tmp_path: Path, launch: LaunchSettings, declared: int, least: int
) -> None:
    config = llama_config(max_position_embeddings=declared)
    write_folder(tmp_path / "m", config, llama_arrays())
    need = Appraiser("cpu", Measurements(tmp_path)).appraise(launch, estimate_launch(launch))
    assert (need.context_tokens, need.least_tokens) == (declared, least)


def test_a_measurement_without_layers_leaves_the_estimate_and_its_remark(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(model_type="novel"), llama_arrays())
    launch, measurements = LaunchSettings(path=str(folder)), Measurements(tmp_path)
    before = Appraiser("cpu", measurements).appraise(launch, estimate_launch(launch))
    kept = Measured(
        path=str(folder), backend="cpu", fingerprint=fingerprint(stamp(folder)), weight_bytes=5000,
        own_bytes=0, layers=(),
    )  # fmt: skip
    measurements.learn(kept)
    need = Appraiser("cpu", measurements).appraise(launch, estimate_launch(launch))
    assert need == replace(
        before,
        weights=Figure(size_bytes=5000, source=Source.MEASURED),
        own=Figure(size_bytes=0, source=Source.MEASURED),
    )
    assert "novel" in need.remark


# ---------------------------------------------------------------- the fake engine


def fake_need(folder: Path, **options: Any) -> Need:
    launch = LaunchSettings(engine="fake", fake=options)
    return Appraiser("cpu", Measurements(folder)).appraise(launch, estimate_launch(launch))


def test_a_fake_model_has_a_process_and_no_weights(tmp_path: Path) -> None:
    launch = LaunchSettings(engine="fake", max_concurrency=3, memory_limit_bytes=7)
    assert Appraiser("cpu", Measurements(tmp_path)).appraise(
        launch, estimate_launch(launch)
    ) == Need(
        weights=Figure(size_bytes=0, source=Source.MEASURED),
        own=Figure(size_bytes=64 * MIB, source=Source.GIVEN),
        layers=(),
        layers_source=Source.MEASURED,
        context_tokens=4096,
        least_tokens=4096,
        max_rows=3,
        given_bytes=7,
    )


def test_the_tokens_of_a_fake_model_take_what_its_options_say(tmp_path: Path) -> None:
    layers = [fake_need(tmp_path, token_bytes=size).layers for size in (1, 500)]
    assert layers == [(CacheLayers(layers=1, token_bytes=size),) for size in (1, 500)]
    for nothing in (0, -1, True, "500", None):
        assert fake_need(tmp_path, token_bytes=nothing).layers == (), nothing


def test_the_context_of_a_fake_model_is_the_smaller_of_what_is_asked_and_declared(
    tmp_path: Path,
) -> None:
    found = [contexts(tmp_path, asked, 100) for asked in (0, 50, 200)]
    assert found == [(100, 100), (50, 50), (100, 100)]


def contexts(folder: Path, asked: int, declared: object) -> tuple[int, int]:
    """The longest context, and that for which memory is reserved."""
    launch = LaunchSettings(engine="fake", context_length=asked, fake={"context_length": declared})
    need = Appraiser("cpu", Measurements(folder)).appraise(launch, estimate_launch(launch))
    return need.context_tokens, need.least_tokens


@pytest.mark.parametrize("declared", ["100", True, 1.5, None])
def test_a_context_that_is_no_number_is_the_usual_one(tmp_path: Path, declared: object) -> None:
    assert contexts(tmp_path, 0, declared) == (4096, 4096)


# ---------------------------------------------------------------- what is remembered

READY = Ready(
    context_length=1, fingerprint="x", backend="metal", active_bytes=5000, own_bytes=300,
    cache_layers=list(LAYERS),
)  # fmt: skip


def test_a_measurement_is_remembered_with_the_files_that_it_is_of(launch: LaunchSettings) -> None:
    kept = Measured(
        path=launch.path,
        backend="metal",
        fingerprint=fingerprint(stamp(Path(launch.path))),
        weight_bytes=5000,
        own_bytes=300,
        layers=LAYERS,
    )
    assert measured_by(launch, READY, stamp(Path(launch.path))) == kept
    unknown = replace(READY, own_bytes=None, cache_layers=[])
    assert measured_by(launch, unknown, stamp(Path(launch.path))) == replace(
        kept, own_bytes=None, layers=()
    )


def test_the_least_that_makes_sense_is_remembered(launch: LaunchSettings) -> None:
    ready = replace(READY, active_bytes=1, own_bytes=0, cache_layers=[CacheLayers(layers=0)])
    assert measured_by(launch, ready, stamp(Path(launch.path))) is not None


def test_nothing_is_remembered_of_files_that_could_not_be_looked_at(launch: LaunchSettings) -> None:
    """As those of the fake engine, which has none."""
    assert measured_by(launch, READY, None) is None
