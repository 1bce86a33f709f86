"""`config check` finds what `start` refuses: both ask what the models need, by their files."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.config.load import ConfigError, DaemonConfig, load_config
from mlxsup.supervisor.memory import problems as problems_module
from mlxsup.supervisor.memory.appraiser import Appraiser
from mlxsup.supervisor.memory.estimator import estimate_launch
from mlxsup.supervisor.memory.folder import fingerprint, stamp
from mlxsup.supervisor.memory.machine import find_budget
from mlxsup.supervisor.memory.measurements import Measured, Measurements
from mlxsup.supervisor.memory.problems import check_memory, check_needs

from support.safetensors_files import llama_arrays, llama_config, write_folder


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


def test_without_a_file_the_mistakes_name_none(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, "2GiB", "memory = 1"), config_path=None)
    with pytest.raises(ConfigError) as caught:
        check_memory(config)
    first, second = caught.value.problems
    assert first.startswith("models.a.memory is not enough: ")
    assert second.startswith("models.b.memory is not enough: ")


def test_pinned_models_fit_up_to_the_last_byte_and_others_do_not_count(tmp_path: Path) -> None:
    config = config_of(tmp_path, "2GiB", "pinned = true")
    need = Appraiser("cpu", Measurements(tmp_path)).appraise(
        config.models[0].launch, estimate_launch(config.models[0].launch)
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
    monkeypatch.setattr(problems_module, "find_backend", lambda: "cuda")
    automatic = replace(config_of(tmp_path, "1MiB", "pinned = true"), memory_budget=None)
    check_memory(automatic)
    automatic = replace(config_of(tmp_path, "1MiB", "memory = 1"), memory_budget=None)
    with pytest.raises(ConfigError) as caught:
        check_memory(automatic)
    assert len(caught.value.problems) == 2


def test_what_was_measured_of_a_process_does_not_count_and_its_weights_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems_module, "find_backend", lambda: "cpu")
    config = config_of(tmp_path, "2GiB", "")
    folder = config.models[0].launch.path
    layers = (
        Appraiser("cpu", Measurements(tmp_path))
        .appraise(config.models[0].launch, estimate_launch(config.models[0].launch))
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
    for given, count in ((least, 0), (least - 1, 2)):
        config = replace(config_of(tmp_path, "2GiB", f"memory = {given}"), runtime_dir=tmp_path)
        Measurements(tmp_path).learn(
            replace(measured, fingerprint=fingerprint(stamp(Path(folder))))
        )  # the folder is written anew each time
        assert len(problems_of(config)) == count
