"""What workers measured outlives the daemon, replaces what was estimated, and never does harm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.worker_messages import Ready
from mlxsup.supervisor.core.memory.need import Figure, Source
from mlxsup.supervisor.memory.appraiser import (
    FAKE_PROCESS_BYTES,
    FIRST_GUESS_BYTES,
    LEAST_TOKENS,
    Appraiser,
    measured_by,
)
from mlxsup.supervisor.memory.estimator import estimate_launch
from mlxsup.supervisor.memory.folder import fingerprint, stamp
from mlxsup.supervisor.memory.measurements import FILE_NAME, Measured, Measurements, Raised

from support.safetensors_files import llama_arrays, llama_config, write_folder

LAYERS = (
    CacheLayers(layers=3, token_bytes=64),
    CacheLayers(layers=1, token_bytes=32, row_bytes=16, window=128),
)
ONE = Measured(
    path="/models/one",
    backend="cpu",
    fingerprint="f1",
    weight_bytes=1000,
    own_bytes=200,
    layers=LAYERS,
)

RAISED = Raised(path="/models/one", backend="cpu", fingerprint="f1", raised_bytes=70)

# ---------------------------------------------------------------- the file


def test_what_was_learned_is_known_to_the_next_daemon(tmp_path: Path) -> None:
    first = Measurements(tmp_path)
    assert (first.problem, first.find("/models/one", "cpu", "f1")) == ("", None)
    other = replace(ONE, backend="cuda", own_bytes=None, layers=())
    first.learn(ONE)
    first.learn(other)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    again = Measurements(tmp_path)
    assert again.problem == ""
    assert again.find("/models/one", "cpu", "f1") == ONE
    assert again.find("/models/one", "cuda", "f1") == other
    assert again.find("/models/one", "cpu", "f2") is None
    assert again.find("/models/two", "cpu", "f1") is None


def test_what_was_raised_is_known_to_the_next_daemon_and_a_measurement_leaves_it(
    tmp_path: Path,
) -> None:
    first = Measurements(tmp_path)
    assert first.raised_bytes("/models/one", "cpu", "f1") == 0
    first.learn_raised(RAISED)
    first.learn(replace(ONE, own_bytes=1))
    again = Measurements(tmp_path)
    assert again.problem == ""
    assert again.raised_bytes("/models/one", "cpu", "f1") == 70
    assert again.raised_bytes("/models/one", "cuda", "f1") == 0
    again.learn_raised(replace(RAISED, raised_bytes=90))
    again.learn(ONE)
    assert Measurements(tmp_path).raised_bytes("/models/one", "cpu", "f1") == 90


def test_a_changed_folder_is_raised_no_longer(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path)
    measurements.learn_raised(RAISED)
    assert Measurements(tmp_path).raised_bytes("/models/one", "cpu", "f2") == 0


def test_a_changed_folder_is_measured_anew(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path)
    measurements.learn(ONE)
    measurements.learn(replace(ONE, fingerprint="f2", weight_bytes=2000))
    again = Measurements(tmp_path)
    assert again.find("/models/one", "cpu", "f1") is None
    found = again.find("/models/one", "cpu", "f2")
    assert found is not None
    assert found.weight_bytes == 2000


def test_what_is_known_already_is_not_written_again(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path)
    measurements.learn(ONE)
    (tmp_path / FILE_NAME).unlink()
    measurements.learn(ONE)
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_are_kept_and_the_oldest_is_forgotten(tmp_path: Path) -> None:
    known = [
        stored()["models"][0] | {"layers": [], "path": f"/models/{number}"}
        for number in range(1000)
    ]
    (tmp_path / FILE_NAME).write_text(json.dumps(stored() | {"models": known}))
    measurements = Measurements(tmp_path)

    def numbers(among: range) -> list[int]:
        return [n for n in among if measurements.find(f"/models/{n}", "cpu", "f1")]

    measurements.learn(replace(ONE, path="/models/0", weight_bytes=7))  # it is the newest now
    assert numbers(range(1001)) == list(range(1000))
    measurements.learn(replace(ONE, path="/models/1000"))
    assert numbers(range(1001)) == [0, *range(2, 1001)]
    again = [one["path"] for one in json.loads((tmp_path / FILE_NAME).read_text())["models"]]
    assert again[-2:] == ["/models/0", "/models/1000"]


def test_a_file_with_too_many_is_cut_to_a_thousand(tmp_path: Path) -> None:
    known = [
        stored()["models"][0] | {"layers": [], "path": f"/models/{number}"}
        for number in range(1003)
    ]
    (tmp_path / FILE_NAME).write_text(json.dumps(stored() | {"models": known}))
    Measurements(tmp_path).learn(ONE)
    assert len(json.loads((tmp_path / FILE_NAME).read_text())["models"]) == 1000


def test_what_cannot_be_written_is_known_as_long_as_the_daemon_lives(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        measurements.learn(ONE)
    assert measurements.find("/models/one", "cpu", "f1") == ONE


def stored() -> dict[str, Any]:
    layers = [
        {"layers": 3, "token_bytes": 64, "row_bytes": 0, "window": None},
        {"layers": 1, "token_bytes": 32, "row_bytes": 16, "window": 128},
    ]
    one = {"path": "/models/one", "backend": "cpu", "fingerprint": "f1", "weight_bytes": 1000,
           "own_bytes": 200, "layers": layers}  # fmt: skip
    return {"format": 2, "models": [one], "raised": [_raised()]}


def _raised() -> dict[str, Any]:
    return {"path": "/models/one", "backend": "cpu", "fingerprint": "f1", "raised_bytes": 70}


def test_the_file_is_as_documented(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path)
    measurements.learn(ONE)
    measurements.learn_raised(RAISED)
    assert json.loads((tmp_path / "measured.json").read_text()) == stored()


def _without(key: str) -> dict[str, Any]:
    value = stored()
    del value["models"][0][key]
    return value


def _with(key: str, item: object) -> dict[str, Any]:
    value = stored()
    value["models"][0][key] = item
    return value


DAMAGED: list[object] = [
    [],
    {},
    {"format": 1, "models": [], "raised": []},
    {"format": 2},
    {"format": 2, "models": []},
    {"format": 2, "models": 3, "raised": []},
    {"format": 2, "models": [3], "raised": []},
    {"format": 2, "models": [], "raised": 3},
    {"format": 2, "models": [], "raised": [3]},
    *(
        {"format": 2, "models": [], "raised": [{**_raised(), "raised_bytes": size}]}
        for size in (-1, 1.5, "70", None)
    ),
    *(_without(key) for key in stored()["models"][0]),
    _with("weight_bytes", -1),
    _with("weight_bytes", 1.5),
    _with("weight_bytes", True),
    _with("path", 3),
    _with("layers", [{}]),
    _with("layers", [{"layers": 1, "token_bytes": 1, "row_bytes": 1, "window": "x"}]),
]


@pytest.mark.parametrize("value", DAMAGED, ids=lambda value: json.dumps(value)[:60])
def test_a_damaged_file_is_one_sentence_and_a_new_beginning(tmp_path: Path, value: object) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(value))
    measurements = Measurements(tmp_path)
    assert measurements.problem == f"{path} is not used (it is damaged): models are measured again"
    assert measurements.largest_own_bytes("cpu") is None
    measurements.learn(ONE)
    assert Measurements(tmp_path).find("/models/one", "cpu", "f1") == ONE


@given(content=st.binary(max_size=64))
def test_any_bytes_are_a_file_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / FILE_NAME).write_bytes(content)
    assert Measurements(folder).problem.endswith("models are measured again")


@pytest.mark.parametrize("begin", [b"", b'{"format": 2, "models": '])
def test_brackets_without_end_are_damage_as_well(tmp_path: Path, begin: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(begin + b"[" * 100_000)
    assert "(it is damaged)" in Measurements(tmp_path).problem


def test_a_file_that_cannot_be_read_is_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert "(Is a directory)" in Measurements(tmp_path).problem


# ---------------------------------------------------------------- what a model needs


def launch(folder: Path, **more: Any) -> LaunchSettings:
    return LaunchSettings(path=str(folder), **more)


def test_before_it_was_loaded_everything_is_an_estimate(tmp_path: Path) -> None:
    size = write_folder(tmp_path / "m", llama_config(), llama_arrays())
    need = Appraiser("cpu", Measurements(tmp_path)).appraise(
        launch(tmp_path / "m"), estimate_launch(launch(tmp_path / "m"))
    )
    assert need.weights == Figure(size_bytes=size, source=Source.ESTIMATED)
    assert need.own == Figure(size_bytes=FIRST_GUESS_BYTES["cpu"], source=Source.ESTIMATED)
    assert need.layers == (CacheLayers(layers=2, token_bytes=2 * 32 * 2),)
    assert need.layers_source is Source.ESTIMATED
    assert (need.context_tokens, need.least_tokens, need.max_rows) == (8192, LEAST_TOKENS, 8)
    assert (need.given_bytes, need.remark, need.is_measured) == (None, "", False)


def test_what_was_measured_replaces_what_was_estimated(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(model_type="novel"), llama_arrays())
    measurements = Measurements(tmp_path)
    appraiser = Appraiser("cpu", measurements)
    assert "novel" in appraiser.appraise(launch(folder), estimate_launch(launch(folder))).remark
    ready = Ready(context_length=8192, fingerprint="x", backend="cpu", active_bytes=5000,
                  own_bytes=300, cache_layers=list(LAYERS))  # fmt: skip
    measured = measured_by(launch(folder), ready, stamp(folder))
    assert measured is not None
    measurements.learn(measured)
    need = appraiser.appraise(launch(folder), estimate_launch(launch(folder)))
    assert need.weights == Figure(size_bytes=5000, source=Source.MEASURED)
    assert need.own == Figure(size_bytes=300, source=Source.MEASURED)
    assert (need.layers, need.layers_source, need.remark) == (LAYERS, Source.MEASURED, "")
    assert need.is_measured
    # Another backend keeps other things.
    assert (
        not Appraiser("cuda", measurements)
        .appraise(launch(folder), estimate_launch(launch(folder)))
        .is_measured
    )


def test_a_gpu_cannot_tell_what_a_process_holds_so_that_stays_an_estimate(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(), llama_arrays())
    measurements = Measurements(tmp_path)
    measurements.learn(
        replace(ONE, path=str(folder), backend="cuda", fingerprint=fingerprint(stamp(folder)),
                own_bytes=None, layers=())
    )  # fmt: skip
    need = Appraiser("cuda", measurements).appraise(launch(folder), estimate_launch(launch(folder)))
    assert need.weights.source is Source.MEASURED
    assert need.own == Figure(size_bytes=FIRST_GUESS_BYTES["cuda"], source=Source.ESTIMATED)
    assert need.layers_source is Source.ESTIMATED


def test_a_process_is_guessed_from_the_largest_of_the_same_backend(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    measurements = Measurements(tmp_path)
    measurements.learn(ONE)
    measurements.learn(replace(ONE, path="/models/two", own_bytes=700))
    measurements.learn(replace(ONE, path="/models/three", own_bytes=None))
    measurements.learn(replace(ONE, path="/models/four", backend="cuda", own_bytes=9000))
    need = Appraiser("cpu", measurements).appraise(
        launch(tmp_path / "m"), estimate_launch(launch(tmp_path / "m"))
    )
    assert need.own == Figure(size_bytes=700, source=Source.ESTIMATED)


@pytest.mark.parametrize(
    ("asked", "context", "least"),
    [(0, 8192, LEAST_TOKENS), (6000, 6000, 6000), (1000, 1000, 1000), (99999, 8192, 8192)],
)
def test_memory_is_reserved_for_the_context_that_is_asked_for(
    tmp_path: Path, asked: int, context: int, least: int
) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    settings = launch(tmp_path / "m", context_length=asked)
    need = Appraiser("cpu", Measurements(tmp_path)).appraise(settings, estimate_launch(settings))
    assert (need.context_tokens, need.least_tokens) == (context, least)


def test_what_was_raised_is_part_of_the_need_until_the_files_change(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(), llama_arrays())
    measurements = Measurements(tmp_path)
    appraiser = Appraiser("cpu", measurements)
    before = appraiser.appraise(launch(folder), estimate_launch(launch(folder))).needed_bytes
    kept = Raised(
        path=str(folder), backend="cpu", fingerprint=fingerprint(stamp(folder)), raised_bytes=70
    )
    measurements.learn_raised(kept)
    assert (
        appraiser.appraise(launch(folder), estimate_launch(launch(folder))).needed_bytes
        == before + 70
    )
    assert (
        Appraiser("cuda", measurements)
        .appraise(launch(folder), estimate_launch(launch(folder)))
        .raised_bytes
        == 0
    )
    write_folder(folder, llama_config(), llama_arrays(layers=3))
    assert appraiser.appraise(launch(folder), estimate_launch(launch(folder))).raised_bytes == 0


def test_the_entry_gives_memory_and_rows(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    settings = launch(tmp_path / "m", memory_limit_bytes=2**30, max_concurrency=3)
    need = Appraiser("cpu", Measurements(tmp_path)).appraise(settings, estimate_launch(settings))
    assert (need.given_bytes, need.needed_bytes, need.max_rows) == (2**30, 2**30, 3)


def test_the_fake_engine_needs_its_process_and_what_is_given(tmp_path: Path) -> None:
    appraiser = Appraiser("cpu", Measurements(tmp_path))
    need = appraiser.appraise(
        LaunchSettings(engine="fake", fake={"context_length": 100}),
        estimate_launch(LaunchSettings(engine="fake", fake={"context_length": 100})),
    )
    assert need.needed_bytes == FAKE_PROCESS_BYTES
    assert (need.context_tokens, need.least_tokens) == (100, 100)
    given = LaunchSettings(engine="fake", memory_limit_bytes=3 * 2**30, context_length=50)
    assert appraiser.appraise(given, estimate_launch(given)).needed_bytes == 3 * 2**30
    assert appraiser.appraise(given, estimate_launch(given)).context_tokens == 50


# ---------------------------------------------------------------- what a worker says

READY = Ready(context_length=1, fingerprint="x", backend="cpu", active_bytes=5000, own_bytes=1)


@pytest.mark.parametrize(
    "ready",
    [
        replace(READY, active_bytes=0),
        replace(READY, active_bytes=-1),
        replace(READY, own_bytes=-1),
        replace(READY, cache_layers=[CacheLayers(layers=-1)]),
        replace(READY, cache_layers=[CacheLayers(layers=1, token_bytes=-1)]),
        replace(READY, cache_layers=[CacheLayers(layers=1, row_bytes=-1)]),
        replace(READY, cache_layers=[CacheLayers(layers=1, window=-1)]),
    ],
)
def test_what_makes_no_sense_is_not_remembered(tmp_path: Path, ready: Ready) -> None:
    write_folder(tmp_path, llama_config(), llama_arrays())
    assert measured_by(launch(tmp_path), READY, stamp(tmp_path)) is not None
    assert measured_by(launch(tmp_path), ready, stamp(tmp_path)) is None
