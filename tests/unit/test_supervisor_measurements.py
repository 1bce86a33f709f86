"""What models need: estimated, measured, raised, remembered; and what cannot fit."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.worker_messages import Ready
from mlxsup.supervisor.config.load import ConfigError, DaemonConfig, load_config
from mlxsup.supervisor.core.memory.need import Figure, Need, Source
from mlxsup.supervisor.memory import estimator as estimator_module
from mlxsup.supervisor.memory.estimator import (
    FIRST_GUESS_BYTES,
    LEAST_TOKENS,
    MemoryEstimator,
    check_memory,
    check_needs,
    measured_by,
)
from mlxsup.supervisor.memory.folder import fingerprint, stamp
from mlxsup.supervisor.memory.machine import find_budget
from mlxsup.supervisor.memory.measurements import FILE_NAME, Measured, Measurements, Raised

from support.estimates_here import UNSERVED, estimated, estimates_here
from support.safetensors_files import llama_arrays, llama_config, write_folder

__all__ = ["estimates_here"]

pytestmark = pytest.mark.usefixtures("estimates_here")

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


def test_learn_is_known_to_the_next_daemon(tmp_path: Path) -> None:
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


def test_learn_raised_is_known_to_the_next_daemon(
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


def test_learn_does_not_write_a_known_measurement(tmp_path: Path) -> None:
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


def test_an_unwritten_measurement_is_known_while_the_daemon_lives(tmp_path: Path) -> None:
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


# ---------------------------------------------------------------- what a model needs


def launch(folder: Path, **more: Any) -> LaunchSettings:
    return LaunchSettings(path=str(folder), **more)


def test_before_it_was_loaded_everything_is_an_estimate(tmp_path: Path) -> None:
    size = write_folder(tmp_path / "m", llama_config(), llama_arrays())
    need = MemoryEstimator("cpu", Measurements(tmp_path)).need_of(
        launch(tmp_path / "m"), estimated(launch(tmp_path / "m"))
    )
    assert need.weights == Figure(size_bytes=size, source=Source.ESTIMATED)
    assert need.own == Figure(size_bytes=FIRST_GUESS_BYTES["cpu"], source=Source.ESTIMATED)
    assert need.layers == (CacheLayers(layers=2, token_bytes=2 * 32 * 2),)
    assert need.layers_source is Source.ESTIMATED
    assert (need.context_tokens, need.least_tokens, need.max_rows) == (8192, LEAST_TOKENS, 8)
    assert (need.given_bytes, need.remark, need.is_measured) == (None, "", False)


def test_need_of_prefers_measurements(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(model_type="novel"), llama_arrays())
    measurements = Measurements(tmp_path)
    estimator = MemoryEstimator("cpu", measurements)
    assert (
        "mlx-lm does not know its type"
        in estimator.need_of(launch(folder), estimated(launch(folder))).remark
    )
    ready = Ready(context_length=8192, fingerprint="x", backend="cpu", active_bytes=5000,
                  own_bytes=300, cache_layers=list(LAYERS))  # fmt: skip
    measured = measured_by(launch(folder), ready, stamp(folder))
    assert measured is not None
    measurements.learn(measured)
    need = estimator.need_of(launch(folder), estimated(launch(folder)))
    assert need.weights == Figure(size_bytes=5000, source=Source.MEASURED)
    assert need.own == Figure(size_bytes=300, source=Source.MEASURED)
    assert (need.layers, need.layers_source, need.remark) == (LAYERS, Source.MEASURED, "")
    assert need.is_measured
    # Another backend keeps other things.
    assert (
        not MemoryEstimator("cuda", measurements)
        .need_of(launch(folder), estimated(launch(folder)))
        .is_measured
    )


def test_a_process_is_guessed_from_the_largest_of_the_same_backend(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    measurements = Measurements(tmp_path)
    measurements.learn(ONE)
    measurements.learn(replace(ONE, path="/models/two", own_bytes=700))
    measurements.learn(replace(ONE, path="/models/three", own_bytes=None))
    measurements.learn(replace(ONE, path="/models/four", backend="cuda", own_bytes=9000))
    need = MemoryEstimator("cpu", measurements).need_of(
        launch(tmp_path / "m"), estimated(launch(tmp_path / "m"))
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
    need = MemoryEstimator("cpu", Measurements(tmp_path)).need_of(settings, estimated(settings))
    assert (need.context_tokens, need.least_tokens) == (context, least)


def test_need_of_adds_raised_bytes_until_the_files_change(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(), llama_arrays())
    measurements = Measurements(tmp_path)
    estimator = MemoryEstimator("cpu", measurements)
    before = estimator.need_of(launch(folder), estimated(launch(folder))).needed_bytes
    kept = Raised(
        path=str(folder), backend="cpu", fingerprint=fingerprint(stamp(folder)), raised_bytes=70
    )
    measurements.learn_raised(kept)
    assert estimator.need_of(launch(folder), estimated(launch(folder))).needed_bytes == before + 70
    assert (
        MemoryEstimator("cuda", measurements)
        .need_of(launch(folder), estimated(launch(folder)))
        .raised_bytes
        == 0
    )
    write_folder(folder, llama_config(), llama_arrays(layers=3))
    assert estimator.need_of(launch(folder), estimated(launch(folder))).raised_bytes == 0


def test_the_entry_gives_memory_and_rows(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    settings = launch(tmp_path / "m", memory_limit_bytes=2**30, max_concurrency=3)
    need = MemoryEstimator("cpu", Measurements(tmp_path)).need_of(settings, estimated(settings))
    assert (need.given_bytes, need.needed_bytes, need.max_rows) == (2**30, 2**30, 3)


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
def test_measured_by_ignores_negative_sizes(tmp_path: Path, ready: Ready) -> None:
    write_folder(tmp_path, llama_config(), llama_arrays())
    assert measured_by(launch(tmp_path), READY, stamp(tmp_path)) is not None
    assert measured_by(launch(tmp_path), ready, stamp(tmp_path)) is None


MIB = 2**20
LAYERS_OF_READY = (
    CacheLayers(layers=3, token_bytes=64),
    CacheLayers(layers=1, row_bytes=16, window=9),
)


@pytest.fixture
def whole(tmp_path: Path) -> LaunchSettings:
    """A llama with a context of 8192 tokens."""
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    return LaunchSettings(path=str(tmp_path / "m"))


# ---------------------------------------------------------------- nothing was measured


@pytest.mark.parametrize(("backend", "mib"), [("cpu", 256), ("metal", 256), ("cuda", 768)])
def test_a_process_is_guessed_by_the_backend(
    tmp_path: Path, whole: LaunchSettings, backend: str, mib: int
) -> None:
    need = MemoryEstimator(backend, Measurements(tmp_path)).need_of(whole, estimated(whole))
    assert need.own == Figure(size_bytes=mib * MIB, source=Source.ESTIMATED)


@pytest.mark.parametrize(("declared", "least"), [(4095, 4095), (4096, 4096), (4097, 4096)])
def test_memory_is_reserved_for_4096_tokens_or_a_shorter_context(
    tmp_path: Path, whole: LaunchSettings, declared: int, least: int
) -> None:
    config = llama_config(max_position_embeddings=declared)
    write_folder(tmp_path / "m", config, llama_arrays())
    need = MemoryEstimator("cpu", Measurements(tmp_path)).need_of(whole, estimated(whole))
    assert (need.context_tokens, need.least_tokens) == (declared, least)


def test_a_measurement_without_layers_leaves_the_estimate_and_its_remark(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(model_type="novel"), llama_arrays())
    whole, measurements = LaunchSettings(path=str(folder)), Measurements(tmp_path)
    before = MemoryEstimator("cpu", measurements).need_of(whole, estimated(whole))
    kept = Measured(
        path=str(folder), backend="cpu", fingerprint=fingerprint(stamp(folder)), weight_bytes=5000,
        own_bytes=0, layers=(),
    )  # fmt: skip
    measurements.learn(kept)
    need = MemoryEstimator("cpu", measurements).need_of(whole, estimated(whole))
    assert need == replace(
        before,
        weights=Figure(size_bytes=5000, source=Source.MEASURED),
        own=Figure(size_bytes=0, source=Source.MEASURED),
    )
    assert need.remark == UNSERVED


# ---------------------------------------------------------------- the fake engine


def fake_need(folder: Path, **options: Any) -> Need:
    whole = LaunchSettings(engine="fake", fake=options)
    return MemoryEstimator("cpu", Measurements(folder)).need_of(whole, estimated(whole))


def test_a_fake_model_has_a_process_and_no_weights(tmp_path: Path) -> None:
    whole = LaunchSettings(engine="fake", max_concurrency=3, memory_limit_bytes=7)
    assert MemoryEstimator("cpu", Measurements(tmp_path)).need_of(whole, estimated(whole)) == Need(
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
    whole = LaunchSettings(engine="fake", context_length=asked, fake={"context_length": declared})
    need = MemoryEstimator("cpu", Measurements(folder)).need_of(whole, estimated(whole))
    return need.context_tokens, need.least_tokens


@pytest.mark.parametrize("declared", ["100", True, 1.5, None])
def test_a_context_that_is_no_number_is_the_usual_one(tmp_path: Path, declared: object) -> None:
    assert contexts(tmp_path, 0, declared) == (4096, 4096)


# ---------------------------------------------------------------- what is remembered

READY_OF_METAL = Ready(
    context_length=1, fingerprint="x", backend="metal", active_bytes=5000, own_bytes=300,
    cache_layers=list(LAYERS_OF_READY),
)  # fmt: skip


def test_a_measurement_is_remembered_with_the_files_that_it_is_of(
    whole: LaunchSettings,
) -> None:
    kept = Measured(
        path=whole.path,
        backend="metal",
        fingerprint=fingerprint(stamp(Path(whole.path))),
        weight_bytes=5000,
        own_bytes=300,
        layers=LAYERS_OF_READY,
    )
    assert measured_by(whole, READY_OF_METAL, stamp(Path(whole.path))) == kept
    unknown = replace(READY_OF_METAL, own_bytes=None, cache_layers=[])
    assert measured_by(whole, unknown, stamp(Path(whole.path))) == replace(
        kept, own_bytes=None, layers=()
    )


def test_nothing_is_remembered_of_files_that_could_not_be_looked_at(
    whole: LaunchSettings,
) -> None:
    """As those of the fake engine, which has none."""
    assert measured_by(whole, READY_OF_METAL, None) is None


def config_of(folder: Path, budget: str, entry: str) -> DaemonConfig:
    """Two models of the same small folder, each with these keys, and one that is missing."""
    write_folder(folder / "model", llama_config(), llama_arrays())
    path = folder / "mlxsup.toml"
    models = "".join(f'[models.{name}]\npath = "model"\n{entry}\n' for name in "ab")
    gone = '[models.gone]\npath = "gone"\npinned = true\n'
    path.write_text(f'[supervisor]\nmemory_budget = "{budget}"\n{models}{gone}')
    return load_config(path)


def problems_of(config: DaemonConfig) -> list[str]:
    """What `config check` says of it."""
    try:
        check_memory(config)
    except ConfigError as error:
        return error.problems
    return []


def test_pinned_models_without_memory_that_do_not_fit_together_are_found(tmp_path: Path) -> None:
    config = config_of(tmp_path, "300MiB", "pinned = true")
    with pytest.raises(ConfigError) as caught:
        check_memory(config)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{config.config_path}: the pinned models a (")
    assert problem.endswith("unpin one, or raise supervisor.memory_budget")


def test_those_that_fit_are_not(tmp_path: Path) -> None:
    check_memory(config_of(tmp_path, "2GiB", "pinned = true"))


def test_a_memory_below_the_weights_is_found_for_each_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(config_of(tmp_path, "2GiB", "memory = 1"))
    where = f"{tmp_path / 'mlxsup.toml'}: models"
    first, second = caught.value.problems
    assert first.startswith(f"{where}.a.memory is not enough: its memory is 1 B, and it needs")
    assert second.startswith(f"{where}.b.memory is not enough")


def test_both_kinds_of_mistakes_are_found_at_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, "2GiB", 'pinned = true\nmemory = "300KiB"')
    problems = problems_of(replace(config, memory_budget=2**19))
    assert [problem.partition(": ")[2][:22] for problem in problems] == [
        "models.a.memory is not", "models.b.memory is not", "the pinned models a (0",
    ]  # fmt: skip


def test_pinned_models_fit_up_to_the_last_byte_and_others_do_not_count(tmp_path: Path) -> None:
    config = config_of(tmp_path, "2GiB", "pinned = true")
    need = MemoryEstimator("cpu", Measurements(tmp_path)).need_of(
        config.models[0].launch, estimated(config.models[0].launch)
    )
    raised = replace(need, raised_bytes=2**30)  # what was raised can be given up
    needs = {ModelName("a"): need, ModelName("b"): raised}
    whole = 2 * need.needed_bytes
    budget = find_budget(whole, "cpu")
    check_needs(config, needs, budget)
    with pytest.raises(ConfigError, match=r"the pinned models a .* and b .* need"):
        check_needs(config, needs, replace(budget, size_bytes=whole - 1))
    models = (config.models[0], replace(config.models[1], pinned=False))
    check_needs(replace(config, models=models), needs, replace(budget, size_bytes=whole // 2))


def test_without_a_budget_pinned_models_are_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon starts, and says in its log that it does not know the memory of the GPU."""

    def ask(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", ask)
    monkeypatch.setattr(estimator_module, "find_backend", lambda: "cuda")
    automatic = replace(config_of(tmp_path, "1MiB", "pinned = true"), memory_budget=None)
    check_memory(automatic)
    automatic = replace(config_of(tmp_path, "1MiB", "memory = 1"), memory_budget=None)
    with pytest.raises(ConfigError) as caught:
        check_memory(automatic)
    assert len(caught.value.problems) == 2


def test_check_memory_counts_measured_weights_and_not_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimator_module, "find_backend", lambda: "cpu")
    config = config_of(tmp_path, "2GiB", "")
    folder = config.models[0].launch.path
    layers = (
        MemoryEstimator("cpu", Measurements(tmp_path))
        .need_of(config.models[0].launch, estimated(config.models[0].launch))
        .layers
    )
    measured = Measured(
        path=folder,
        backend="cpu",
        fingerprint=fingerprint(stamp(Path(folder))),
        weight_bytes=2**28,
        own_bytes=2**29,
        layers=layers,
    )
    least = 2**28 + cache_bytes(layers, rows=1, longest=GROWTH_TOKENS)
    for memory, count in ((least, 0), (least - 1, 2)):
        config = replace(config_of(tmp_path, "2GiB", f"memory = {memory}"), runtime_dir=tmp_path)
        Measurements(tmp_path).learn(
            replace(measured, fingerprint=fingerprint(stamp(Path(folder))))
        )  # the folder is written anew each time
        assert len(problems_of(config)) == count


def test_an_unreadable_file_is_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert "(Is a directory)" in Measurements(tmp_path).problem


def test_need_of_estimates_own_bytes_on_a_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(), llama_arrays())
    measurements = Measurements(tmp_path)
    measurements.learn(
        replace(ONE, path=str(folder), backend="cuda", fingerprint=fingerprint(stamp(folder)),
                own_bytes=None, layers=())
    )  # fmt: skip
    need = MemoryEstimator("cuda", measurements).need_of(launch(folder), estimated(launch(folder)))
    assert need.weights.source is Source.MEASURED
    assert need.own == Figure(size_bytes=FIRST_GUESS_BYTES["cuda"], source=Source.ESTIMATED)
    assert need.layers_source is Source.ESTIMATED
