"""What models need: estimated, measured, raised, remembered; and what cannot fit."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import GroupHost, LaunchSettings
from mlxsup.protocol.worker_messages import Ready
from mlxsup.supervisor.config.load import ConfigError, DaemonConfig, load_config
from mlxsup.supervisor.core.budget import Figure, Need, Source
from mlxsup.supervisor.core.settings import ModelSettings
from mlxsup.supervisor.memory import needs as needs_module
from mlxsup.supervisor.memory.folder import fingerprint, stamp
from mlxsup.supervisor.memory.machine import find_budget
from mlxsup.supervisor.memory.measurements import FILE_NAME, Measured, Measurements
from mlxsup.supervisor.memory.needs import (
    check_memory,
    check_needs,
    measured_by,
    needs_without_daemon,
)

from support.daemon.estimates_here import UNSERVED, estimated, estimates_here
from support.models.safetensors_files import (
    llama_arrays,
    llama_config,
    write_folder,
    write_weights,
)

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


@pytest.mark.parametrize("is_measured_first", [True, False])
def test_learn_raised_is_known_to_the_next_daemon(tmp_path: Path, is_measured_first: bool) -> None:
    first = Measurements(tmp_path)
    if is_measured_first:
        first.learn(replace(ONE, own_bytes=1))
    first.learn_raised("/models/one", "cpu", "f1", 70)
    known = Measurements(tmp_path).find("/models/one", "cpu", "f1")
    assert known is not None
    assert (known.raised_bytes, known.weight_bytes) == (70, 1000 if is_measured_first else None)
    first.learn(ONE)
    again = Measurements(tmp_path)
    assert again.find("/models/one", "cpu", "f1") == replace(ONE, raised_bytes=70)
    again.learn(replace(ONE, fingerprint="f2"))
    assert again.find("/models/one", "cpu", "f2") == replace(ONE, fingerprint="f2")


def test_learn_does_not_write_a_known_measurement(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path)
    measurements.learn(ONE)
    (tmp_path / FILE_NAME).unlink()
    measurements.learn(ONE)
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_are_kept_and_the_oldest_is_forgotten(tmp_path: Path) -> None:
    known = [stored(path=f"/models/{number}")["models"][0] for number in range(1000)]
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


def stored(**others: object) -> dict[str, Any]:
    """The content of a file with one entry, which has other values than `ONE` has."""
    one = {"path": "/models/one", "backend": "cpu", "fingerprint": "f1", "weight_bytes": 1000,
           "own_bytes": 200, "layers": []}  # fmt: skip
    return {"format": 3, "models": [one | others]}


DAMAGED: list[object] = [[], stored() | {"format": 1}, {"format": 3}, stored(raised_bytes=-1)]
"""The codec's own tests have the rest."""


@pytest.mark.parametrize("value", DAMAGED, ids=lambda value: json.dumps(value)[:60])
def test_a_damaged_file_is_one_sentence_and_a_new_beginning(tmp_path: Path, value: object) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(value))
    measurements = Measurements(tmp_path)
    assert measurements.problem == f"{path} is ignored (it is damaged); models are measured again"
    assert measurements.largest_own_bytes("cpu") is None
    measurements.learn(ONE)
    assert Measurements(tmp_path).find("/models/one", "cpu", "f1") == ONE


@pytest.mark.parametrize("begin", [b"", b'{"format": 3, "models": '])
def test_brackets_without_end_are_damage_as_well(tmp_path: Path, begin: bytes) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(begin + b"[" * 100_000)
    assert "(it is damaged)" in Measurements(tmp_path).problem
    path.unlink()
    path.mkdir()
    assert "(Is a directory)" in Measurements(tmp_path).problem


# ---------------------------------------------------------------- what a model needs


@pytest.fixture
def measurements(tmp_path: Path) -> Measurements:
    return Measurements(tmp_path)


@pytest.fixture
def llama(tmp_path: Path) -> LaunchSettings:
    """A llama with a context of 8192 tokens."""
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    return LaunchSettings(path=str(tmp_path / "m"))


def need_of(
    settings: LaunchSettings, measurements: Measurements, backend: str = "cpu", **more: Any
) -> Need:
    """Return what a model with this launch needs on a machine with this backend."""
    settings = replace(settings, **more)
    return needs_module.need_of(settings, estimated(settings), measurements, backend)


def measured(settings: LaunchSettings, **more: Any) -> Measured:
    """Return a measurement of the files that are in the folder now."""
    files = fingerprint(stamp(Path(settings.path)))
    return replace(ONE, **{"path": settings.path, "fingerprint": files, **more})


def test_before_it_was_loaded_everything_is_an_estimate(
    tmp_path: Path, measurements: Measurements
) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    settings = LaunchSettings(path=str(tmp_path / "m"))
    need = need_of(settings, measurements)
    assert need.weights == Figure(size_bytes=size, source=Source.ESTIMATED)
    assert need.layers == (CacheLayers(layers=2, token_bytes=2 * 32 * 2),)
    assert need.layers_source is Source.ESTIMATED
    assert (need.given_bytes, need.remark, need.is_measured, need.max_rows) == (None, "", False, 8)
    given = need_of(settings, measurements, memory_limit_bytes=2**30, max_concurrency=3)
    assert (given.given_bytes, given.needed_bytes, given.max_rows) == (2**30, 2**30, 3)


def test_a_host_of_a_group_takes_its_share_of_weights_and_caches(
    llama: LaunchSettings, measurements: Measurements
) -> None:
    alone = need_of(llama, measurements)
    share = need_of(llama, measurements, hosts=(GroupHost(), GroupHost()))
    assert share.weights.size_bytes == alone.weights.size_bytes // 2
    assert share.layers == (replace(alone.layers[0], layers=alone.layers[0].layers // 2),)


def test_a_model_with_adapters_takes_no_pictures(
    tmp_path: Path, measurements: Measurements
) -> None:
    write_folder(
        tmp_path / "m", llama_config(model_type="gemma3", vision_config={}), llama_arrays()
    )
    settings = LaunchSettings(path=str(tmp_path / "m"))
    assert need_of(settings, measurements).takes_pictures
    assert not need_of(settings, measurements, adapters={"a": "/none"}).takes_pictures


def test_need_of_prefers_measurements(tmp_path: Path, measurements: Measurements) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(model_type="novel"), llama_arrays())
    settings = LaunchSettings(path=str(folder))
    assert need_of(settings, measurements).remark == UNSERVED
    measurements.learn(measured(settings))
    need = need_of(settings, measurements)
    assert need.weights == Figure(size_bytes=1000, source=Source.MEASURED)
    assert need.own == Figure(size_bytes=200, source=Source.MEASURED)
    assert (need.layers, need.layers_source, need.remark) == (LAYERS, Source.MEASURED, "")
    assert need.is_measured
    # Another backend keeps other things.
    assert not need_of(settings, measurements, "cuda").is_measured


def test_a_process_is_guessed_from_the_largest_of_the_same_backend(
    llama: LaunchSettings, measurements: Measurements
) -> None:
    measurements.learn(ONE)
    measurements.learn(replace(ONE, path="/models/two", own_bytes=700))
    measurements.learn(replace(ONE, path="/models/three", own_bytes=None))
    measurements.learn(replace(ONE, path="/models/four", backend="cuda", own_bytes=9000))
    own = need_of(llama, measurements).own
    assert own == Figure(size_bytes=700, source=Source.ESTIMATED)


@pytest.mark.parametrize(
    ("declared", "asked", "context", "least"),
    [
        (8192, 0, 8192, 4096),
        (8192, 6000, 6000, 6000),
        (8192, 1000, 1000, 1000),
        (8192, 99999, 8192, 8192),
        (4095, 0, 4095, 4095),
        (4097, 0, 4097, 4096),
    ],
)
def test_memory_is_reserved_for_the_context_that_is_asked_for(
    tmp_path: Path, measurements: Measurements, declared: int, asked: int, context: int, least: int
) -> None:
    write_folder(tmp_path / "m", llama_config(max_position_embeddings=declared), llama_arrays())
    settings = LaunchSettings(path=str(tmp_path / "m"), context_length=asked)
    need = need_of(settings, measurements)
    assert (need.context_tokens, need.least_tokens) == (context, least)


def test_need_of_adds_raised_bytes_until_the_files_change(
    llama: LaunchSettings, measurements: Measurements
) -> None:
    before = need_of(llama, measurements).needed_bytes
    files = fingerprint(stamp(Path(llama.path)))
    measurements.learn_raised(llama.path, "cpu", files, 70)
    assert need_of(llama, measurements).needed_bytes == before + 70
    assert need_of(llama, measurements, "cuda").raised_bytes == 0
    write_folder(Path(llama.path), llama_config(), llama_arrays(layers=3))
    assert need_of(llama, measurements).raised_bytes == 0


# ---------------------------------------------------------------- what a worker says

READY = Ready(
    context_length=1, fingerprint="x", backend="cpu", active_bytes=1000, own_bytes=200,
    cache_layers=list(LAYERS),
)  # fmt: skip


def test_a_worker_that_holds_nothing_has_measured_nothing(llama: LaunchSettings) -> None:
    assert measured_by(llama, replace(READY, active_bytes=0), stamp(Path(llama.path))) is None


MIB = 2**20


@pytest.mark.parametrize("own_bytes", [0, None])
def test_a_measurement_without_layers_leaves_the_estimate_and_its_remark(
    tmp_path: Path, measurements: Measurements, own_bytes: int | None
) -> None:
    folder = tmp_path / "m"
    write_folder(folder, llama_config(model_type="novel"), llama_arrays())
    settings = LaunchSettings(path=str(folder))
    before = need_of(settings, measurements)
    measurements.learn(measured(settings, own_bytes=own_bytes, layers=()))
    own = before.own if own_bytes is None else Figure(size_bytes=0, source=Source.MEASURED)
    weights = Figure(size_bytes=1000, source=Source.MEASURED)
    assert need_of(settings, measurements) == replace(before, weights=weights, own=own)
    assert before.remark == UNSERVED


def test_a_command_counts_the_adapters_of_a_model(
    tmp_path: Path, llama: LaunchSettings, measurements: Measurements
) -> None:
    (tmp_path / "poet").mkdir()
    write_weights(tmp_path / "poet" / "adapters.safetensors", llama_arrays())
    name = ModelName("m")
    launches = (llama, replace(llama, adapters={"poet": str(tmp_path / "poet")}))
    plain, wise = (
        needs_without_daemon([ModelSettings(name=name, launch=one)], "cpu", measurements)[name]
        for one in launches
    )
    assert isinstance(plain, Need)
    assert isinstance(wise, Need)
    assert wise.weights.size_bytes > plain.weights.size_bytes


# ---------------------------------------------------------------- the fake engine


def fake_need(measurements: Measurements, **options: Any) -> Need:
    return need_of(LaunchSettings(engine="fake", fake=options), measurements)


def test_a_fake_model_has_a_process_and_no_weights(measurements: Measurements) -> None:
    settings = LaunchSettings(engine="fake", max_concurrency=3, memory_limit_bytes=7)
    assert need_of(settings, measurements) == Need(
        weights=Figure(size_bytes=0, source=Source.MEASURED),
        own=Figure(size_bytes=64 * MIB, source=Source.GIVEN),
        layers=(),
        layers_source=Source.MEASURED,
        context_tokens=4096,
        least_tokens=4096,
        max_rows=3,
        given_bytes=7,
    )


def test_the_tokens_of_a_fake_model_take_what_its_options_say(measurements: Measurements) -> None:
    for size in (1, 500):
        layers = fake_need(measurements, token_bytes=size).layers
        assert layers == (CacheLayers(layers=1, token_bytes=size),)
    for nothing in (0, -1, True, "500", None):
        assert fake_need(measurements, token_bytes=nothing).layers == (), nothing


@pytest.mark.parametrize(
    ("asked", "declared", "tokens"),
    [
        (0, 100, 100), (50, 100, 50), (200, 100, 100),
        *((0, wrong, 4096) for wrong in ("100", True, 1.5, None)),
    ],
)  # fmt: skip
def test_the_context_of_a_fake_model_is_the_smaller_of_what_is_asked_and_declared(
    measurements: Measurements, asked: int, declared: object, tokens: int
) -> None:
    settings = LaunchSettings(
        engine="fake", context_length=asked, fake={"context_length": declared}
    )
    need = need_of(settings, measurements)
    assert (need.context_tokens, need.least_tokens) == (tokens, tokens)


def test_measured_by_names_the_files_that_were_measured(llama: LaunchSettings) -> None:
    files = stamp(Path(llama.path))
    assert measured_by(llama, READY, files) == measured(llama)
    unknown = replace(READY, own_bytes=None, cache_layers=[])
    assert measured_by(llama, unknown, files) == measured(llama, own_bytes=None, layers=())
    assert measured_by(llama, READY, None) is None, "the fake engine has no files"


def config_of(folder: Path, budget: str, entry: str) -> DaemonConfig:
    """Two models of the same small folder, each with these keys, and one that is missing."""
    write_folder(folder / "model", llama_config(), llama_arrays())
    path = folder / "mlxsup.toml"
    models = "".join(f'[models.{name}]\npath = "model"\n{entry}\n' for name in "ab")
    gone = '[models.gone]\npath = "gone"\npinned = true\n'
    path.write_text(f'[supervisor]\nmemory_budget = "{budget}"\n{models}{gone}')
    return load_config(path)


def problems_of(config: DaemonConfig) -> list[str]:
    """Return what `config check` says of it."""
    try:
        check_memory(config)
    except ConfigError as error:
        return error.problems
    return []


def test_both_kinds_of_mistakes_are_found_at_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, "2GiB", 'pinned = true\nmemory = "300KiB"')
    first, second, pinned = problems_of(replace(config, memory_budget=2**19))
    where = f"{tmp_path / 'mlxsup.toml'}: "
    says = "memory is not enough: its memory is 0.3 MiB, but it needs"
    assert first.startswith(f"{where}models.a.{says}")
    assert second.startswith(f"{where}models.b.{says}")
    assert pinned.startswith(f"{where}the pinned models a (")
    assert pinned.endswith("unpin one, or raise supervisor.memory_budget")


def test_pinned_models_fit_up_to_the_last_byte_and_others_do_not_count(
    tmp_path: Path, measurements: Measurements
) -> None:
    config = config_of(tmp_path, "2GiB", "pinned = true")
    need = need_of(config.models[0].launch, measurements)
    raised = replace(need, raised_bytes=2**30)  # what was raised can be given up
    needs = {ModelName("a"): need, ModelName("b"): raised}
    both = 2 * need.needed_bytes
    budget = find_budget(both, "cpu")
    check_needs(config, needs, budget)
    with pytest.raises(ConfigError, match=r"the pinned models a .* and b .* need"):
        check_needs(config, needs, replace(budget, size_bytes=both - 1))
    models = (config.models[0], replace(config.models[1], pinned=False))
    check_needs(replace(config, models=models), needs, replace(budget, size_bytes=both // 2))


def test_without_a_budget_pinned_models_are_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon starts, and says in its log that it does not know the memory of the GPU."""

    def ask(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", ask)
    monkeypatch.setattr(needs_module, "find_backend", lambda: "cuda")
    for entry, count in (("pinned = true", 0), ("memory = 1", 2)):
        config = config_of(tmp_path, "1MiB", entry)
        assert len(problems_of(replace(config, memory_budget=None))) == count


def test_check_memory_counts_measured_weights_and_not_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measurements: Measurements
) -> None:
    monkeypatch.setattr(needs_module, "find_backend", lambda: "cpu")
    settings = config_of(tmp_path, "2GiB", "").models[0].launch
    layers = need_of(settings, measurements).layers
    least = 2**28 + cache_bytes(layers, rows=1, longest=GROWTH_TOKENS)
    for memory, count in ((least, 0), (least - 1, 2)):
        config = replace(config_of(tmp_path, "2GiB", f"memory = {memory}"), runtime_dir=tmp_path)
        measurements.learn(
            measured(settings, weight_bytes=2**28, own_bytes=2**29, layers=layers)
        )  # the folder is written anew each time
        assert len(problems_of(config)) == count
